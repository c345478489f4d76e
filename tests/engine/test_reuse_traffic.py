"""Random traffic of texts that share beginnings, in pools and a snapshot store that are too small for all of them,
with everything that is freed poisoned: every request has exactly the tokens that it has alone."""

from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from deepinfer_jax.engine.requests.outputs import RequestOutput
from deepinfer_jax.engine.requests.sampling_params import SamplingParams
from tests.support.engine_runs import is_idle, while_unfinished
from tests.support.marks import slow
from tests.support.reuse_traffic import check, texts, wanted
from tests.support.toy import MAX_POSITIONS, ToyModel, toy_engine

pytestmark = [pytest.mark.toy, pytest.mark.unoptimised, pytest.mark.usefixtures("poisoned")]

STATE_BYTES = 4  # of the toy's slot
picks = st.integers(0, 1 << 16)


class Lost:
    """A launched step whose results never come."""

    def result(self) -> Any:
        raise ConnectionError("lost")


class ReuseTraffic(RuleBasedStateMachine):
    """Calls to an engine of a strict toy: a slot that does not hold the state of its text gives NaN."""

    seen: ClassVar[Counter[str]]
    stop_preempted_request: ClassVar[bool]

    @initialize(overlap=st.booleans(), states=st.sampled_from([1, 4, 12]))
    def start(self, overlap: bool, states: int) -> None:
        self.budget = states * STATE_BYTES
        self.engine = toy_engine(
            model=ToyModel(strict=True),
            overlap=overlap,
            stop_preempted_request=self.stop_preempted_request,
            num_kv_blocks=12,
            snapshot_memory_bytes=self.budget,
            max_num_seqs=4,
        )
        self.compiled = self.engine.compile_count
        self.requests: dict[str, tuple[list[int], SamplingParams]] = {}
        self.outputs: dict[str, list[RequestOutput]] = {}
        self.aborted: set[str] = set()
        self.spoiled: set[str] = set()
        self.is_lost = False

    def take(self, call: Callable[[], list[RequestOutput]]) -> None:
        try:
            outputs = call()
        except ConnectionError:
            self.seen["lost"] += 1
            return
        for output in outputs:
            self.outputs.setdefault(output.request_id, []).append(output)

    @rule(prompt=texts, params=wanted)
    def submit(self, prompt: list[int], params: SamplingParams) -> None:
        request_id = str(len(self.requests))
        self.requests[request_id] = prompt, params
        self.engine.add_request("u", request_id, params, prompt)

    @precondition(lambda self: self.outputs)
    @rule(pick=picks, more=texts, params=wanted)
    def go_on(self, pick: int, more: list[int], params: SamplingParams) -> None:
        """The next turn of a conversation: a prompt, its answer so far, and something new."""
        request_id = list(self.outputs)[pick % len(self.outputs)]
        answer = [output.token_id for output in self.outputs[request_id] if not output.message]
        self.submit([*self.requests[request_id][0], *answer, *more][:MAX_POSITIONS], params)

    @precondition(lambda self: self.requests)
    @rule(pick=picks, params=wanted)
    def repeat(self, pick: int, params: SamplingParams) -> None:
        self.submit(self.requests[str(pick % len(self.requests))][0], params)

    @rule(count=st.integers(1, 16))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.take(self.engine.step)

    @precondition(lambda self: self.requests)
    @rule(kind=st.sampled_from(["flush", "abort", "spoil", "spoil", "lose"]), pick=picks)
    def mishap(self, kind: str, pick: int) -> None:
        if kind == "flush":
            self.take(self.engine.flush_inflight_reqs)
        elif kind == "abort":
            self.aborted.add(str(pick % len(self.requests)))
            self.engine.abort_request(str(pick % len(self.requests)))
        elif kind == "spoil":
            self.spoil(pick)
        elif kind == "lose":
            self.lose(["prefill", "decode"][pick % 2], is_launched=pick % 3 > 0)

    def spoil(self, pick: int) -> None:
        """The slot of a running request loses its state, so that the logits of its next step are NaN."""
        running = [sequence for sequence in self.engine.core.open.values() if sequence.state_id >= 0]
        if running:
            sequence = running[pick % len(running)]
            self.spoiled.add(sequence.request_id)
            self.engine.core.runner.poison([[]], [[sequence.state_id]])

    def lose(self, kind: str, *, is_launched: bool) -> None:
        """A step breaks, and with it go the pools."""
        runner = self.engine.core.runner
        launch = getattr(runner, kind)

        def broken(*arguments: Any) -> Any:
            setattr(runner, kind, launch)
            self.is_lost = True
            if not is_launched:
                raise ConnectionError("lost")
            launch(*arguments)
            return Lost()

        setattr(runner, kind, broken)
        self.step(2)
        setattr(runner, kind, launch)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        for _ in while_unfinished(engine):
            self.take(engine.step)
        self.take(engine.flush_inflight_reqs)
        self.take(engine.step)  # the scheduler's word on requests that a broken step has ended
        engine.core.scheduler.check_idle()
        stats = engine.stats()
        assert is_idle(stats) and stats["snapshot_bytes"] <= self.budget
        assert engine.compile_count == self.compiled
        assert self.outputs.keys() == self.requests.keys()
        for request_id, (prompt, params) in self.requests.items():
            outputs = self.outputs[request_id]
            reason = check(outputs, prompt, params)
            allowed = {"length": True, "insufficient_system_resource": self.stop_preempted_request}
            allowed["abort"] = request_id in self.aborted or self.is_lost
            allowed["logits_not_finite"] = request_id in self.spoiled
            assert allowed[reason], (request_id, reason, outputs[-1].message)
            self.seen[reason] += 1
            self.seen["requests"] += 1
            self.seen["hits"] += outputs[0].num_cached_tokens > 0
        counts = {"preemptions": stats["num_preemptions"], "evictions": engine.core.scheduler.snapshots.num_evicted}
        self.seen.update(+Counter(counts))  # those above 0
        engine.close()


@pytest.mark.parametrize("stop_preempted_request", [slow(False), True])
def test_a_request_has_its_own_tokens_whatever_befalls_it_and_its_neighbours(
    stop_preempted_request: bool,
) -> None:
    seen = ReuseTraffic.seen = Counter()
    ReuseTraffic.stop_preempted_request = stop_preempted_request
    run_state_machine_as_test(
        ReuseTraffic, settings=settings(max_examples=25, stateful_step_count=40, derandomize=True)
    )
    assert seen["hits"] > 0, seen
    assert {"preemptions", "evictions", "length"} <= seen.keys(), seen
    assert seen["abort"] + seen["logits_not_finite"] + seen["lost"] > 0, seen
    assert ("insufficient_system_resource" in seen) == stop_preempted_request, seen
