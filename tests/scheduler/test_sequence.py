"""When a sequence stops, and what it says about itself."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax.scheduler import FINISH_REASONS, Sequence, SequenceStatus
from tests.support.scheduler_twin import EOS, make_sequence

pytestmark = pytest.mark.pure


def test_finished_begins_at_stopped_and_every_finished_state_has_its_reason() -> None:
    assert [status for status in SequenceStatus if status.finished] == list(FINISH_REASONS)
    assert not SequenceStatus.SWAPPED.finished
    assert FINISH_REASONS[SequenceStatus.FINISHED_PREEMPTED] == "insufficient_system_resource"


def test_eos_is_asked_before_the_lengths() -> None:
    last = make_sequence(0, 3, max_tokens=1)
    assert last.append_tokens([EOS]) == 1
    assert last.finish_reason == "stop"


def test_the_length_may_reach_max_model_len_plus_one() -> None:
    sequence = make_sequence(0, 31, max_tokens=9, max_model_len=32)
    assert sequence.append_tokens([7]) == 1
    assert (len(sequence), sequence.finish_reason) == (32, "")
    assert sequence.append_tokens([7]) == 1
    assert (len(sequence), sequence.finish_reason) == (33, "length")
    assert sequence.max_cached_tokens == 32


@given(
    prompt_len=st.integers(1, 12),
    max_tokens=st.integers(1, 12),
    max_model_len=st.integers(12, 16),
    ignore_eos=st.booleans(),
    stop_ids=st.sampled_from([(), (3,), (2, EOS)]),
    stop_pair=st.sampled_from([None, None, [2, 2], [3, 0]]),
    steps=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), max_size=12),
)
def test_tokens_of_a_step_are_taken_as_if_one_by_one(
    prompt_len: int,
    max_tokens: int,
    max_model_len: int,
    ignore_eos: bool,
    stop_ids: tuple[int, ...],
    stop_pair: list[int] | None,
    steps: list[list[int]],
) -> None:
    """Stops: EOS, ids, and as a text a pair of tokens."""
    sequence = Sequence(
        0, "0", np.arange(prompt_len, dtype=np.int32), max_tokens, EOS, max_model_len, ignore_eos,
        stop_token_ids=frozenset(stop_ids),
        stop_text=None if stop_pair is None else lambda output: "pair" if output[-2:] == stop_pair else None,
    )  # fmt: skip
    output: list[int] = []
    reason, why = "", None
    for step in steps:
        if reason:
            break
        before = len(output)
        for token in step:  # DB §1.7, after each appended token
            output.append(token)
            stopped_by: list[int | str | None] = []
            if token == EOS and not ignore_eos:
                stopped_by = [None]
            elif token in stop_ids:
                stopped_by = [token]
            elif stop_pair is not None and output[-2:] == stop_pair:
                stopped_by = ["pair"]
            if stopped_by:
                reason, why = "stop", stopped_by[0]
            elif prompt_len + len(output) > max_model_len or len(output) == max_tokens:
                reason = "length"
            if reason:
                break
        assert sequence.append_tokens(list(step)) == len(output) - before
        assert (sequence.output_token_ids, sequence.finish_reason, sequence.stop_reason) == (output, reason, why)
    assert len(sequence) == prompt_len + len(output)
    assert sequence.last_token_id == (output[-1] if output else prompt_len - 1)
    # All but the last token that it may ever have: that one is never computed on.
    assert sequence.max_cached_tokens == min(prompt_len + max_tokens, max_model_len + 1) - 1


def test_token_ids_run_over_prompt_and_output() -> None:
    sequence = make_sequence(0, 3)
    sequence.append_tokens([70, 80])
    everything = [0, 7, 14, 70, 80]
    for start in range(6):
        for count in range(6 - start):
            part = sequence.token_ids(start, count)
            assert part.tolist() == everything[start : start + count]
            assert part.dtype == np.int32
