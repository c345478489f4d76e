"""What it costs to move the state of a sequence: snapshots of a slot, and a hand-over between two engines.

    python benchmarks/state_transfer.py          # about a minute on 2 cores; needs a checkout

Bandwidths are given beside that of a plain copy of the same bytes in host memory, latencies beside the time in which
the moved prompt was computed.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from throughput import model_folder

from deepinfer_jax import EngineArgs, EngineType, LLMEngine
from deepinfer_jax.engine.handover import SequenceState

REPEATS = 5
PARAMS = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}


def timed[T](work: Callable[[], T]) -> tuple[float, T]:
    """Seconds that `work` took, and what it gave."""
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def computed(engine: LLMEngine, name: str, prompt: list[int]) -> float:
    """Seconds until a PROMPT engine holds the computed prompt."""
    start = time.perf_counter()
    engine.add_request("benchmark", name, PARAMS, prompt)
    while engine.has_unfinished_requests():
        engine.step()
    return time.perf_counter() - start


def imported(engine: LLMEngine, state: SequenceState) -> float:
    """Seconds from the import to the next token."""
    start = time.perf_counter()
    engine.import_sequence(state)
    while not engine.step():
        pass
    seconds = time.perf_counter() - start
    while engine.has_unfinished_requests():
        engine.step()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mid", choices=["A", "mid"])
    parser.add_argument("--tokens", type=int, default=2000)
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    sizes: dict[str, Any] = {"precision": "float32", "max_num_seqs": 4, "max_model_len": arguments.tokens + 8}
    rows: dict[str, list[float]] = {name: [] for name in ("compute", "export", "save", "load", "import to next token")}
    with model_folder(arguments.model) as folder, tempfile.TemporaryDirectory() as directory:
        prompts = LLMEngine(EngineArgs(model=str(folder), engine_type=EngineType.PROMPT, **sizes))
        completions = LLMEngine(EngineArgs(model=str(folder), engine_type=EngineType.COMPLETION, **sizes))
        file = Path(directory) / "sequence.safetensors"
        for repeat in range(REPEATS + 1):
            compute = computed(prompts, str(repeat), rng.integers(3, 180, arguments.tokens).tolist())
            export, state = timed(lambda name=str(repeat): prompts.export_sequence(name))
            save, _ = timed(lambda state=state: state.save(file))
            load, state = timed(lambda: SequenceState.load(file))
            values = compute, export, save, load, imported(completions, state)
            if repeat:  # the first one touches fresh memory
                for name, value in zip(rows, values, strict=True):
                    rows[name].append(value)
        print(f"hand-over of {arguments.tokens} tokens, {state.nbytes / 1e6:.2f} MB")
        compute = statistics.median(rows["compute"])
        for name, seconds in rows.items():
            median = statistics.median(seconds)
            print(f"{name:22}{median * 1e3:9.2f} ms{median / compute:8.4f} of the prompt's computation", flush=True)
        snapshots(completions, state)


def snapshots(engine: LLMEngine, state: SequenceState) -> None:
    """Prints bandwidths of reading a slot to the host and of writing it back."""
    runner, zero = engine._runner, np.zeros(1, np.int32)  # below the public interface: what a hit does
    sampling = {"temperature": 1, "top_p": 1, "top_k": -1, "greedy": 1, "seed_low": 0, "seed_high": 0}
    columns = {name: np.asarray([value]) for name, value in sampling.items()}

    def write() -> None:
        runner.restore(zero, zero, zero, zero, [[0]], columns, state.slot[None])
        jax.block_until_ready(runner._state)

    works: dict[str, Callable[[], Any]] = {
        "copy in host memory": state.slot.copy,
        "snapshot": lambda: runner.read_slots(zero, zero).result(),
        "restore": write,
    }
    print(f"a slot has {state.slot.nbytes / 1e3:.1f} kB")
    for name, work in works.items():
        seconds = statistics.median(timed(work)[0] for _ in range(50))
        print(f"{name:22}{seconds * 1e3:9.3f} ms{state.slot.nbytes / seconds / 1e9:8.2f} GB/s", flush=True)


if __name__ == "__main__":
    main()
