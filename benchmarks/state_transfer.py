"""Costs of moving the state of a sequence: snapshots of a slot, and a hand-over between two engines.

    python benchmarks/state_transfer.py          # about a minute on 2 cores; needs a checkout

Bandwidths, also at the released model's sizes, are given beside that of a plain copy in host memory; latencies beside
the time in which the moved prompt was computed.
"""

import argparse
import functools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from throughput import REPOSITORY, model_folder

from deepinfer_jax import EngineArgs, EngineType, LLMEngine, ModelConfig, SequenceState
from deepinfer_jax.cache.pools import CacheShape
from deepinfer_jax.config.model_config import Precision, parse_config
from deepinfer_jax.kernels.choice import KernelChoice
from deepinfer_jax.runtime.duties import RunnerDuties
from deepinfer_jax.runtime.paged_model import PagedModel
from deepinfer_jax.runtime.runner import Runner
from deepinfer_jax.runtime.step_input import RESTORE_COLUMNS
from deepinfer_jax.scheduler import BucketTable

REPEATS, COPIES = 5, 50
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
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--smoke", action="store_true", help="a few seconds, to see that it runs")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.model, arguments.tokens = "A", 96
    repeats, copies = (1, 2) if arguments.smoke else (REPEATS, COPIES)
    rng = np.random.default_rng(0)
    sizes: dict[str, Any] = {"precision": "float32", "max_num_seqs": 4, "max_model_len": arguments.tokens + 8}
    rows: dict[str, list[float]] = {name: [] for name in ("compute", "export", "save", "load", "import to next token")}
    with model_folder(arguments.model) as folder, tempfile.TemporaryDirectory() as directory:
        prompts = LLMEngine(EngineArgs(model=str(folder), engine_type=EngineType.PROMPT, **sizes))
        completions = LLMEngine(EngineArgs(model=str(folder), engine_type=EngineType.COMPLETION, **sizes))
        file = Path(directory) / "sequence.safetensors"
        for repeat in range(repeats + 1):
            compute = computed(prompts, str(repeat), rng.integers(3, 180, arguments.tokens).tolist())
            export, state = timed(functools.partial(prompts.export_sequence, str(repeat)))
            save, _ = timed(functools.partial(state.save, file))
            load, state = timed(functools.partial(SequenceState.load, file))
            values = compute, export, save, load, imported(completions, state)
            if repeat:  # the first one touches fresh memory
                for name, value in zip(rows, values, strict=True):
                    rows[name].append(value)
        print(f"hand-over of {arguments.tokens} tokens, {state.nbytes / 1e6:.2f} MB")
        compute = statistics.median(rows["compute"])
        for name, seconds in rows.items():
            median = statistics.median(seconds)
            print(f"{name:22}{median * 1e3:9.2f} ms{median / compute:8.4f} of the prompt's computation", flush=True)
        for engine in (prompts, completions):
            engine.close()
    snapshots("mid", configuration("benchmarks/mid.json"), "float32", copies)
    snapshots("the released model", configuration("tests/configs/released.json"), "reference", copies)


def configuration(path: str) -> ModelConfig:
    """A configuration of the repository."""
    return parse_config(json.loads((REPOSITORY / path).read_text()))


def snapshots(name: str, config: ModelConfig, precision: Precision, copies: int) -> None:
    """Prints bandwidths of reading a slot to the host and of writing it back, on pools without a model."""
    model = PagedModel(config, precision, KernelChoice())
    shape = CacheShape(data=1, slots=4, blocks=4, tokens_per_block=128)
    # No step is run: state ops ask for no parameters.
    duties = RunnerDuties(prefills=False, decodes=False, moves_slots=True)
    runner = Runner(model, {}, buckets=BucketTable((), ()), shape=shape, table_width=4, duties=duties)
    runner.warm_up()
    zero = np.zeros(1, np.int32)
    columns = dict.fromkeys(RESTORE_COLUMNS, zero)  # what is sampled by does not matter here
    state = np.zeros((1, runner.slot_bytes), np.uint8)

    def write() -> None:
        runner.restore(zero, zero, zero + 4096, zero, [[0]], columns, state)
        jax.block_until_ready(runner._state)

    works: dict[str, Callable[[], Any]] = {
        "copy in host memory": state.copy,
        "restore": write,
        "snapshot": lambda: runner.read_slots(zero, zero, zero + 4096).rows(),
    }
    print(f"a slot of {name} has {state.nbytes / 1e6:.3f} MB")
    for work_name, work in works.items():
        seconds = statistics.median(timed(work)[0] for _ in range(copies))
        print(f"{work_name:22}{seconds * 1e3:9.3f} ms{state.nbytes / seconds / 1e9:8.2f} GB/s", flush=True)


if __name__ == "__main__":
    main()
