"""Run in a process of its own with four virtual CPU devices; prints one JSON object for `test_sharded_engine.py`."""

import json
import os
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

from real_model import generate, long_golden_a, requests, what_forward_says

from deepinfer_jax import LLM

PRECISION = "float32_exact"
LENGTHS = [1, 2, 15, 16, 17, 33, 64, 100, 117, 5]


def gathered_shapes(llm: LLM) -> list[str]:
    """Shapes of all arrays that the step programs collect from several devices."""
    texts = [program.as_text() for program in llm.llm_engine._runner._programs.values()]
    return sorted({shape for text in texts for shape in re.findall(r"= (\w+\[[\d,]*\])\S* all-gather\(", text)})


def run(data: int, expert: int) -> dict[str, object]:
    with TemporaryDirectory() as directory:
        folder = long_golden_a(Path(directory) / "a")
        llm = LLM(
            folder,
            precision=PRECISION,
            decode_sequence=False,
            data_parallel_size=data,
            expert_parallel_size=expert,
            max_num_seqs=4,
            max_model_len=160,
            tokens_per_block=16,
            num_kv_blocks=11,
        )
        engine = llm.llm_engine
        compiled, wrong = engine.compile_count, []
        for greedy in (True, False):
            prompts, params = requests(LENGTHS, greedy=greedy)
            found = generate(llm, prompts, params)
            for i, (prompt, own, output) in enumerate(zip(prompts, params, found, strict=True)):
                if output != what_forward_says(folder, PRECISION, prompt, own, output):
                    wrong.append((greedy, i))
        stats = engine.stats()
        cache = engine._runner._state.cache  # type: ignore[union-attr]
        return {
            "wrong": wrong,
            "preemptions": stats["num_preemptions"],
            "idle": stats["free_blocks"] == stats["total_blocks"] == 11 * data,
            "compiled": engine.compile_count - compiled,
            "devices": len(cache.windows[0].devices()),
            "indices_per_device": sorted({shard.data.shape[0] for shard in cache.windows[0].addressable_shards}),
            "gathered": gathered_shapes(llm),
        }


if __name__ == "__main__":
    print(json.dumps(run(*map(int, sys.argv[1].split("x")))))
