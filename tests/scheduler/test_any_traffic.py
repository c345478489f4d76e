"""Any traffic, on any sizes: nothing leaks, nothing starves, every text is right and ends once."""

import random

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from deepinfer_jax.scheduler import Sequence, SequenceStatus, blocks_for
from tests.support.scheduler_twin import EOS, Twin, imported, make_scheduler, make_sequence

pytestmark = pytest.mark.pure

MAX_MODEL_LEN = 32


class AnyTraffic(RuleBasedStateMachine):
    """add / import / launch / land / abort / fail / hold back / hand over, in any order, on a scheduler of any size.

    Preemption comes by itself: the pools hold little more than one sequence. So do hits: many prompts begin alike, and
    some go on from what others said. The twin checks every plan, result and account; at the end all must finish, each
    reported once, with the text that it would have had alone.
    """

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        tokens_per_block = data.draw(st.sampled_from([2, 4, 8]))
        smallest_pool = blocks_for(MAX_MODEL_LEN, tokens_per_block)
        num_drafts = data.draw(st.sampled_from([0, 2]))
        max_num_seqs = data.draw(st.integers(1, 6))
        scheduler = make_scheduler(
            max_num_seqs=max_num_seqs,
            max_model_len=MAX_MODEL_LEN,
            data_parallel_size=data.draw(st.integers(1, 3)),
            tokens_per_block=tokens_per_block,
            num_blocks=data.draw(st.integers(smallest_pool // 2, 2 * smallest_pool)),
            num_drafts=num_drafts,
            max_num_batched_tokens=max_num_seqs * (1 + num_drafts) + data.draw(st.integers(0, 20)),
            max_prefill_tokens=data.draw(st.integers(1, 40)),
            max_programs=data.draw(st.sampled_from([2, 3, 12])),
            chunked_prefill=data.draw(st.booleans()),
            stop_preempted_request=data.draw(st.booleans()),
            prefix_caching=data.draw(st.sampled_from([True, True, False])),
            snapshot_budget=data.draw(st.sampled_from([10_000, 300, 100, 99, 0])),
            decodes=data.draw(st.sampled_from([True, True, False])),
        )
        self.twin = Twin(scheduler, seed=data.draw(st.integers(0, 3)))
        self.depth = data.draw(st.integers(1, 2))

    @rule(
        prompt_len=st.integers(1, MAX_MODEL_LEN + 2),
        max_tokens=st.integers(1, 30),
        schedulable=st.booleans(),
        waits=st.booleans(),
    )
    def add(self, prompt_len: int, max_tokens: int, schedulable: bool, waits: bool = False) -> None:
        sequence = make_sequence(len(self.twin.sequences), prompt_len, max_tokens, max_model_len=MAX_MODEL_LEN)
        sequence.schedulable, sequence.waits_for_results = schedulable, waits
        refused = self.twin.scheduler.refusal(prompt_len, max_tokens)
        self.twin.add(sequence)
        assert (sequence.status == SequenceStatus.FINISHED_IGNORED) == (refused is not None)

    @rule(count=st.integers(1, 3))
    def add_several(self, count: int) -> None:
        for _ in range(count):
            self.add(prompt_len=5, max_tokens=12, schedulable=True)

    @rule(
        word=st.integers(0, 1),
        num_words=st.integers(1, 30),
        tail=st.lists(st.integers(0, 1), max_size=3),
        max_tokens=st.integers(1, 12),
        most_cached_tokens=st.sampled_from([None, None, None, 0, 5, 16]),
    )
    def add_one_that_begins_like_others(
        self, word: int, num_words: int, tail: list[int], max_tokens: int, most_cached_tokens: int | None
    ) -> None:
        sequence = self.twin.add(self._sequence([word] * num_words + tail, max_tokens))
        sequence.most_cached_tokens = most_cached_tokens

    @precondition(lambda self: any(s.status == SequenceStatus.FINISHED_LENGTH_CAPPED for s in self.twin.sequences))
    @rule(seed=st.integers(0, 9), more=st.lists(st.integers(0, 1), min_size=1, max_size=3), reuse=st.booleans())
    def add_a_second_turn(self, seed: int, more: list[int], reuse: bool) -> None:
        ended = [s for s in self.twin.sequences if s.status == SequenceStatus.FINISHED_LENGTH_CAPPED]
        first = random.Random(seed).choice(ended)
        prompt = first.prompt_token_ids.tolist() + first.output_token_ids + more
        self.twin.add(self._sequence(prompt, max_tokens=6)).reuse = reuse

    @precondition(lambda self: self.twin.scheduler.limits.decodes)
    @rule(word=st.integers(0, 1), num_words=st.integers(1, 20), num_outputs=st.integers(1, 4))
    def add_an_imported_one(self, word: int, num_words: int, num_outputs: int) -> None:
        sequence = self._sequence([word] * num_words, max_tokens=num_outputs + 8)
        self.twin.add(imported(sequence, num_outputs, self.twin.scheduler.limits.tokens_per_block))

    def _sequence(self, prompt: list[int], max_tokens: int) -> Sequence:
        number = len(self.twin.sequences)
        tokens = np.asarray(prompt, np.int32)
        return Sequence(number, str(number), tokens, max_tokens, EOS, MAX_MODEL_LEN, ignore_eos=number % 2 == 0)

    @precondition(lambda self: self.twin.held())
    @rule(seed=st.integers(0, 9))
    def hand_over(self, seed: int) -> None:
        sequence = random.Random(seed).choice(self.twin.held())
        state = self.twin.hand_over(sequence)
        text = sequence.prompt_token_ids.tolist() + sequence.output_token_ids
        assert state.state.tokens == text[:-1] == [token for block in state.blocks for token in block]

    @precondition(lambda self: len(self.twin.in_flight) < self.depth)
    @rule()
    def launch(self) -> None:
        self.twin.launch()

    @precondition(lambda self: self.twin.in_flight)
    @rule()
    def land(self) -> None:
        self.twin.land()

    @precondition(lambda self: not self.twin.in_flight)
    @rule(count=st.integers(2, 12))
    def go_on(self, count: int) -> None:
        for _ in range(count):
            self.twin.launch()
            if len(self.twin.in_flight) == self.depth:
                self.twin.land()

    @precondition(lambda self: self.twin.in_flight)
    @rule(seed=st.integers(0, 9))
    def land_with_a_failing_row(self, seed: int) -> None:
        plan, _ = self.twin.in_flight[0]
        rows = [s for step in (plan.prefill, plan.decode) if step for s in step.sequences]
        self.twin.land(failing={random.Random(seed).choice(rows)})

    @rule(ids=st.sets(st.integers(0, 12), max_size=3))
    def abort(self, ids: set[int]) -> None:
        unfinished = [s for s in self.twin.sequences if not s.status.finished and s not in self.twin.handed_over]
        hit = [s for s in unfinished if s.seq_id in ids]
        assert self.twin.scheduler.abort({str(i) for i in ids}) == (len(hit), sum(map(len, hit)))
        assert all(s.finish_reason == "abort" for s in hit)
        self.twin.check_accounts()

    @precondition(lambda self: self.twin.sequences)
    @rule(seed=st.integers(0, 9))
    def hold_back_or_let_go(self, seed: int) -> None:
        sequence = random.Random(seed).choice(self.twin.sequences)
        sequence.schedulable = not sequence.schedulable

    def teardown(self) -> None:
        if hasattr(self, "twin"):
            for sequence in self.twin.sequences:
                sequence.schedulable = True
            self.twin.drain(self.depth)


TestAnyTraffic = AnyTraffic.TestCase
TestAnyTraffic.settings = settings(max_examples=150, stateful_step_count=40, suppress_health_check=list(HealthCheck))
