"""The scheduler's rules one by one: who is in a plan, with what, and who gives way."""

import numpy as np
import pytest
from twin import EOS, Twin, continuation, make_scheduler, make_sequence

from deepinfer_jax.scheduler import (
    Bucket,
    BucketTable,
    DecodeStep,
    PrefillStep,
    Sequence,
    SequenceStatus,
    StepPlan,
    blocks_per_decode,
)


def endless(seq_id: int, prompt_len: int, max_tokens: int = 20) -> Sequence:
    """A sequence that only max_tokens stops."""
    sequence = make_sequence(seq_id, prompt_len, max_tokens)
    sequence.ignore_eos = True
    return sequence


def prefilled(plan: StepPlan) -> list[tuple[int, int, int]]:
    """(sequence, start, new tokens) of each chunk."""
    if plan.prefill is None:
        return []
    ids = [s.seq_id for s in plan.prefill.sequences]
    return list(zip(ids, plan.prefill.starts.tolist(), plan.prefill.num_new_tokens.tolist(), strict=True))


def decoded(plan: StepPlan) -> list[int]:
    return [s.seq_id for s in plan.decode.sequences] if plan.decode else []


def give_up(twin: Twin, step: PrefillStep | DecodeStep) -> None:
    n = len(step.sequences)
    twin.scheduler.update(step, np.zeros((n, 1), np.int32), np.zeros(n, np.int32), np.zeros(n, np.bool_))


# Prefill and decode


def test_a_prompt_runs_in_chunks_and_then_one_token_per_plan() -> None:
    twin = Twin(make_scheduler())
    twin.add(endless(0, prompt_len=19, max_tokens=3))
    plans = [twin.step() for _ in range(5)]
    assert [prefilled(p) for p in plans] == [[(0, 0, 8)], [(0, 8, 8)], [(0, 16, 3)], [], []]
    assert [decoded(p) for p in plans] == [[], [], [], [0], [0]]
    assert [p.prefill.completes.tolist() for p in plans[:3] if p.prefill] == [[False], [False], [True]]
    twin.drain()


def test_running_sequences_decode_beside_every_chunk_of_a_prompt() -> None:
    twin = Twin(make_scheduler())
    twin.add(endless(0, prompt_len=3))
    twin.step()
    twin.add(endless(1, prompt_len=20))
    plans = [twin.step() for _ in range(4)]
    assert [decoded(p) for p in plans] == [[0], [0], [0], [0, 1]]
    assert [prefilled(p) for p in plans] == [[(1, 0, 8)], [(1, 8, 8)], [(1, 16, 4)], []]


def test_blocks_come_as_the_prompt_grows_and_as_decoding_needs_them() -> None:
    twin = Twin(make_scheduler(tokens_per_block=4))
    sequence = twin.add(endless(0, prompt_len=11))
    tables = []
    for _ in range(5):
        plan = twin.step()
        step = plan.prefill or plan.decode
        assert step is not None
        tables.append((len(sequence.block_table), int(step.first_new_block[0]), step.new_blocks[0].tolist()))
    # chunks of 8 and 3 tokens; decode steps at positions 11, 12, 13: the second opens block 3
    assert tables == [(2, 0, [0, 1]), (3, 2, [2, -1]), (3, 0, [-1]), (4, 3, [3]), (4, 0, [-1])]


def test_a_later_chunk_is_planned_while_the_one_before_is_in_flight() -> None:
    twin = Twin(make_scheduler())
    twin.add(endless(0, prompt_len=12))
    assert prefilled(twin.launch()) == [(0, 0, 8)]
    assert prefilled(twin.launch()) == [(0, 8, 4)]
    twin.land()
    assert decoded(twin.launch()) == [0]  # its first token is still in flight
    twin.drain(depth=2)


def test_no_step_is_launched_that_surely_gives_nothing() -> None:
    twin = Twin(make_scheduler())
    by_tokens, by_length = twin.add(endless(0, prompt_len=4, max_tokens=5)), twin.add(endless(1, prompt_len=29))
    steps = {by_tokens: 0, by_length: 0}
    for _ in range(10):
        plan = twin.launch()
        for sequence in plan.decode.sequences if plan.decode else []:
            steps[sequence] += 1
        if len(twin.in_flight) == 2 or plan.empty:
            twin.land()
        if not twin.in_flight:
            break
    twin.drain()
    # The first token of each comes from the prefill step; 29 + 4 tokens exceed max_model_len 32.
    assert steps == {by_tokens: 4, by_length: 3}


def test_the_row_launched_behind_an_eos_is_passed_over() -> None:
    twin = Twin(make_scheduler())
    sequence = next(s for s in (make_sequence(i, 5, 20) for i in range(500)) if continuation(s)[1:] == [EOS])
    twin.add(sequence)
    twin.step()
    twin.launch()
    behind = twin.launch()
    twin.land()
    assert (sequence.finish_reason, sequence.block_table, sequence.state_id) == ("stop", [], -1)
    assert behind.decode is not None and behind.decode.sequences == [sequence]
    assert behind.decode.dropped == {sequence}
    twin.drain()
    assert sequence.output_len == 2


def test_the_prefill_program_is_the_one_that_the_chunks_fill_best() -> None:
    def shape_of(*prompts: int) -> tuple[int, int]:
        twin = Twin(make_scheduler(max_num_seqs=8, max_prefill_tokens=16))  # (1, 16) and (8, 2)
        for seq_id, prompt_len in enumerate(prompts):
            twin.add(make_sequence(seq_id, prompt_len))
        step = twin.launch().prefill
        assert step is not None
        return step.bucket.rows, step.bucket.time

    assert shape_of(16) == (1, 16)
    assert shape_of(3, 3, 3) == (8, 2)  # 6 of 16 against 3 of 16
    assert shape_of(9, 1, 1, 1, 1) == (1, 16)  # 9 of 16 against 6
    assert shape_of(5, 5) == (1, 16)  # 5 of 16 against 4
    assert shape_of(4, 4, 4) == (8, 2)


def test_a_short_chunk_does_not_run_in_a_long_program() -> None:
    buckets = BucketTable(decode=(Bucket(4, 1, 8),), prefill=(Bucket(1, 4, 8), Bucket(1, 16, 8)))
    twin = Twin(make_scheduler(buckets=buckets))
    twin.add(endless(0, prompt_len=19))
    assert [p.prefill.bucket.time for p in (twin.step(), twin.step()) if p.prefill] == [16, 4]


def test_the_program_widens_with_the_block_tables() -> None:
    twin = Twin(make_scheduler(max_model_len=80, tokens_per_block=2, max_num_seqs=1))
    twin.add(make_sequence(0, prompt_len=29, max_tokens=40, max_model_len=80)).ignore_eos = True
    widths = [plan.decode.bucket.width for plan in (twin.step() for _ in range(40)) if plan.decode]
    assert widths == [16] * 3 + [26] * 20 + [40] * (len(widths) - 23)  # 32 and 52 tokens fill 16 and 26 blocks
    twin.drain()


def test_decode_rows_are_taken_off_the_token_budget() -> None:
    twin = Twin(make_scheduler(max_num_seqs=4, max_num_batched_tokens=6))
    for seq_id in range(3):
        twin.add(endless(seq_id, prompt_len=2))
    assert prefilled(twin.step()) == [(0, 0, 2), (1, 0, 2), (2, 0, 2)]
    twin.add(endless(3, prompt_len=20))
    plan = twin.step()
    assert (prefilled(plan), decoded(plan)) == ([(3, 0, 3)], [0, 1, 2])


def test_without_chunked_prefill_prompts_run_whole_and_in_order() -> None:
    twin = Twin(make_scheduler(chunked_prefill=False, max_prefill_tokens=24, max_num_batched_tokens=24))
    assert twin.scheduler.prompt_limit == 24
    for seq_id, prompt_len in enumerate((24, 24, 1, 25)):
        twin.add(endless(seq_id, prompt_len))
    plans = [twin.step() for _ in range(3)]
    # The second fills the budget, but waits for no running sequence to end; the short third does not overtake it.
    assert [prefilled(p) for p in plans] == [[(0, 0, 24)], [(1, 0, 24)], [(2, 0, 1)]]
    assert [s.seq_id for s in plans[0].ignored] == [3]


def test_a_recomputation_may_be_cut_even_without_chunked_prefill() -> None:
    # Prompts of at most 8 tokens run whole; with its output the preempted one is longer than any program.
    twin = Twin(make_scheduler(chunked_prefill=False, max_prefill_tokens=8, num_blocks=8, tokens_per_block=4))
    for seq_id in range(2):
        twin.add(endless(seq_id, prompt_len=8, max_tokens=20))
    chunks = []
    while twin.scheduler.num_unfinished:
        chunks += [chunk for chunk in prefilled(twin.step()) if chunk[1]]
    twin.drain()
    assert chunks and all(seq_id == 1 for seq_id, _, _ in chunks)


# Preemption


def two_of_which_one_must_give_way(**limits: bool) -> tuple[Twin, Sequence, Sequence]:
    """Two sequences of 4 + 20 tokens, for which the pool of 8 blocks of 4 tokens is too small together."""
    twin = Twin(make_scheduler(num_blocks=8, tokens_per_block=4, **limits))
    return twin, twin.add(endless(0, 4)), twin.add(endless(1, 4))


@pytest.mark.parametrize("depth", [1, 2])
def test_the_youngest_gives_way_when_a_block_is_needed_and_not_free_and_not_before(depth: int) -> None:
    twin, old, young = two_of_which_one_must_give_way()
    while not young.num_preemptions:
        free = twin.scheduler.free_blocks
        twin.launch()
        if len(twin.in_flight) == depth:
            twin.land()
    assert free == 0
    assert (young.status, young.block_table, young.num_tokens) == (SequenceStatus.WAITING, [], 0)
    twin.drain(depth)  # which also compares the texts with those of an undisturbed run
    assert (old.num_preemptions, twin.scheduler.num_preemptions) == (0, young.num_preemptions)
    assert young.output_len == old.output_len == 20


def test_a_preempted_sequence_starts_again_once_all_its_blocks_are_free() -> None:
    twin, old, young = two_of_which_one_must_give_way()
    while not young.num_preemptions:
        twin.step()
    while not old.status.finished:
        twin.step()
        assert young.state_id == -1  # 16 tokens and more, while the old one holds half of the pool or more
    plan = twin.step()
    assert prefilled(plan) == [(1, 0, 8)]
    twin.drain()
    assert young.num_preemptions == 1


def test_a_preempted_sequence_keeps_its_place_in_the_order_of_arrival() -> None:
    twin, _, young = two_of_which_one_must_give_way()
    while not young.num_preemptions:
        twin.step()
    late = twin.add(endless(2, prompt_len=1, max_tokens=1))  # it would fit at once
    while late.state_id == -1 and not late.status.finished:
        twin.step()
        assert late.status.finished or late.state_id == -1 or young.state_id >= 0
    twin.drain()


def test_stop_preempted_request_ends_it_with_its_reason() -> None:
    twin, old, young = two_of_which_one_must_give_way(stop_preempted_request=True)
    ignored: list[Sequence] = []
    while twin.scheduler.num_unfinished:
        ignored += twin.step().ignored
    assert ignored == [young]
    assert (young.finish_reason, old.finish_reason) == ("insufficient_system_resource", "length")
    assert young.output_token_ids == continuation(young)[: young.output_len]
    twin.drain()


def test_a_started_prompt_takes_blocks_from_younger_ones_and_a_new_one_from_nobody() -> None:
    # Rows of 4 tokens, one block each: the old prompt needs 6 blocks, the pool has 6.
    buckets = BucketTable(decode=(Bucket(4, 1, 8),), prefill=(Bucket(2, 4, 8),))
    twin = Twin(make_scheduler(num_blocks=6, tokens_per_block=4, buckets=buckets))
    old = twin.add(endless(0, prompt_len=24, max_tokens=1))
    young = twin.add(endless(1, prompt_len=12, max_tokens=1))
    new = twin.add(endless(2, prompt_len=4, max_tokens=1))
    plans = [twin.step() for _ in range(6)]
    assert [prefilled(p) for p in plans] == [
        [(0, 0, 4), (1, 0, 4)],
        [(0, 4, 4), (1, 4, 4)],
        [(0, 8, 4), (1, 8, 4)],  # now the pool is used up; 1 has its token and frees its three blocks
        [(0, 12, 4), (2, 0, 4)],
        [(0, 16, 4)],
        [(0, 20, 4)],
    ]
    assert {s.num_preemptions for s in (old, young, new)} == {0}

    twin = Twin(make_scheduler(num_blocks=6, tokens_per_block=4, buckets=buckets))
    old, young = twin.add(endless(0, prompt_len=24, max_tokens=1)), twin.add(endless(1, prompt_len=12, max_tokens=8))
    for _ in range(3):
        twin.step()
    new = twin.add(endless(2, prompt_len=4, max_tokens=1))
    assert prefilled(twin.step()) == [(0, 12, 4)]
    assert (young.num_preemptions, old.num_preemptions, new.state_id) == (1, 0, -1)
    twin.drain()


def test_a_row_that_gives_way_to_a_prompt_is_not_in_the_decode_step_of_that_plan() -> None:
    buckets = BucketTable(decode=(Bucket(2, 1, 8),), prefill=(Bucket(1, 4, 8),))
    twin = Twin(make_scheduler(max_num_seqs=2, num_blocks=6, tokens_per_block=4, buckets=buckets))
    old = twin.add(endless(0, prompt_len=24, max_tokens=1))
    old.schedulable = False
    young = twin.add(endless(1, prompt_len=11, max_tokens=12))
    for _ in range(3):
        twin.step()
    old.schedulable = True
    plans = []
    while not young.num_preemptions:
        plans.append(twin.step())
    assert [decoded(p) for p in plans] == [[1]] * (len(plans) - 1) + [[]]
    assert prefilled(plans[-1])[0][0] == 0
    twin.drain()


def test_nobody_new_overtakes_what_gave_way_in_the_same_plan() -> None:
    buckets = BucketTable(decode=(Bucket(2, 1, 8),), prefill=(Bucket(2, 4, 8),))
    twin = Twin(make_scheduler(data_parallel_size=2, num_blocks=6, tokens_per_block=4, buckets=buckets))
    for seq_id, prompt_len in enumerate((24, 24, 8)):
        twin.add(endless(seq_id, prompt_len, max_tokens=1 if prompt_len == 24 else 9))
    first = twin.step()
    assert first.prefill and first.prefill.data_index.tolist() == [0, 1, 0]
    twin.step()
    twin.step()
    twin.add(endless(3, prompt_len=4, max_tokens=1))  # index 1 has a slot and two blocks for it
    # The pool of index 0 is used up, so 0 takes the blocks of 2.
    assert prefilled(twin.step()) == [(0, 12, 4), (1, 12, 4)]
    assert twin.sequences[2].num_preemptions == 1
    twin.drain()


# Abort, failure, refusal


@pytest.mark.parametrize("num_launches", range(7))
@pytest.mark.parametrize("depth", [1, 2])
def test_abort_at_any_moment_frees_at_once_and_is_told_once(num_launches: int, depth: int) -> None:
    twin = Twin(make_scheduler(max_num_seqs=2))
    hit, other = twin.add(endless(0, prompt_len=20)), twin.add(endless(1, prompt_len=3))
    waiting = twin.add(endless(2, prompt_len=3))
    for _ in range(num_launches):  # before, between and in chunks, in decode steps
        if len(twin.in_flight) == depth:
            twin.land()
        twin.launch()
    assert twin.scheduler.abort(["0", "2", "unknown"]) == (2, len(hit) + 3)
    assert twin.scheduler.abort(["0", "2"]) == (0, 0)
    assert hit.block_table == [] and hit.state_id == -1
    twin.check_accounts()
    while len(twin.in_flight) >= depth:
        twin.land()
    assert twin.launch().ignored == (hit, waiting)
    assert (hit.finish_reason, waiting.finish_reason) == ("abort", "abort")
    twin.drain(depth)
    assert other.finish_reason == "length"


def test_abort_of_a_finished_sequence_changes_nothing() -> None:
    twin = Twin(make_scheduler())
    sequence = twin.add(endless(0, prompt_len=3, max_tokens=1))
    twin.step()
    assert twin.scheduler.abort({"0"}) == (0, 0)
    assert sequence.finish_reason == "length"
    assert twin.launch().ignored == ()


def test_a_row_with_infinite_logits_fails_alone() -> None:
    twin = Twin(make_scheduler())
    bad, good = twin.add(endless(0, 2)), twin.add(endless(1, 2))
    long = twin.add(endless(2, 20))  # fails at a chunk that is not its last
    assert prefilled(twin.launch()) == [(0, 0, 2), (1, 0, 2), (2, 0, 2)]
    twin.land(failing={bad, long})
    assert [s.finish_reason for s in (bad, good, long)] == ["logits_not_finite", "", "logits_not_finite"]
    assert [s.output_len for s in (bad, good, long)] == [0, 1, 0]
    twin.drain()


def test_steps_that_went_wrong_are_given_up_by_booking_failures() -> None:
    twin = Twin(make_scheduler(max_num_seqs=2))
    sequences = [twin.add(endless(seq_id, prompt_len=6)) for seq_id in range(3)]
    twin.step()
    for plan in (twin.launch(), twin.launch()):
        for step in (plan.prefill, plan.decode):
            if step:
                give_up(twin, step)
    twin.in_flight.clear()
    assert [s.status for s in sequences[:2]] == [SequenceStatus.FINISHED_FAILED] * 2
    twin.scheduler.check_idle()
    twin.ends = dict.fromkeys(sequences[:2], 1)
    twin.drain()
    assert sequences[2].finish_reason == "length"


def test_requests_that_can_never_run_are_refused_with_the_arithmetic() -> None:
    scheduler = make_scheduler(num_blocks=5, tokens_per_block=4, max_model_len=32)
    assert scheduler.refusal(33, 1) == "the prompt has 33 tokens, the limit is 32"
    assert scheduler.refusal(8, 13) is None  # 20 tokens in the cache: the 21st is given out, never computed on
    assert scheduler.refusal(8, 14) == (
        "8 prompt tokens and max_tokens 14, at most 21 tokens in the cache, need 6 blocks of 4 tokens, the pool has 5; "
        "lower max_tokens, shorten the prompt or give the engine more blocks"
    )
    whole = make_scheduler(chunked_prefill=False, max_prefill_tokens=16)
    assert whole.refusal(17, 1) == "the prompt has 17 tokens, the limit without chunked prefill is 16"
    # However large max_tokens is, max_model_len ends the text.
    assert make_scheduler(num_blocks=8, tokens_per_block=4, max_model_len=32).refusal(1, 2**31) is None


def test_a_refused_sequence_is_told_by_the_next_plan_and_counts_as_unfinished_until_then() -> None:
    twin = Twin(make_scheduler())
    fits, too_long = twin.add(endless(0, 32)), twin.add(endless(1, 33))
    assert (twin.scheduler.num_unfinished, twin.scheduler.num_waiting) == (2, 1)
    plan = twin.launch()
    assert plan.ignored == (too_long,) and too_long.finish_reason == "prompt_length_exceeded"
    assert twin.scheduler.num_unfinished == 1
    twin.drain()
    assert fits.output_len == 1


# Data indices


def test_new_sequences_go_to_the_data_index_with_the_least_work() -> None:
    buckets = BucketTable(decode=(Bucket(3, 1, 8),), prefill=(Bucket(3, 16, 8),))
    twin = Twin(make_scheduler(max_num_seqs=6, data_parallel_size=2, buckets=buckets))
    long, *short = [twin.add(endless(i, n)) for i, n in enumerate((16, 3, 3, 3))]
    plan = twin.launch()
    assert plan.prefill is not None
    # 4 blocks of 4 tokens on index 0 outweigh the three others, one each, on index 1.
    assert (long.data_index, [s.data_index for s in short]) == (0, [1, 1, 1])
    assert plan.prefill.row.tolist() == [0, 0, 1, 2]
    assert plan.prefill.slots.tolist() == [0, 0, 1, 2]
    twin.drain()


def test_every_data_index_takes_a_chunk_of_its_own_long_prompt() -> None:
    twin = Twin(make_scheduler(max_num_seqs=4, data_parallel_size=4, max_num_batched_tokens=8))
    for seq_id in range(4):
        twin.add(endless(seq_id, prompt_len=30))
    assert prefilled(twin.launch()) == [(seq_id, 0, 8) for seq_id in range(4)]


def test_a_seat_limit_that_the_indices_do_not_divide_still_holds_in_all() -> None:
    twin = Twin(make_scheduler(max_num_seqs=3, data_parallel_size=2))
    for seq_id in range(4):
        twin.add(endless(seq_id, prompt_len=3))
    twin.step()
    twin.step()
    assert (twin.scheduler.total_slots, twin.scheduler.num_running, twin.scheduler.num_waiting) == (4, 3, 1)
    twin.drain()


# What stands in whose way


def test_a_sequence_held_back_delays_nobody() -> None:
    twin = Twin(make_scheduler(max_num_seqs=1))
    held, other = twin.add(endless(0, 3)), twin.add(endless(1, 3, max_tokens=2))
    held.schedulable = False
    while not other.status.finished:
        twin.step()
    assert held.state_id == -1
    assert twin.launch().empty
    held.schedulable = True
    twin.drain()


def test_a_running_sequence_held_back_sits_out_and_keeps_its_place() -> None:
    twin = Twin(make_scheduler())
    held, other = twin.add(endless(0, 2)), twin.add(endless(1, 2))
    twin.step()
    held.schedulable = False
    assert decoded(twin.step()) == [1]
    assert held.state_id >= 0 and other.output_len == 2
    held.schedulable = True
    assert decoded(twin.step()) == [0, 1]
    twin.drain()


# The protocol of plans


def test_arrays_are_shared_while_the_same_rows_decode_and_cannot_be_written() -> None:
    twin = Twin(make_scheduler(tokens_per_block=8))
    for seq_id in range(3):
        twin.add(endless(seq_id, prompt_len=2, max_tokens=4 + seq_id))
    first, second = [plan.decode for plan in (twin.step(), twin.step(), twin.step())][1:]
    assert first and second and first.row is second.row and first.new_blocks is second.new_blocks
    with pytest.raises(ValueError, match="read-only"):
        first.row[0] = 1
    twin.drain()
    assert [s.seq_id for s in first.sequences] == [0, 1, 2]  # what finished since is still in the step's rows


def test_two_plans_may_be_in_flight_and_no_third() -> None:
    twin = Twin(make_scheduler())
    twin.add(endless(0, 3))
    twin.launch()
    twin.launch()
    with pytest.raises(RuntimeError, match="2 plans are in flight"):
        twin.scheduler.schedule()
    twin.drain(depth=2)


def test_plans_are_booked_in_order_and_steps_once() -> None:
    twin = Twin(make_scheduler())
    twin.add(endless(0, 3))
    first, second = twin.launch(), twin.launch()
    assert first.prefill and second.decode
    with pytest.raises(ValueError, match="not of the oldest plan in flight"):
        give_up(twin, second.decode)
    twin.land()
    with pytest.raises(ValueError, match="not of the oldest plan in flight"):
        give_up(twin, first.prefill)
    twin.drain()


def test_check_idle_says_what_is_held() -> None:
    twin = Twin(make_scheduler(num_blocks=10))
    twin.scheduler.check_idle()
    twin.add(endless(0, 3))
    twin.step()
    with pytest.raises(AssertionError, match="1 sequences run, 9 of 10 blocks and 3 of 4 slots are free"):
        twin.scheduler.check_idle()


def test_a_decode_step_adds_no_more_blocks_than_its_tokens_can_begin() -> None:
    assert [blocks_per_decode(*case) for case in ((128, 0), (128, 5), (2, 0), (2, 1), (2, 2), (4, 5))] == [
        1,
        1,
        1,
        1,
        2,
        2,
    ]


def test_sizes_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match=r"4 × 3 = 12"):
        make_scheduler(max_num_seqs=4, num_drafts=2, max_num_batched_tokens=11)
    narrow = BucketTable(decode=(Bucket(4, 1, 4),), prefill=(Bucket(1, 8, 8),))
    with pytest.raises(ValueError, match="no program is large enough for a decode step of 4 rows and 8 blocks"):
        make_scheduler(buckets=narrow)
    with pytest.raises(ValueError, match="a decode program must take 2 tokens per row"):
        make_scheduler(num_drafts=1, buckets=BucketTable(decode=(Bucket(4, 1, 8),), prefill=(Bucket(1, 8, 8),)))


@pytest.mark.parametrize(
    "sequence",
    [make_sequence(0, 0), make_sequence(0, 3, max_tokens=0), make_sequence(0, 3, max_model_len=33)],
    ids=["no prompt", "no output", "longer than the scheduler's limit"],
)
def test_sequences_that_make_no_sense_are_an_error(sequence: Sequence) -> None:
    with pytest.raises(ValueError, match="request 0: prompt_len"):
        make_scheduler().add_sequence(sequence)
