"""Run in a process of its own with two virtual CPU devices; prints one JSON object for `test_varlen.py`."""

import json
import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

from collections import Counter

from deepinfer_jax.engine.requests.sampling_params import SamplingParams
from tests.support.toy import random_prompt, run, tokens
from tests.support.varlen_engine import varlen_engine

if __name__ == "__main__":
    engine = varlen_engine(choose="random", data_parallel_size=2, max_num_seqs=8, num_kv_blocks=20)
    sizes: Counter[int] = Counter()
    decode, data_indices = engine.core.runner.decode, set()

    def counted(step, *arguments):
        sizes[step.bucket.tokens] += 1
        data_indices.update(step.dp_rank.tolist())
        return decode(step, *arguments)

    engine.core.runner.decode = counted  # type: ignore[method-assign]
    for i in range(12):
        params = SamplingParams(max_tokens=2 + i % 9, temperature=0, ignore_eos=True)
        engine.add_request("u", str(i), params, random_prompt(1 + 3 * i % 23, seed=i))
    found = {name: tokens(outputs) for name, outputs in run(engine).items()}
    print(json.dumps({"tokens": found, "steps_by_size": sizes, "data_indices": sorted(data_indices)}))
