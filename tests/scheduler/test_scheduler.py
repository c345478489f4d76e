"""The scheduler's rules one by one: who is in a plan, where, and with what."""

import pytest

from deepinfer_jax.scheduler import Bucket, BucketTable, Sequence, blocks_per_decode
from tests.support.scheduler_twin import (
    EOS,
    Twin,
    continuation,
    decoded,
    endless,
    give_up,
    make_scheduler,
    make_sequence,
    prefilled,
)

pytestmark = pytest.mark.pure

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
    twin.add(endless(0, prompt_len=22))
    chunks = [step for step in (twin.step().prefill for _ in range(4)) if step]
    # Of the last 6 tokens 4 fill the short program; 6 would leave most of the long one empty.
    assert [(c.bucket.time, c.num_new_tokens.tolist()) for c in chunks] == [(16, [16]), (4, [4]), (4, [2])]


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
    assert twin.scheduler.limits.prompt_limit == 24
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


# Data indices


def test_new_sequences_go_to_the_data_index_with_the_least_work() -> None:
    buckets = BucketTable(decode=(Bucket(3, 1, 8),), prefill=(Bucket(3, 16, 8),))
    twin = Twin(make_scheduler(max_num_seqs=6, data_parallel_size=2, buckets=buckets))
    long, *short = [twin.add(endless(i, n)) for i, n in enumerate((16, 3, 3, 3))]
    plan = twin.launch()
    assert plan.prefill is not None
    # 4 blocks of 4 tokens on index 0 outweigh the three others, one each, on index 1.
    assert (long.dp_rank, [s.dp_rank for s in short]) == (0, [1, 1, 1])
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


def test_only_a_sequence_that_waits_for_its_results_sits_out_the_overlapped_plan() -> None:
    twin = Twin(make_scheduler())
    twin.add(endless(0, 4))
    waiting = twin.add(endless(1, 4))
    waiting.waits_for_results = True
    plans = []
    for _ in range(6):
        plans.append(decoded(twin.launch()))
        if len(twin.in_flight) == 2:
            twin.land()
    assert plans == [[], [0], [0], [0, 1], [0], [0, 1]]
    twin.drain(depth=2)


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
        give_up(twin.scheduler, second.decode)
    twin.land()
    with pytest.raises(ValueError, match="not of the oldest plan in flight"):
        give_up(twin.scheduler, first.prefill)
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
