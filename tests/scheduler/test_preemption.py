"""Who gives way when a block is needed, when it comes back, and what the others notice of it."""

import pytest
from twin import Twin, continuation, decoded, endless, make_scheduler, prefilled

from deepinfer_jax.scheduler import Bucket, BucketTable, Sequence, SequenceStatus


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
