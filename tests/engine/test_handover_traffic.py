"""Prompts handed over under random traffic: exported in any order, on their way for a while, in memory or as files,
imported while others run, aborted on either side. Every request has exactly the tokens that it has alone."""

import tempfile
from collections import Counter
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from deepinfer_jax.engine.args import EngineType
from deepinfer_jax.engine.handover.sequence_state import SequenceState
from deepinfer_jax.engine.llm_engine import LLMEngine
from deepinfer_jax.engine.requests.outputs import RequestOutput
from deepinfer_jax.engine.requests.sampling_params import SamplingParams
from tests.support.engine_runs import is_idle, while_unfinished
from tests.support.reuse_traffic import check, texts, wanted
from tests.support.toy import ToyModel, toy_engine

pytestmark = [pytest.mark.toy, pytest.mark.unoptimised, pytest.mark.usefixtures("poisoned")]

picks = st.integers(0, 1 << 16)


class HandoverTraffic(RuleBasedStateMachine):
    """Calls to two engines of a strict toy: a slot that does not hold the state of its text gives NaN."""

    seen: ClassVar[Counter[str]] = Counter()

    @initialize(overlap=st.booleans())
    def start(self, overlap: bool) -> None:
        self.prompt_engine, self.completion_engine = (
            toy_engine(
                model=ToyModel(strict=True),
                overlap=overlap,
                engine_type=engine_type,
                stop_preempted_request=False,
                num_kv_blocks=12,
                max_num_seqs=4,
            )
            for engine_type in (EngineType.PROMPT, EngineType.COMPLETION)
        )
        self.folder = tempfile.TemporaryDirectory()
        self.requests: dict[str, tuple[list[int], SamplingParams]] = {}
        self.outputs: dict[str, list[RequestOutput]] = {}
        self.aborted: set[str] = set()
        self.on_the_way: list[SequenceState | Path] = []
        self.num_exports = 0

    @rule(prompt=texts, params=wanted)
    def submit(self, prompt: list[int], params: SamplingParams) -> None:
        request_id = str(len(self.requests))
        self.requests[request_id] = prompt, params
        self.prompt_engine.add_request("u", request_id, params, prompt)

    @rule(count=st.integers(1, 6))
    def step_prompts(self, count: int) -> None:
        self.step(self.prompt_engine, count)

    @rule(count=st.integers(1, 6))
    def step_completions(self, count: int) -> None:
        self.step(self.completion_engine, count)

    def step(self, engine: LLMEngine, count: int) -> None:
        for _ in range(count):
            for output in engine.step():
                self.outputs.setdefault(output.request_id, []).append(output)

    @precondition(lambda self: self.prompt_engine.computed_requests())
    @rule(pick=picks)
    def export(self, pick: int) -> None:
        """Every second one as a file."""
        computed = self.prompt_engine.computed_requests()
        state = self.prompt_engine.export_sequence(computed[pick % len(computed)])
        self.num_exports += 1
        if self.num_exports % 2:
            self.on_the_way.append(state)
        else:
            path = Path(self.folder.name) / state.request_id
            state.save(path)
            self.on_the_way.append(path)
            self.seen["files"] += 1

    @precondition(lambda self: self.on_the_way)
    @rule(pick=picks)
    def import_one(self, pick: int) -> None:
        state = self.on_the_way.pop(pick % len(self.on_the_way))
        if isinstance(state, Path):
            state = SequenceState.load(state)
        self.completion_engine.import_sequence(state)
        self.seen["imports"] += 1

    @precondition(lambda self: self.requests)
    @rule(pick=picks, really=st.booleans())
    def abort(self, pick: int, really: bool) -> None:
        """On whichever side it is; one that is on its way goes on."""
        if really:
            request_id = str(pick % len(self.requests))
            for engine in (self.prompt_engine, self.completion_engine):
                if engine.abort_request(request_id)[0]:
                    self.aborted.add(request_id)

    def teardown(self) -> None:
        if not hasattr(self, "folder"):
            return
        engines = self.prompt_engine, self.completion_engine
        for _ in while_unfinished(*engines, also=self.prompt_engine.computed_requests):
            if self.prompt_engine.computed_requests():
                self.export(0)
            while self.on_the_way:
                self.import_one(0)
            for engine in engines:
                self.step(engine, 1)
        while self.on_the_way:
            self.import_one(0)
        for _ in while_unfinished(self.completion_engine):
            self.step(self.completion_engine, 1)
        for engine in engines:
            assert engine.flush_inflight_reqs() == []
            engine.core.scheduler.check_idle()
            assert is_idle(engine.stats())
        assert self.outputs.keys() == self.requests.keys()
        for request_id, (prompt, params) in self.requests.items():
            reason = check(self.outputs[request_id], prompt, params)
            assert reason == "length" or (reason == "abort" and request_id in self.aborted)
            self.seen[reason] += 1
        self.seen["hits"] += self.prompt_engine.stats()["num_cached_tokens"]
        self.seen["preemptions"] += self.completion_engine.stats()["num_preemptions"]
        for engine in engines:
            engine.close()
        self.folder.cleanup()


def test_a_request_that_is_handed_over_has_its_own_tokens() -> None:
    seen = HandoverTraffic.seen
    seen.clear()
    run_state_machine_as_test(
        HandoverTraffic, settings=settings(max_examples=30, stateful_step_count=50, derandomize=True)
    )
    assert all(seen[event] > 0 for event in ("imports", "files", "length", "hits")), seen
