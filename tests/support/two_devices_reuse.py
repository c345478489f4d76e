"""Run in a process of its own with two virtual CPU devices; prints one JSON object for `test_data_parallel.py`.

Reuse and hand-over with two dp ranks, with everything that is freed poisoned.
"""

import json
import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ["DEEPINFER_POISON_FREED_STATE"] = "1"

from deepinfer_jax.engine.args import EngineType
from deepinfer_jax.engine.requests.sampling_params import SamplingParams
from tests.support.engine_runs import is_idle, while_unfinished
from tests.support.toy import random_prompt, run, tokens, toy_engine

LENGTHS = [1, 3, 4, 8, 17, 30]
BEGINNINGS = [random_prompt(16, seed=i) for i in range(2)]


def params(i: int) -> SamplingParams:
    return SamplingParams(max_tokens=8, ignore_eos=True, seq_seed=i, temperature=0.9 * (i % 2))


def reuse() -> dict[str, object]:
    """Two texts at once, so one on each dp rank; then four that begin like the first or the second, in turn."""
    engine = toy_engine(data_parallel_size=2)
    wrote, found, answers, cached = {}, {}, [], []
    for i, beginning in enumerate(BEGINNINGS):
        engine.add_request("u", str(i), params(i), beginning)
    for _ in while_unfinished(engine):
        engine.step()
        wrote |= {name: one.dp_rank for name, one in engine.core.open.items() if one.dp_rank >= 0}
    for i in range(4):
        engine.add_request("u", str(i), params(i), BEGINNINGS[i % 2] + random_prompt(5, seed=10 + i))
    results = {str(i): [] for i in range(4)}
    for _ in while_unfinished(engine):
        for output in engine.step():
            results[output.request_id].append(output)
        found |= {name: one.dp_rank for name, one in engine.core.open.items() if one.dp_rank >= 0}
    for outputs in results.values():
        answers.append(tokens(outputs))
        cached.append(outputs[0].num_cached_tokens)
    assert is_idle(engine.stats())
    return {
        "wrote": [wrote[str(i)] for i in range(2)],
        "found": [found[str(i)] for i in range(4)],
        "tokens": answers,
        "cached": cached,
    }


def hand_over(sizes: tuple[int, int]) -> list[list[int]]:
    """From an engine with so many dp ranks to one with so many."""
    source, target = (
        toy_engine(data_parallel_size=size, engine_type=engine_type)
        for size, engine_type in zip(sizes, (EngineType.PROMPT, EngineType.COMPLETION), strict=True)
    )
    for i, length in enumerate(LENGTHS):
        source.add_request("u", str(i), params(i), random_prompt(length, seed=i))
    first: dict[str, int] = {}
    for _ in while_unfinished(source):
        first |= {output.request_id: output.token_id for output in source.step()}
    for name in source.computed_requests():
        target.import_sequence(source.export_sequence(name))
    rest = run(target)
    assert is_idle(source.stats()) and is_idle(target.stats())
    return [[first[str(i)], *tokens(rest[str(i)])] for i in range(len(LENGTHS))]


if __name__ == "__main__":
    print(json.dumps({"reuse": reuse(), "handed": [hand_over(sizes) for sizes in ((2, 2), (1, 2))]}))
