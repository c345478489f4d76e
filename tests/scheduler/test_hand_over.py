"""Sequences that begin on one engine and go on on another."""

import numpy as np
import pytest

from deepinfer_jax.scheduler import Bucket, BucketTable, Imported, Sequence, SequenceStatus
from tests.support.scheduler_twin import EOS, Twin, continuation, decoded, endless, imported, make_scheduler, prefilled

pytestmark = pytest.mark.pure

PROMPTS_ONLY = BucketTable(decode=(), prefill=(Bucket(1, 8, 8),))


def prompts_only(**limits: object) -> Twin:
    return Twin(make_scheduler(**({"decodes": False, "buckets": PROMPTS_ONLY} | limits)))  # type: ignore[arg-type]


def begun(seq_id: int, prompt_len: int, num_outputs: int = 1, max_tokens: int = 20) -> Sequence:
    return imported(endless(seq_id, prompt_len, max_tokens), num_outputs, tokens_per_block=4)


# A scheduler that does not decode


@pytest.mark.parametrize("prompt_len", range(1, 14))
def test_a_sequence_that_is_handed_over_goes_on_as_if_it_had_stayed(prompt_len: int) -> None:
    first, second = prompts_only(), Twin(make_scheduler())
    sequence = first.add(endless(0, prompt_len, max_tokens=9))
    first.step()
    if prompt_len > 8:
        first.step()
    (held,) = first.held()
    assert (held, held.output_len, first.scheduler.num_unfinished) == (sequence, 1, 1)
    state = first.hand_over(held)
    assert (first.scheduler.num_unfinished, sequence.finish_reason) == (0, "")
    first.scheduler.check_idle()

    going_on = endless(0, prompt_len, max_tokens=9)
    going_on.output_token_ids, going_on.imported = [*sequence.output_token_ids], state
    second.add(going_on)
    second.drain()
    assert going_on.output_token_ids == continuation(going_on)


def test_a_held_sequence_takes_no_part_and_gives_way_to_nobody() -> None:
    twin = prompts_only(num_blocks=4)
    old = twin.add(endless(0, 16))
    old.schedulable = False
    young = twin.add(endless(1, 8))
    twin.step()
    old.schedulable = True
    plans = [prefilled(twin.step()) for _ in range(3)]
    assert plans == [[(0, 0, 8)], [], []]  # the rest of the older one waits for the younger one's two blocks
    assert (young.num_preemptions, young.status) == (0, SequenceStatus.RUNNING)
    twin.hand_over(young)
    assert prefilled(twin.step()) == [(0, 8, 8)]
    twin.drain()


def test_a_held_sequence_can_be_aborted_and_what_it_computed_stays_cached() -> None:
    twin = prompts_only(prefix_caching=True)
    twin.add(endless(0, 9))
    twin.step()
    twin.step()
    assert twin.scheduler.abort({"0"}) == (1, 10)
    assert [s.finish_reason for s in twin.launch().ignored] == ["abort"]
    same = twin.add(endless(0, 9))
    assert prefilled(twin.step()) == [(0, 8, 1)]
    assert twin.hand_over(same).num_tokens == 9
    twin.drain()


def test_a_sequence_that_ends_with_its_first_token_is_not_held() -> None:
    twin = prompts_only()
    sequence = twin.add(endless(0, 3, max_tokens=1))
    twin.step()
    assert (sequence.finish_reason, twin.held()) == ("length", [])
    twin.drain()


def test_only_what_is_computed_and_booked_can_be_handed_over() -> None:
    twin = prompts_only(max_num_seqs=1)
    running, waiting = twin.add(endless(0, 9)), twin.add(endless(1, 3))
    for _ in range(2):
        twin.launch()
        for sequence in (running, waiting):
            with pytest.raises(ValueError, match=f"request {sequence.seq_id} cannot be handed over"):
                twin.scheduler.hand_over(sequence)
    twin.land()
    twin.land()
    twin.hand_over(running)
    with pytest.raises(ValueError, match="request 0 cannot be handed over"):
        twin.scheduler.hand_over(running)
    twin.drain()


def test_a_scheduler_that_does_not_decode_counts_the_prompt_only() -> None:
    scheduler = prompts_only(num_blocks=4).scheduler
    assert scheduler.refusal(16, 20) is None
    assert scheduler.refusal(17, 1) == (
        "17 prompt tokens and max_tokens 1, at most 17 tokens in the cache, need 5 blocks of 4 tokens, the pool has 4; "
        "lower max_tokens, shorten the prompt or give the engine more blocks"
    )
    with pytest.raises(ValueError, match="of use only to a scheduler that decodes"):
        scheduler.add_sequence(begun(0, 3))


# Imported sequences


def test_an_imported_sequence_decodes_from_the_plan_after_its_start() -> None:
    twin = Twin(make_scheduler())
    sequence = twin.add(begun(0, 6, num_outputs=3))
    payload = sequence.imported
    assert payload is not None and payload.num_tokens == 8
    plan = twin.launch()
    (restore,) = plan.restores
    assert (restore.sequence, restore.num_tokens) == (sequence, 8)
    assert (restore.state, restore.blocks) == (payload.state, payload.blocks)
    assert (plan.prefill, plan.decode, plan.empty, twin.in_flight) == (None, None, False, [])
    assert (sequence.block_table, sequence.imported, sequence.num_cached_tokens) == ([0, 1], None, 0)
    plan = twin.launch()
    assert (prefilled(plan), decoded(plan), sequence.block_table) == ([], [0], [0, 1, 2])
    twin.drain()
    assert sequence.output_token_ids == continuation(sequence)


def test_imported_and_computed_prompts_start_in_the_order_of_arrival() -> None:
    twin = Twin(make_scheduler(max_num_seqs=3, num_blocks=10))
    running = twin.add(endless(0, 8, max_tokens=5))
    twin.step()
    twin.add(begun(1, 24))  # asks for 7 blocks, for its text and the next tokens; 8 are free, then 7
    twin.add(begun(2, 4))
    twin.add(endless(3, 4))
    plan = twin.step()
    assert [r.sequence.seq_id for r in plan.restores] == [1]
    assert [s.state_id >= 0 for s in twin.sequences] == [True, True, False, False]  # 6 for 1 itself, 1 is left
    while not running.status.finished:
        assert not twin.step().restores
    plan = twin.step()
    assert ([r.sequence.seq_id for r in plan.restores], prefilled(plan)) == ([2], [(3, 0, 4)])
    twin.drain()


def test_an_import_takes_no_row_of_the_prefill_program() -> None:
    buckets = BucketTable(decode=(Bucket(4, 1, 8),), prefill=(Bucket(1, 8, 8),))
    twin = Twin(make_scheduler(buckets=buckets))
    for sequence in (begun(0, 4), endless(1, 4), begun(2, 4), endless(3, 4)):
        twin.add(sequence)
    plan = twin.step()
    assert ([r.sequence.seq_id for r in plan.restores], prefilled(plan)) == ([0, 2], [(1, 0, 4)])
    twin.drain()


def test_an_imported_sequence_that_gives_way_is_computed_again() -> None:
    twin = Twin(make_scheduler(num_blocks=8))
    old, young = twin.add(endless(0, 4)), twin.add(begun(1, 4))
    while not young.num_preemptions:
        twin.step()
    assert (young.imported, young.num_tokens) == (None, 0)
    while old.state_id >= 0:
        twin.step()
    assert prefilled(twin.step())[0][:2] == (1, 0)
    twin.drain()
    assert young.output_token_ids == continuation(young)


def test_blocks_of_an_import_are_found_by_others_once_a_step_of_it_is_booked() -> None:
    buckets = BucketTable(decode=(Bucket(4, 1, 8),), prefill=(Bucket(4, 32, 8),))
    twin = Twin(make_scheduler(prefix_caching=True, buckets=buckets, max_num_batched_tokens=128))
    sequence = endless(0, 7)
    twin.add(imported(sequence, 1, tokens_per_block=4))
    twin.step()
    assert sequence.published == []
    twin.step()  # the eighth token: a snapshot too
    assert [block for _, block, _ in sequence.published] == [0, 1]
    again = endless(1, 1)
    again.prompt_token_ids = sequence.token_ids(0, 9)
    twin.add(again)
    assert prefilled(twin.step()) == [(1, 8, 1)]
    twin.drain()


def test_an_import_may_be_longer_than_a_prompt_that_must_run_whole() -> None:
    scheduler = make_scheduler(chunked_prefill=False, max_prefill_tokens=8)
    assert scheduler.refusal(9, 4) == "the prompt has 9 tokens, the limit without chunked prefill is 8"
    assert scheduler.refusal(9, 4, imported=True) is None
    assert scheduler.refusal(33, 4, imported=True) == "the prompt has 33 tokens, the limit is 32"
    twin = Twin(scheduler)
    twin.add(begun(0, 9))
    twin.drain()


@pytest.mark.parametrize(
    ("prompt_len", "num_outputs", "num_tokens"), [(4, 1, 5), (4, 1, 3), (1, 0, 0), (4, 3, 6)], ids=str
)
def test_state_of_other_tokens_than_all_but_the_last_is_an_error(
    prompt_len: int, num_outputs: int, num_tokens: int
) -> None:
    sequence = Sequence(0, "0", np.zeros(prompt_len, np.int32), 3, EOS, 32, output_token_ids=[1] * num_outputs)
    sequence.imported = Imported(num_tokens, None, None)
    with pytest.raises(ValueError, match=f"request 0: the imported state is of {num_tokens} tokens"):
        make_scheduler().add_sequence(sequence)
