"""Tokens per second of the whole engine: 256 requests of mixed lengths at several concurrencies.

    python benchmarks/throughput.py            # about ten minutes on 2 cores; needs a checkout (tests/golden)
    python benchmarks/throughput.py --model mid --concurrency 8

prefill: prompts of 1 … 96 tokens, one output token each; prompt tokens per second.
decode: all slots in use, no prompt left to compute; output tokens per second of the steps.
mixed: prompts of 1 … 96 tokens, 1 … 64 outputs each; output tokens per second, prompts computed on the way.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from deepinfer_jax import LLM, SamplingParams
from deepinfer_jax.checkpoint.tiny import make_tiny

REPOSITORY = Path(__file__).parents[1]
NUM_REQUESTS = 256
MAX_PROMPT, MAX_OUTPUT = 96, 64


@contextmanager
def model_folder(name: str) -> Iterator[Path]:
    """Golden A as it lies in the tests, or a random checkpoint of benchmarks/mid.json."""
    if name == "A":
        yield REPOSITORY / "tests" / "golden" / "A_s28"
        return
    with tempfile.TemporaryDirectory() as directory:
        make_tiny(Path(directory) / name, REPOSITORY / "benchmarks" / f"{name}.json")
        yield Path(directory) / name


def seconds(llm: LLM, prompt_lengths: np.ndarray, output_lengths: np.ndarray) -> float:
    """Wall-clock seconds of one `generate`, greedy, every request as long as asked for."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 180, length).tolist() for length in prompt_lengths]
    params = [SamplingParams(temperature=0, max_tokens=int(length), ignore_eos=True) for length in output_lengths]
    start = time.perf_counter()
    llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
    return time.perf_counter() - start


def decode_rate(llm: LLM, concurrency: int, steps: int = 40) -> float:
    """Output tokens per second while `concurrency` sequences decode and nothing else runs."""
    engine = llm.llm_engine
    how = {"temperature": 0, "max_tokens": MAX_PROMPT + MAX_OUTPUT - 4, "ignore_eos": True}
    for i in range(concurrency):
        engine.add_request("benchmark", f"decode {i}", how, [5, 7 + i])
    started: set[str] = set()
    while len(started) < concurrency:
        started |= {output.request_id for output in engine.step()}
    start = time.perf_counter()
    tokens = sum(len(engine.step()) for _ in range(steps))
    rate = tokens / (time.perf_counter() - start)
    engine.abort_request([f"decode {i}" for i in range(concurrency)])
    while engine.has_unfinished_requests():
        engine.step()
    return rate


def measure(folder: Path, precision: str, concurrency: int, num_requests: int) -> tuple[float, float, float]:
    """Tokens per second of prefill, decode and mixed."""
    llm = LLM(
        folder,
        precision=precision,
        max_num_seqs=concurrency,
        max_model_len=MAX_PROMPT + MAX_OUTPUT,
        decode_sequence=False,
    )
    rng = np.random.default_rng(1)
    prompts = rng.integers(1, MAX_PROMPT + 1, num_requests)
    outputs = rng.integers(1, MAX_OUTPUT + 1, num_requests)
    one = np.ones(num_requests, int)
    seconds(llm, prompts[:16], one[:16])  # the first steps touch fresh memory
    prefill = prompts.sum() / seconds(llm, prompts, one)
    decode = decode_rate(llm, concurrency)
    mixed = outputs.sum() / seconds(llm, prompts, outputs)
    llm.close()
    return prefill, decode, mixed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["A", "mid"], choices=["A", "mid"])
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8, 32, 128])
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--smoke", action="store_true", help="a few seconds, to see that it runs")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.model, arguments.concurrency = ["A"], [2]
    num_requests = 4 if arguments.smoke else NUM_REQUESTS
    print(f"{'model':6}{'concurrency':>12}{'prefill tok/s':>15}{'decode tok/s':>14}{'mixed tok/s':>13}", flush=True)
    for name in arguments.model:
        with model_folder(name) as folder:
            for concurrency in arguments.concurrency:
                prefill, decode, mixed = measure(folder, arguments.precision, concurrency, num_requests)
                print(f"{name:6}{concurrency:12}{prefill:15.0f}{decode:14.0f}{mixed:13.0f}", flush=True)


if __name__ == "__main__":
    main()
