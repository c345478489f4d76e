"""Tokens per second and mean accepted length with 0 … 5 drafts, when every draft holds and when none does.

    python benchmarks/speculation.py            # some minutes on 2 cores; needs a checkout (tests/golden)
    python benchmarks/speculation.py --model A --concurrency 1 8

The rate counts all output tokens of greedy requests that only decode; × first: against the first number of drafts.
"""

import argparse
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from drafted import CONFIGS, drafted_model

from deepinfer_jax import EngineArgs, LLMEngine
from deepinfer_jax.config.model_config import Precision
from deepinfer_jax.engine.environ import env

STEPS = 12  # golden A has 128 positions


def decode_rate(folder: Path, drafts: int, concurrency: int, precision: Precision) -> tuple[float, float]:
    """Output tokens per second, and tokens per decode step of a sequence, of `concurrency` sequences that decode."""
    os.environ["DEEPINFER_USE_NEXTN_DECODE"] = str(drafts)
    env.rearm()
    length = 2 + (drafts + 1) * (STEPS + 4)
    engine = LLMEngine(
        EngineArgs(model=str(folder), precision=precision, max_num_seqs=concurrency, max_model_len=length + 2)
    )
    how = {"temperature": 0, "max_tokens": length, "ignore_eos": True}
    for i in range(concurrency):
        engine.add_request("benchmark", str(i), how, [5, 7 + i])
    started: set[str] = set()
    while len(started) < concurrency:
        started |= {output.request_id for output in engine.step()}
    engine.step()
    start = time.perf_counter()
    tokens = sum(len(engine.step()) for _ in range(STEPS))
    elapsed = time.perf_counter() - start
    engine.close()
    return tokens / elapsed, tokens / (STEPS * concurrency)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=list(CONFIGS), choices=list(CONFIGS))
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--drafts", nargs="+", type=int, default=list(range(6)))
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--smoke", action="store_true", help="a few seconds, to see that it runs")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.model, arguments.concurrency, arguments.drafts = ["A"], [1], [1]
    print(
        f"{'model':6}{'concurrency':>12}  {'draft':8}{'drafts':>7}{'tok/s':>9}{'× first':>8}{'tokens/step':>13}",
        flush=True,
    )
    # Each engine in a process of its own: the programs of all of mid's do not fit into one.
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1)
    for name in arguments.model:
        for agrees in (True, False):
            with drafted_model(name, agrees=agrees) as folder:
                for concurrency in arguments.concurrency:
                    plain = 0.0
                    for drafts in arguments.drafts:
                        measured = pool.submit(decode_rate, folder, drafts, concurrency, arguments.precision)
                        rate, accepted = measured.result()
                        plain = plain or rate
                        row = f"{name:6}{concurrency:12}  {'agrees' if agrees else 'never':8}{drafts:7}"
                        print(f"{row}{rate:9.0f}{rate / plain:8.2f}{accepted:13.2f}", flush=True)


if __name__ == "__main__":
    main()
