"""Ctrl-C wherever Python may notice it: what ran is ended once, nothing is kept, and the engine goes on."""

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest

from deepinfer_jax.engine.llm_engine import LLMEngine
from deepinfer_jax.engine.requests.sampling_params import SamplingParams
from tests.support.toy import greedy_twin, make_table, random_prompt, run, tokens, toy_engine

# Outputs that are on their way out of `step` are the caller's: an interrupt there loses them as in any function.
_FILES = (
    "engine/llm_engine.py",
    "engine/core.py",
    "engine/launch.py",
    "engine/commit.py",
    "engine/images/opener.py",
    "engine/images/workers.py",
    "engine/requests/background.py",
    "engine/requests/outputs.py",
    "engine/requests/preparation.py",
    "engine/requests/request.py",
    "engine/requests/results.py",
    "runtime/device_state.py",
    "runtime/runner.py",
    "runtime/step_result.py",
    "runtime/step_input.py",
)
_HANDING_OUT = "hand_out"


class Interrupt:
    """Raises KeyboardInterrupt at the line number `at` that the engine and its scheduler run; None: never.

    Attributes:
        lines: how many they have run.
    """

    def __init__(self, at: int | None = None) -> None:
        self.at = at
        self.lines = 0

    def during[T](self, call: Callable[[], T], interrupted: T) -> T:
        """What the call gives, `interrupted` if it was."""
        sys.settrace(self._enter)
        try:
            return call()
        except KeyboardInterrupt:
            return interrupted
        finally:
            sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        inside = name.endswith(_FILES) or "/deepinfer_jax/scheduler/" in name
        return self._line if inside and frame.f_code.co_name != _HANDING_OUT else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                raise KeyboardInterrupt
        return self._line


def crowded(interrupt: Interrupt, **kwargs: Any) -> tuple[LLMEngine, Counter[str]]:
    """Eight requests in a pool that holds one, two of them aborted; how often the end of each was reported.

    One whose `add_request` was interrupted may or may not be among them, as in any call; it counts as reported.
    """
    engine = toy_engine(num_kv_blocks=12, **kwargs)
    rng = np.random.default_rng(3)
    ends: Counter[str] = Counter()
    in_doubt = None

    def take(call: Callable[[], Any]) -> None:
        ends.update(output.request_id for output in interrupt.during(call, []) if output.finished)

    for i in range(8):
        params = SamplingParams(
            max_tokens=int(rng.integers(1, 14)), seq_seed=i, prompt_logprobs=bool(i % 2), top_logprobs=i % 3
        )
        prompt = random_prompt(int(rng.integers(1, 30)), seed=i)
        added = interrupt.during(lambda i=i, p=params, ids=prompt: engine.add_request("u", str(i), p, ids), None)
        in_doubt = in_doubt if added else str(i)
        take(engine.step)
    interrupt.during(lambda: engine.abort_request({"1", "5"}), (0, 0))
    take(engine.flush_inflight_reqs)
    steps = 0
    while engine.has_unfinished_requests():
        take(engine.step)
        steps += 1
        assert steps < 300, "wedged"
    take(engine.flush_inflight_reqs)
    if in_doubt and in_doubt not in ends:
        ends[in_doubt] = 1
    return engine, ends


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("stop_preempted_request", [True, False])
def test_an_interrupt_at_any_line_ends_what_ran_once_and_the_engine_goes_on(
    stop_preempted_request: bool, overlap: bool
) -> None:
    options = {"stop_preempted_request": stop_preempted_request, "overlap": overlap}
    whole = Interrupt()
    engine, ends = crowded(whole, **options)
    assert engine.stats()["num_preemptions"] > 0
    # Not every line, for time; the prime steps land in every part of the loop.
    for at in range(1, whole.lines, 599):
        engine, ends = crowded(Interrupt(at), **options)
        assert ends == {str(i): 1 for i in range(8)}
        engine.core.scheduler.check_idle()
        assert engine.core.scheduler.num_unfinished == 0
        engine.add_request("u", "0", SamplingParams(temperature=0, max_tokens=4), [5, 6])  # the name is free again
        assert tokens(run(engine)["0"]) == greedy_twin(make_table(), [5, 6], 4)
