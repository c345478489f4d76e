"""From where sequences start, what is kept for that, and when it is forgotten."""

import numpy as np
import pytest

from deepinfer_jax.scheduler import Bucket, BucketTable, ImageContent, Sequence, SequenceStatus, StepPlan
from tests.support.scheduler_twin import EOS, Twin, endless, make_scheduler, prefilled

pytestmark = pytest.mark.pure

SNAPSHOT = 100  # bytes of the twin's states
ONE_STEP = BucketTable(decode=(Bucket(4, 1, 8),), prefill=(Bucket(4, 32, 8),))


def reusing(**limits: object) -> Twin:
    """Blocks of 4 tokens, prompts in one step of up to four rows, if nothing else is asked for."""
    return Twin(
        make_scheduler(**({"prefix_caching": True, "buckets": ONE_STEP, "max_num_batched_tokens": 128} | limits))
    )  # type: ignore[arg-type]


def text(seq_id: int, prompt: list[int], max_tokens: int = 1) -> Sequence:
    return Sequence(seq_id, str(seq_id), np.asarray(prompt, np.int32), max_tokens, EOS, 32, ignore_eos=True)


def finish(twin: Twin, *sequences: Sequence) -> list[list[tuple[int, int, int]]]:
    """The chunks of each plan until all are finished."""
    chunks = []
    for sequence in sequences:
        twin.add(sequence)
    while not all(sequence.status.finished for sequence in sequences):
        chunks.append(prefilled(twin.step()))
    return [plan for plan in chunks if plan]


def restored(plan: StepPlan) -> list[tuple[int, int]]:
    return [(restore.sequence.seq_id, restore.num_tokens) for restore in plan.restores]


# Where a sequence starts


@pytest.mark.parametrize(("length", "start"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (17, 16), (20, 16)])
def test_the_same_prompt_starts_at_the_last_block_that_leaves_a_token_to_compute(length: int, start: int) -> None:
    twin = reusing()
    first, second, third = (text(seq_id, list(range(length))) for seq_id in range(3))
    cold = [(0, 0, start), (0, start, length - start)] if start else [(0, 0, length)]
    assert [chunk for plan in finish(twin, first) for chunk in plan] == cold
    assert finish(twin, second) == [[(1, start, length - start)]]
    assert finish(twin, third) == [[(2, start, length - start)]]
    assert [s.num_cached_tokens for s in (first, second, third)] == [0, start, start]
    assert first.output_token_ids == second.output_token_ids == third.output_token_ids
    twin.drain()


def test_three_sequences_start_at_different_places_in_one_step() -> None:
    twin = reusing()
    finish(twin, text(0, [1] * 8))
    finish(twin, text(1, [1] * 5 + [2] * 12))
    for sequence in (text(2, [1] * 9), text(3, [1] * 5 + [2] * 12 + [3]), text(4, [2] * 6)):
        twin.add(sequence)
    plan = twin.step()
    assert restored(plan) == [(2, 8), (3, 16)]
    assert prefilled(plan) == [(2, 8, 1), (3, 16, 2), (4, 0, 4)]
    twin.drain()


def test_who_shares_less_than_a_chunk_leaves_a_snapshot_where_the_texts_part() -> None:
    """A system prompt and questions: the end of the whole prompt is of no use to the next one."""
    twin = reusing()
    questions = [text(seq_id, [1] * 14 + [2 + seq_id] * 7) for seq_id in range(4)]
    assert finish(twin, questions[0]) == [[(0, 0, 20)], [(0, 20, 1)]]
    assert finish(twin, questions[1]) == [[(1, 0, 12)], [(1, 12, 8)], [(1, 20, 1)]]
    for later in questions[2:]:
        assert finish(twin, later) == [[(later.seq_id, 12, 8)], [(later.seq_id, 20, 1)]]
    assert [s.num_cached_tokens for s in questions] == [0, 0, 12, 12]
    twin.drain()


def test_a_second_turn_starts_from_what_decoding_left() -> None:
    twin = reusing()
    first = text(0, [5] * 6, max_tokens=9)
    finish(twin, first)  # 14 tokens in the cache: blocks end at 4, 8 and 12
    history = [5] * 6 + first.output_token_ids
    assert finish(twin, text(1, [*history, 1, 2]))[0] == [(1, 12, 4)]
    twin.drain()


def test_a_sequence_shares_the_blocks_that_it_hits_and_opens_its_own_behind_them() -> None:
    twin = reusing()
    first = twin.add(text(0, [1] * 10, max_tokens=20))
    twin.step()
    twin.step()
    assert first.block_table == [0, 1, 2]
    second = twin.add(text(1, [1] * 10, max_tokens=20))
    plan = twin.step()
    assert plan.prefill is not None
    assert second.block_table == [0, 1, 3]
    assert (plan.prefill.first_new_block.tolist(), plan.prefill.new_blocks[0, 0]) == ([2], 3)
    assert twin.scheduler.free_blocks == 64 - 4
    twin.drain()


def test_what_others_hold_costs_no_free_block() -> None:
    twin = reusing(num_blocks=9)
    finish(twin, text(0, [1] * 25))
    twin.add(text(1, [1] * 25, max_tokens=3))
    twin.step()  # it holds 7 blocks, 2 are free
    twin.add(text(2, [1] * 25))
    twin.add(text(3, [1] * 25))
    assert prefilled(twin.step()) == [(2, 24, 1), (3, 24, 1)]
    twin.drain()


def test_without_the_snapshot_of_a_position_a_sequence_starts_at_an_earlier_one() -> None:
    twin = reusing(snapshot_budget=SNAPSHOT)  # of one only
    finish(twin, text(0, [1] * 8))  # at 4, then at 8, which drives the first out
    assert twin.scheduler.snapshots.num_evicted == 1
    assert finish(twin, text(1, [1] * 8))[0] == [(1, 0, 4)]  # 8 would leave nothing to compute
    assert finish(twin, text(2, [1] * 9)) == [[(2, 8, 1)]]
    twin.drain()


def test_without_the_blocks_of_a_position_a_sequence_starts_at_an_earlier_one() -> None:
    twin = reusing(num_blocks=8)
    finish(twin, text(0, [1] * 9))
    finish(twin, text(1, [1] * 17))
    # 4 cached blocks and 4 others, so this one takes 2 of them: the last blocks of a text are the first to go.
    finish(twin, text(2, [2] * 21))
    assert finish(twin, text(3, [1] * 17))[0] == [(3, 8, 8)]
    twin.drain()


def test_what_was_evicted_is_computed_again_and_found_again() -> None:
    twin = reusing(num_blocks=8)
    finish(twin, text(0, [1] * 17))
    finish(twin, text(1, [2] * 31))
    assert finish(twin, text(2, [1] * 17)) == [[(2, 0, 16)], [(2, 16, 1)]]
    assert finish(twin, text(3, [1] * 17)) == [[(3, 16, 1)]]
    twin.drain()


def test_images_of_other_content_are_no_hit() -> None:
    twin = reusing()

    def image_of(seq_id: int, digest: bytes) -> Sequence:
        sequence = text(seq_id, [9] * 10)
        sequence.images = (ImageContent(5, 7, digest),)
        return sequence

    finish(twin, image_of(0, b"cat"))
    assert finish(twin, image_of(1, b"dog"))[0][0][1] == 0  # there is no snapshot at 4
    assert finish(twin, image_of(2, b"cat")) == [[(2, 8, 2)]]
    twin.drain()


@pytest.mark.parametrize(("reuse", "most", "start"), [(False, None, 0), (True, 15, 12), (True, 12, 12), (True, 3, 0)])
def test_a_sequence_may_ask_for_less(reuse: bool, most: int | None, start: int) -> None:
    twin = reusing(buckets=BucketTable(decode=(Bucket(4, 1, 8),), prefill=(Bucket(1, 4, 8),)))
    finish(twin, text(0, [1] * 18))  # chunks of one block: a snapshot at each
    sequence = text(1, [1] * 18)
    sequence.reuse, sequence.most_cached_tokens = reuse, most
    assert finish(twin, sequence)[0] == [(1, start, 4)]
    assert sequence.num_cached_tokens == start
    twin.drain()


def test_without_prefix_caching_nothing_is_kept_and_prompts_are_not_cut() -> None:
    twin = reusing(prefix_caching=False)
    for seq_id in range(2):
        assert finish(twin, text(seq_id, [1] * 8)) == [[(seq_id, 0, 8)]]
    assert len(twin.scheduler.snapshots) == 0
    twin.drain()


def test_a_sequence_goes_where_its_beginning_is_unless_others_have_less_to_do() -> None:
    twin = reusing(data_parallel_size=2, max_num_seqs=4)
    busy = [twin.add(text(0, [7] * 3, max_tokens=20)), twin.add(text(1, [1] * 9, max_tokens=20))]
    twin.step()
    twin.step()
    assert [s.dp_rank for s in busy] == [0, 1]
    # Index 0 has 1 or 2 blocks in use, index 1 has 3; of the new text's 3 blocks 2 are cached on index 1 only.
    alike = twin.add(text(2, [1] * 9, max_tokens=20))
    twin.step()
    assert (alike.dp_rank, alike.num_cached_tokens) == (1, 8)
    twin.drain()


def test_a_preempted_sequence_finds_its_own_blocks_again() -> None:
    twin = reusing(num_blocks=8, max_num_seqs=2)
    old, young = twin.add(endless(0, 4)), twin.add(endless(1, 4))
    while not young.num_preemptions:
        twin.step()
    while old.state_id >= 0:
        plan = twin.step()
    plan = twin.step()
    assert restored(plan) == [(1, 8)]  # of the blocks 0 … 2 that were full the old one needed the last
    assert young.num_cached_tokens == 0  # it tells how the sequence began
    twin.drain()


# Where chunks end


def test_chunks_end_where_a_snapshot_can_be_taken() -> None:
    def chunks(length: int, time: int, **limits: object) -> list[int]:
        buckets = BucketTable(decode=(Bucket(1, 1, 8),), prefill=(Bucket(1, time, 8),))
        twin = reusing(buckets=buckets, max_num_seqs=1, **limits)
        return [count for plan in finish(twin, text(0, [1] * length)) for _, _, count in plan]

    assert chunks(30, 32) == [28, 2]
    assert chunks(32, 32) == [28, 4]
    assert chunks(4, 32) == [4]
    assert chunks(3, 32) == [3]
    assert chunks(30, 11) == [8, 8, 8, 4, 2]  # 6 are left for the last but one: up to 28
    assert chunks(30, 7) == [4] * 7 + [2]
    assert chunks(10, 3) == [3, 3, 2, 2]  # 3, 6 and not 4: that would be less than half of it; then 8
    assert chunks(6, 3) == [3, 1, 2]  # the last cut is made however little it leaves
    assert chunks(30, 32, snapshot_budget=0) == [30]
    assert chunks(30, 32, chunked_prefill=False) == [30]


# What is kept, and when


def captures(plan: StepPlan) -> list[int]:
    """The sequences whose state is captured."""
    return [step.sequences[row].seq_id for step in (plan.prefill, plan.decode) if step for row in step.captures]


def test_states_are_captured_at_block_ends_that_have_none_yet() -> None:
    twin = reusing()
    twin.add(text(0, [1] * 7, max_tokens=6))
    twin.add(text(1, [2] * 3, max_tokens=6))
    # lengths after each plan: 4, 7, 8, 9, 10, 11, 12 of 0 and 3, 4, 5, 6, 7, 8 of 1
    assert [captures(twin.step()) for _ in range(7)] == [[0], [1], [0], [], [], [1], [0]]
    twin.drain()
    twin.add(text(2, [1] * 7, max_tokens=6))
    assert [captures(twin.step()) for _ in range(2)] == [[], [2]]  # what it will say is not known when it is planned
    assert twin.scheduler.snapshots.num_stored == 5
    twin.drain()
    assert twin.scheduler.snapshots.num_stored == 5


def test_of_sequences_that_begin_alike_in_one_step_one_is_captured() -> None:
    twin = reusing()
    for sequence in (text(0, [2] * 6), text(1, [1] * 7), text(2, [1] * 5), text(3, [1] * 6)):
        twin.add(sequence)
    assert captures(twin.step()) == [0, 1]
    twin.drain()


def test_with_drafts_only_prompts_are_captured_as_the_length_of_others_is_not_known() -> None:
    buckets = BucketTable(decode=(Bucket(4, 3, 8),), prefill=(Bucket(4, 32, 8),))
    twin = reusing(buckets=buckets, num_drafts=2)
    sequence = twin.add(text(0, [1] * 4, max_tokens=12))
    assert captures(twin.step()) == [0]
    while not sequence.status.finished:
        assert captures(twin.step()) == []
    # The blocks are named all the same: 15 tokens are in the cache.
    assert len(sequence.published) == 3
    twin.drain()


def test_nothing_is_captured_without_a_budget() -> None:
    twin = reusing(snapshot_budget=0)
    twin.add(text(0, [1] * 4, max_tokens=6))
    assert [captures(twin.step()) for _ in range(6)] == [[]] * 6
    twin.drain()


def test_blocks_and_snapshots_can_be_found_when_the_step_is_booked_and_not_before() -> None:
    twin = reusing()
    twin.add(text(0, [1] * 9))
    assert prefilled(twin.launch()) == [(0, 0, 8)]
    twin.add(text(1, [1] * 9))
    assert prefilled(twin.launch()) == [(0, 8, 1), (1, 0, 8)]
    twin.land()
    twin.add(text(2, [1] * 9))
    assert (2, 8, 1) in prefilled(twin.launch())
    twin.drain(depth=2)


def test_every_capture_needs_its_state() -> None:
    twin = reusing()
    twin.add(text(0, [1] * 8))
    plan = twin.launch()
    assert plan.prefill is not None and plan.prefill.captures == (0,)
    with pytest.raises(ValueError, match="captures the state of 1 rows, got 0 states"):
        twin.scheduler.update(plan.prefill, np.zeros((1, 1), np.int32), np.zeros(1, np.int32), np.ones(1, np.bool_))
    twin.drain()  # nothing was committed


def test_the_state_of_a_row_that_was_dropped_is_thrown_away() -> None:
    twin = reusing()
    twin.add(text(0, [1] * 9))
    assert captures(twin.launch()) == [0]
    twin.scheduler.abort({"0"})
    twin.launch()
    twin.land()
    assert len(twin.scheduler.snapshots) == 0
    assert finish(twin, text(1, [1] * 9)) == [[(1, 0, 8)], [(1, 8, 1)]]
    twin.drain()


def test_nobody_starts_from_what_a_failed_sequence_left_or_took_from_others() -> None:
    """What is not finite may lie in what a sequence that ended well has left."""
    twin = reusing()
    finish(twin, text(0, [1] * 8))
    other = text(1, [2] * 9)
    finish(twin, other)
    bad = twin.add(text(2, [1] * 13, max_tokens=8))  # hits 8, and publishes the block behind
    twin.step()
    assert (bad.num_cached_tokens, twin.scheduler.snapshots.num_stored) == (8, 4)
    twin.launch()
    twin.land(failing={bad})
    assert bad.status == SequenceStatus.FINISHED_FAILED
    snapshots = twin.scheduler.snapshots
    assert [key in snapshots for key in (*bad.block_keys, *other.block_keys)] == [False] * 3 + [False, True]
    assert {0, 1} < set(twin.launch().discarded_blocks[0])  # those that it took, and its own
    assert finish(twin, text(3, [1] * 13)) == [[(3, 0, 12)], [(3, 12, 1)]]
    assert finish(twin, text(4, [1] * 13)) == [[(4, 12, 1)]]  # in the blocks of 3: the twin knows who wrote them
    assert finish(twin, text(5, [2] * 9)) == [[(5, 8, 1)]]
    twin.drain()


def test_a_sequence_that_fails_takes_its_beginning_from_those_that_come_later() -> None:
    twin = reusing()
    finish(twin, text(0, [1] * 8))
    bad, good = twin.add(text(1, [1] * 9, max_tokens=20)), twin.add(text(2, [1] * 9, max_tokens=20))
    twin.step()
    assert bad.block_table[:2] == good.block_table[:2] == [0, 1]
    twin.launch()
    twin.land(failing={bad})
    assert finish(twin, text(3, [1] * 9))[0][0][1] == 0
    assert good.block_table[:2] == [0, 1] and not good.status.finished
    twin.drain()


def test_who_shares_the_blocks_of_a_failed_sequence_does_not_publish_them_again() -> None:
    twin = reusing()
    bad = twin.add(text(0, [1] * 9, max_tokens=20))
    twin.step()
    twin.step()
    twin.launch()
    other = twin.add(text(1, [1] * 9, max_tokens=20))
    twin.launch()
    assert (other.num_cached_tokens, other.block_table[:2]) == (8, bad.block_table[:2])
    twin.land(failing={bad})
    twin.land()
    for _ in range(5):  # it fills a block of its own
        twin.step()
    assert [block for _, block, _ in other.published] == other.block_table[2:3]
    assert finish(twin, text(2, [1] * 9)) == [[(2, 0, 8)], [(2, 8, 1)]]
    twin.drain()


# What has lost its meaning


def test_snapshots_that_are_given_up_are_told_by_the_next_plan_if_someone_holds_them() -> None:
    twin = reusing(snapshot_budget=2 * SNAPSHOT, buckets=BucketTable(ONE_STEP.decode, (Bucket(4, 4, 8),)))
    finish(twin, text(0, [1] * 9))
    finish(twin, text(1, [2] * 4))  # drives out the one at 4
    at_4, at_8, other = twin.device.kept
    assert twin.launch().discarded_snapshots == (at_4,)
    bad = twin.add(text(2, [1] * 9))
    twin.launch()
    twin.land(failing={bad})
    assert twin.launch().discarded_snapshots == (at_8,)
    twin.device.kept.clear()
    del other
    twin.scheduler.reset()
    assert twin.launch().discarded_snapshots == ()


def test_a_snapshot_that_is_given_up_after_it_was_planned_is_told_by_a_later_plan() -> None:
    twin = reusing(snapshot_budget=SNAPSHOT, buckets=BucketTable(ONE_STEP.decode, (Bucket(1, 4, 8),)))
    finish(twin, text(0, [1] * 4))
    twin.add(text(1, [2] * 4))
    assert captures(twin.launch()) == [1]
    twin.add(text(2, [1] * 5))
    plan = twin.launch()
    assert restored(plan) == [(2, 4)] and plan.discarded_snapshots == ()
    twin.land()  # what is captured of 1 takes the place of what 2 starts from
    assert twin.launch().discarded_snapshots == (plan.restores[0].state,)
    twin.drain(depth=2)


def test_what_is_discarded_is_told_by_the_next_plan() -> None:
    twin = reusing(num_blocks=8, max_num_seqs=1)
    twin.add(text(0, [1] * 9))
    plans = [twin.step(), twin.step()]
    assert [(p.discarded_blocks, p.discarded_slots) for p in plans] == [(((),), ((),))] * 2
    twin.add(text(1, [2] * 29))
    plan = twin.step()
    # The slot, and of the blocks of 0 the one that was not full; 1 takes 7, one more than had no key.
    assert (plan.discarded_blocks, plan.discarded_slots) == (((2, 1),), ((0,),))
    assert twin.sequences[1].block_table == [3, 4, 5, 6, 7, 2, 1]
    twin.drain()


def test_a_reset_forgets_all_that_was_cached() -> None:
    twin = reusing()
    finish(twin, text(0, [1] * 9))
    twin.scheduler.reset()
    assert len(twin.scheduler.snapshots) == 0
    assert finish(twin, text(1, [1] * 9)) == [[(1, 0, 8)], [(1, 8, 1)]]
    twin.drain()


# Everything at once


def test_what_a_plan_starts_with_is_not_handed_out_by_the_same_plan() -> None:
    buckets = BucketTable(decode=(Bucket(2, 1, 8),), prefill=(Bucket(2, 8, 8),))
    twin = reusing(num_blocks=9, max_num_seqs=2, buckets=buckets)
    finish(twin, text(0, [1] * 9))
    finish(twin, text(1, [2] * 9))  # 4 cached blocks; those of 0 are the first to go
    long = twin.add(text(2, [3] * 28))
    twin.step()
    twin.step()
    hit = twin.add(text(3, [1] * 9, max_tokens=2))
    plan = twin.step()
    # The long prompt takes the last block without a key and a cached one, the other one its third.
    assert prefilled(plan) == [(2, 16, 8), (3, 8, 1)]
    assert (long.block_table, hit.block_table) == ([6, 7, 8, 2, 5, 4], [0, 1, 3])
    twin.drain()


def test_beginnings_shared_by_many_change_no_text() -> None:
    def texts(**limits: object) -> tuple[list[list[int]], Twin]:
        twin = reusing(max_num_seqs=3, **limits)
        for seq_id in range(40):
            twin.add(text(seq_id, [seq_id % 2] * (1 + seq_id % 7) + [3] * (seq_id % 5), max_tokens=1 + seq_id % 20))
            if seq_id % 3 == 0:
                twin.step()
        twin.drain(depth=2)
        return [s.output_token_ids for s in twin.sequences], twin

    cold, _ = texts(prefix_caching=False)
    plenty, _ = texts()
    scarce, twin = texts(num_blocks=8, snapshot_budget=4 * SNAPSHOT)
    assert cold == plenty == scarce
    snapshots = twin.scheduler.snapshots
    assert min(snapshots.num_hits, snapshots.num_evicted, twin.scheduler.num_preemptions) > 0
    assert sum(s.num_cached_tokens for s in twin.sequences) > 0
