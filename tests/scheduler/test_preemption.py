"""Who gives way when a block is needed, when it comes back, and what the others notice of it."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax.scheduler import BlockManager, Bucket, BucketTable, Sequence, SequenceStatus
from deepinfer_jax.scheduler.preemption import select_preemptions
from tests.support.scheduler_twin import Twin, continuation, decoded, endless, make_scheduler, make_sequence, prefilled

pytestmark = pytest.mark.pure


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


@pytest.mark.parametrize("num_drafts", [0, 2])
def test_a_preempted_sequence_goes_on_with_the_decode_step_that_it_would_have_had(num_drafts: int) -> None:
    """All but its last token is computed again, and no prefill step gives it a token."""
    twin = Twin(make_scheduler(num_blocks=8, tokens_per_block=4, num_drafts=num_drafts))
    twin.add(endless(0, 4))
    young = twin.add(endless(1, 4))
    while not young.num_preemptions:
        twin.step()
    reported = young.output_len
    assert reported and young.prefill_len == 4 + reported - 1
    while young.status == SequenceStatus.WAITING:
        plan = twin.step()
        assert young.output_len == reported
    assert plan.prefill is not None
    row = plan.prefill.sequences.index(young)
    assert (plan.prefill.completes[row], plan.prefill.samples[row]) == (True, False)
    assert young.num_tokens == len(young) - 1
    assert decoded(twin.step()) == [1] and young.output_len > reported
    twin.drain()


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
    assert first.prefill and first.prefill.dp_rank.tolist() == [0, 1, 0]
    twin.step()
    twin.step()
    twin.add(endless(3, prompt_len=4, max_tokens=1))  # index 1 has a slot and two blocks for it
    # The pool of index 0 is used up, so 0 takes the blocks of 2.
    assert prefilled(twin.step()) == [(0, 12, 4), (1, 12, 4)]
    assert twin.sequences[2].num_preemptions == 1
    twin.drain()


# Who gives way when blocks are shared


def holders_of(pool: BlockManager, *tables: list[int]) -> list[Sequence]:
    """Sequences with these block tables, in a pool all of whose blocks are allocated once already."""
    sequences = []
    for seq_id, table in enumerate(tables):
        sequences.append(make_sequence(seq_id, 1))
        sequences[-1].block_table = table
        pool.pin(table)
    return sequences


def test_a_sequence_that_would_free_nothing_is_passed_over() -> None:
    pool = BlockManager(6)
    blocks = pool.allocate(6)
    sharing, alone, unneeded = holders_of(pool, [0, 1], [0, 2, 3], [4, 5])
    pool.free(blocks[2:])
    assert select_preemptions(1, [sharing, alone, unneeded], pool) == [alone]  # 0 and 1 are held by others still
    assert select_preemptions(3, [sharing, alone, unneeded], pool) == [alone, unneeded]
    assert select_preemptions(2, [unneeded, alone, sharing], pool) == [unneeded]
    assert select_preemptions(3, [unneeded, alone, sharing], pool) == [unneeded, alone]
    assert select_preemptions(5, [sharing, alone, unneeded], pool) == []


def test_what_two_share_is_free_when_both_have_let_it_go() -> None:
    pool = BlockManager(4)
    blocks = pool.allocate(4)
    first, second = holders_of(pool, [0, 1, 2], [0, 1, 3])
    pool.free(blocks)
    assert select_preemptions(1, [first, second], pool) == [first]
    assert select_preemptions(2, [first, second], pool) == [first, second]
    assert select_preemptions(4, [first, second], pool) == [first, second]


@given(
    tables=st.lists(st.sets(st.integers(0, 5), min_size=1), max_size=5),
    kept=st.sets(st.integers(0, 5)),
    wanted=st.integers(1, 6),
)
def test_the_first_give_way_until_it_is_enough_but_nobody_in_vain(
    tables: list[set[int]], kept: set[int], wanted: int
) -> None:
    pool = BlockManager(6)
    blocks = pool.allocate(6)
    candidates = holders_of(pool, *map(sorted, tables))
    pool.free([block for block in blocks if block not in kept])
    missing = pool.num_free + wanted

    def num_free(gone: list[Sequence]) -> int:
        held = kept.union(*(s.block_table for s in candidates if s not in gone))
        return 6 - len(held)

    chosen = select_preemptions(missing, candidates, pool)
    if num_free(candidates) < missing:
        assert chosen == []
        return
    assert num_free(chosen) >= missing
    count = next(n for n in itertools.count(1) if num_free(candidates[:n]) >= missing)
    held_by_others = kept.union(*(s.block_table for s in candidates[count:]))
    assert chosen == [s for s in candidates[:count] if not held_by_others.issuperset(s.block_table)]
