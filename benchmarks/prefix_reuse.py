"""Time to the first token when a part of the prompt was computed before.

    python benchmarks/prefix_reuse.py            # about two minutes on 2 cores; needs a checkout
    python benchmarks/prefix_reuse.py --tokens 512

Each measurement follows a request that shares that part of the prompt, and nothing else. What can be restored ends at
a block of 128 tokens, and at least one token is always computed.
"""

import argparse
import statistics
import time

import numpy as np
from throughput import model_folder

from deepinfer_jax import EngineArgs, LLMEngine

RATIOS = 0.0, 0.5, 0.9, 1.0
REPEATS = 3


def first_token(engine: LLMEngine, name: str, prompt: list[int]) -> tuple[float, int]:
    """Seconds until the request's only token, and how many of its tokens were restored."""
    start = time.perf_counter()
    engine.add_request("benchmark", name, {"temperature": 0, "max_tokens": 1, "ignore_eos": True}, prompt)
    while not (outputs := engine.step()):
        pass
    return time.perf_counter() - start, outputs[0].num_cached_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mid", choices=["A", "mid"])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--smoke", action="store_true", help="a few seconds, to see that it runs")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.model, arguments.tokens = "A", 96
    repeats = 1 if arguments.smoke else REPEATS
    length = arguments.tokens
    rng = np.random.default_rng(0)
    print(f"{'shared':>8}{'restored':>10}{'seconds':>9}{'of cold':>9}   (prompts of {length} tokens)", flush=True)
    with model_folder(arguments.model) as folder:
        engine = LLMEngine(
            EngineArgs(model=str(folder), precision=arguments.precision, max_num_seqs=1, max_model_len=length + 1)
        )
        first_token(engine, "warm", rng.integers(3, 180, length).tolist())  # the first steps touch fresh memory
        cold = 0.0
        for ratio in RATIOS:
            seconds, restored = [], 0
            for repeat in range(repeats):
                before, after = rng.integers(3, 180, (2, length)).tolist()
                shared = int(ratio * length)
                first_token(engine, f"before {ratio} {repeat}", before)
                taken, restored = first_token(engine, f"{ratio} {repeat}", before[:shared] + after[shared:])
                seconds.append(taken)
            median = statistics.median(seconds)
            cold = cold or median
            print(f"{ratio:8.0%}{restored:10}{median:9.3f}{median / cold:9.3f}", flush=True)
        engine.close()


if __name__ == "__main__":
    main()
