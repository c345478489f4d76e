"""Host time of a decode step of 256 sequences: planning, packing, and results to outputs, with no device behind.

    python benchmarks/scheduler.py

A runner that packs the step's input and returns at once stands in for the device, so an engine iteration is host work
only. The process keeps to one core. Limits: 1.0 ms without drafts, 2.5 ms with five when all six tokens of every row
are taken; with prefix caching, where rows fill their blocks in turn, the same. The states that it captures are of
STATE_BYTES: what copying real ones takes is the host's memory bandwidth, not its work.
"""

import itertools
import os
import statistics
import sys
import time
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt

from deepinfer_jax.engine.args import EngineArgs
from deepinfer_jax.engine.config import MOST_PROGRAMS
from deepinfer_jax.engine.environ import rearm
from deepinfer_jax.engine.llm_engine import LLMEngine
from deepinfer_jax.engine.loading import EngineParts, ModelParts, TokenParts
from deepinfer_jax.engine.requests.sampling_params import SamplingParams
from deepinfer_jax.engine.resolution import resolve_config
from deepinfer_jax.runtime.step_input import pack_decode, pack_prefill
from deepinfer_jax.runtime.step_result import StepResult
from deepinfer_jax.scheduler import DecodeStep, PrefillStep

SEQUENCES = 256
PROMPT = np.arange(4, 36)
STATE_BYTES = 1024
STEPS = 3 if "--smoke" in sys.argv else 300  # the few only show that it runs
PHASES = ("schedule", "launch", "process")
LIMITS = {0: 1.0, 5: 2.5}  # milliseconds, by number of drafts


class Tokenizer:
    eos_token_id = 1


class Done:
    """A step in flight that has arrived."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        return self._result


class States:
    """The slot states of so many rows, arrived."""

    def __init__(self, rows: int) -> None:
        self._num_rows = rows

    def rows(self) -> list[npt.NDArray[np.uint8]]:
        return [np.zeros(STATE_BYTES, np.uint8) for _ in range(self._num_rows)]


class InstantRunner:
    """Packs like `Runner` and returns token 5 for everything that it is asked for."""

    compile_count = 0

    def __init__(self, slots: int) -> None:
        self._slots = slots

    def warm_up(self, progress: bool) -> None: ...

    def prefill(self, step: PrefillStep[Any], columns: dict[str, npt.NDArray[Any]], images: None = None) -> Done:
        pack_prefill(step, 1, self._slots, columns)
        return _result(len(step.sequences), 1)

    def decode(
        self,
        step: DecodeStep[Any],
        forced: npt.NDArray[np.int32] | None,
        masked: npt.NDArray[np.int32] | None,
        wants_top: bool,
    ) -> Done:
        pack_decode(step, 1, self._slots, forced, masked, wants_top)
        return _result(len(step.sequences), step.bucket.time)

    def read_slots(
        self, dp_rank: npt.NDArray[np.int32], slots: npt.NDArray[np.int32], lengths: npt.NDArray[np.int32]
    ) -> States:
        return States(len(slots))


def _result(rows: int, tokens: int) -> Done:
    return Done(
        StepResult(
            tokens=np.full((rows, tokens), 5, np.int32),
            counts=np.full(rows, tokens, np.int32),
            logprobs=np.full((rows, tokens), -0.5, np.float32),
            finite=np.ones(rows, np.bool_),
            verified=np.full(rows, tokens, np.int32),
        )
    )


def instant_engine(num_drafts: int, caching: bool) -> LLMEngine:
    """An engine that never waits for a device."""
    os.environ["DEEPINFER_USE_NEXTN_DECODE"] = str(num_drafts)
    rearm()
    args = EngineArgs(model="none", max_num_seqs=SEQUENCES, disable_log_stats=True, enable_prefix_caching=caching)

    def parts(args: EngineArgs) -> EngineParts:
        config = resolve_config(
            args, vocab_size=300, max_position_embeddings=8192, draft_block=num_drafts, most_prefill_tokens=2048
        )
        runner: Any = InstantRunner(config.num_slots)
        return EngineParts(config, TokenParts(Tokenizer(), 299), ModelParts(config.buckets(MOST_PROGRAMS), runner))

    with mock.patch("deepinfer_jax.engine.llm_engine.load_parts", parts):
        return LLMEngine(args)


def measure(num_drafts: int, caching: bool) -> tuple[float, float, dict[str, float]]:
    """Median and mean milliseconds of the processor for an iteration, and of each phase the mean by the clock."""
    engine = instant_engine(num_drafts, caching)
    for request in range(SEQUENCES):
        # All texts differ, and their lengths modulo a block are spread evenly.
        prompt = np.concatenate([[4 + request], np.resize(PROMPT, 31 + request % 128)])
        engine.add_request("u", str(request), SamplingParams(max_tokens=1 << 20, ignore_eos=True), prompt)
    expected = SEQUENCES * (1 + num_drafts)
    for _ in range(2 * SEQUENCES):  # until all prompts are computed
        if len(engine.step()) == expected:
            break
    before = dict(engine.stats())
    times = []
    for _ in range(STEPS):
        start = time.thread_time()
        outputs = engine.step()
        times.append(time.thread_time() - start)
        assert len(outputs) == expected
    after = engine.stats()
    split = {p: 1e3 * (after[f"{p}_seconds"] - before[f"{p}_seconds"]) / STEPS for p in PHASES}
    return 1e3 * statistics.median(times), 1e3 * statistics.mean(times), split


def main() -> None:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    print(f"{SEQUENCES} sequences, {STEPS} steps, one core; milliseconds per step")
    titles = "".join(f"{p:>10}" for p in PHASES)
    print(f"{'caching':>7}{'drafts':>8}{'tokens/step':>13}{'median':>9}{'limit':>7}{'mean':>9}{titles}  (mean)")
    for caching, (num_drafts, limit) in itertools.product((False, True), LIMITS.items()):
        median, mean, split = measure(num_drafts, caching)
        phases = "".join(f"{split[p]:10.2f}" for p in PHASES)
        tokens = SEQUENCES * (1 + num_drafts)
        print(
            f"{'on' if caching else 'off':>7}{num_drafts:8}{tokens:13}{median:9.2f}{limit:7.1f}{mean:9.2f}{phases}",
            flush=True,
        )


if __name__ == "__main__":
    main()
