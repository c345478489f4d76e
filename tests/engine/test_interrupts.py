"""Ctrl-C wherever Python may notice it: what ran is ended once, nothing is kept, and the engine goes on."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from deepinfer_jax.engine.llm_engine import LLMEngine
from deepinfer_jax.engine.requests.sampling_params import SamplingParams
from tests.support.engine_runs import while_unfinished
from tests.support.interrupts import Interrupt
from tests.support.marks import slow
from tests.support.toy import greedy_twin, make_table, random_prompt, run, tokens, toy_engine

pytestmark = [pytest.mark.toy, pytest.mark.unoptimised]


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
    for step in while_unfinished(engine):
        take(engine.step)
        assert step < 299, "wedged"
    take(engine.flush_inflight_reqs)
    if in_doubt and in_doubt not in ends:
        ends[in_doubt] = 1
    return engine, ends


@pytest.mark.parametrize(
    ("stop_preempted_request", "overlap"),
    [(True, True), (False, False), slow(True, False), slow(False, True)],
)
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
