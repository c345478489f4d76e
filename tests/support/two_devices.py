"""Run in a process of its own with two virtual CPU devices; prints one JSON object for `test_data_parallel.py`."""

import json
import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

from deepinfer_jax.engine.requests.sampling_params import SamplingParams
from tests.support.toy import random_prompt, run, tokens, toy_engine

REQUESTS = 16


def serve(**kwargs: object) -> dict[str, object]:
    """Sampled and greedy requests of many lengths, some arriving later, one aborted; and what became of them."""
    engine = toy_engine(stop_preempted_request=False, **kwargs)
    data_indices = set()
    results: dict[str, list[int]] = {}
    for i in range(REQUESTS):
        params = SamplingParams(max_tokens=2 + i % 9, seq_seed=i, temperature=0.9 * (i % 2))
        engine.add_request("u", str(i), params, random_prompt(1 + 5 * i % 31, seed=i))
        for output in engine.step() if i % 4 == 3 else []:
            results.setdefault(output.request_id, []).append(output.token_id)
        data_indices |= {sequence.dp_rank for sequence in engine.core.open.values() if sequence.dp_rank >= 0}
    engine.add_request("u", "gone", SamplingParams(max_tokens=9), [5, 6])
    for output in engine.step():
        results.setdefault(output.request_id, []).append(output.token_id)
    engine.abort_request("gone")
    for request_id, outputs in run(engine).items():
        results.setdefault(request_id, []).extend(tokens(outputs))
    results.pop("gone")
    stats = engine.stats()
    return {
        "tokens": results,
        "data_indices": sorted(data_indices),
        "num_preemptions": stats["num_preemptions"],
        "pools": [stats[name] for name in ("free_blocks", "total_blocks", "free_slots", "total_slots")],
        "cache_devices": len(engine.core.runner._state.cache["tokens"].devices()),
        "aborted": stats["num_finished"]["abort"],
    }


if __name__ == "__main__":
    print(
        json.dumps(
            {
                "one": serve(),
                "two": serve(data_parallel_size=2),
                "tight": serve(data_parallel_size=2, num_kv_blocks=11, max_num_seqs=7),
                "apart": serve(data_parallel_size=2, overlap=False),
            }
        )
    )
