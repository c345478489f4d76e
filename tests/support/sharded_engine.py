"""Run in a process of its own with four virtual CPU devices; prints one JSON object for `test_sharded_engine.py`."""

import json
import os
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["DEEPINFER_POISON_FREED_STATE"] = "1"

from typing import Any

from deepinfer_jax import LLM, EngineArgs, EngineType, LLMEngine
from tests.support.engine_runs import while_unfinished
from tests.support.real_model import generate, long_golden_a, requests, what_forward_says

PRECISION = "float32_exact"
LENGTHS = [1, 2, 15, 16, 17, 33, 64, 100, 117, 5]


def gathered_shapes(llm: LLM) -> list[str]:
    """Shapes of all arrays that the step programs collect from several devices."""
    texts = [program.as_text() for program in llm.llm_engine.core.runner._programs.steps.values()]
    return sorted({shape for text in texts for shape in re.findall(r"= (\w+\[[\d,]*\])\S* all-gather\(", text)})


def split(sizes: dict[str, Any], prompts: list[list[int]], params: list[Any]) -> list[list[int]]:
    """The tokens of a PROMPT and a COMPLETION engine together."""
    source, target = (
        LLMEngine(EngineArgs(engine_type=engine_type, **sizes))
        for engine_type in (EngineType.PROMPT, EngineType.COMPLETION)
    )
    answers: dict[str, list[int]] = {}
    for i, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
        source.add_request("u", str(i), own, prompt)
    for _ in while_unfinished(source, also=source.computed_requests):
        for engine in (source, target):
            for output in engine.step():
                answers.setdefault(output.request_id, []).append(output.token_id)
        for name in source.computed_requests():
            target.import_sequence(source.export_sequence(name))
    for _ in while_unfinished(target):
        for output in target.step():
            answers[output.request_id].append(output.token_id)
    return [answers[str(i)] for i in range(len(prompts))]


def serve(data: int, expert: int) -> dict[str, object]:
    with TemporaryDirectory() as directory:
        folder = long_golden_a(Path(directory) / "a")
        sizes = {
            "model": folder,
            "precision": PRECISION,
            "data_parallel_size": data,
            "expert_parallel_size": expert,
            "max_num_seqs": 4,
            "max_model_len": 160,
            "tokens_per_block": 16,
            "num_kv_blocks": 11,
        }
        llm = LLM(**sizes, decode_sequence=False)
        engine = llm.llm_engine
        compiled, wrong, repeated = engine.compile_count, [], []
        for greedy in (True, False):
            prompts, params = requests(LENGTHS, greedy=greedy)
            found = generate(llm, prompts, params)
            for i, (prompt, own, output) in enumerate(zip(prompts, params, found, strict=True)):
                if output != what_forward_says(folder, PRECISION, prompt, own, output):
                    wrong.append((greedy, i))
            before = engine.stats()["num_cached_tokens"]
            repeated.append(generate(llm, prompts, params) == found and engine.stats()["num_cached_tokens"] > before)
        stats = engine.stats()
        cache = engine.core.runner._state.cache  # type: ignore[union-attr]
        return {
            "wrong": wrong,
            "repeated_from_cache": repeated,
            "split": split(sizes | {"stop_preempted_request": False}, prompts, params) == found,
            "preemptions": stats["num_preemptions"],
            "idle": stats["free_blocks"] == stats["total_blocks"] == 11 * data,
            "compiled": engine.compile_count - compiled,
            "devices": len(cache.windows[0].devices()),
            "indices_per_device": sorted({shard.data.shape[0] for shard in cache.windows[0].addressable_shards}),
            "gathered": gathered_shapes(llm),
        }


if __name__ == "__main__":
    print(json.dumps(serve(*map(int, sys.argv[1].split("x")))))
