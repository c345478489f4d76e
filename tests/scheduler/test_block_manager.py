"""The accounts of a pool against a brute-force count of references."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax.scheduler import Allocation, BlockManager


def test_the_free_list_is_first_in_first_out_and_a_table_is_freed_from_its_end() -> None:
    pool = BlockManager(5)
    assert pool.allocate(2) == [0, 1]
    assert pool.allocate(1) == [2]
    pool.free([0, 1])
    assert pool.allocate(4) == [3, 4, 1, 0]


def test_a_pinned_block_needs_as_many_frees_as_references() -> None:
    pool = BlockManager(2)
    blocks = pool.allocate(2)
    pool.pin(blocks[:1])
    pool.free(blocks)
    assert (pool.num_free, pool.usage) == (1, 0.5)
    pool.free(blocks[:1])
    assert (pool.num_free, pool.usage) == (2, 0.0)


def test_every_id_of_the_pool_can_be_had_and_one_more_never() -> None:
    pool = BlockManager(3)
    assert [pool.can_allocate(n) for n in (0, 3, 4)] == [Allocation.OK, Allocation.OK, Allocation.NEVER]
    assert sorted(pool.allocate(3)) == [0, 1, 2]
    assert [pool.can_allocate(n) for n in (0, 1, 4)] == [Allocation.OK, Allocation.LATER, Allocation.NEVER]


def test_misuse_is_an_error_that_names_the_block() -> None:
    pool = BlockManager(3)
    (block,) = pool.allocate(1)
    pool.free([block])
    with pytest.raises(ValueError, match="block 0 is free"):
        pool.free([block])
    with pytest.raises(ValueError, match="block 0 is free"):
        pool.pin([block])
    for unknown in (-1, 3):
        with pytest.raises(ValueError, match=f"block {unknown} is not in the pool, whose ids are 0 to 2"):
            pool.free([unknown])
    with pytest.raises(RuntimeError, match="4 blocks asked for, 3 of 3 are free"):
        pool.allocate(4)
    with pytest.raises(ValueError, match="at least 1 block, got 0"):
        BlockManager(0)


@given(st.integers(1, 6), st.lists(st.tuples(st.sampled_from(["allocate", "pin", "free"]), st.integers(0, 6))))
def test_any_calls_keep_the_accounts(num_blocks: int, calls: list[tuple[str, int]]) -> None:
    pool = BlockManager(num_blocks)
    references = [0] * num_blocks
    for name, number in calls:
        if name == "allocate" and number <= references.count(0):
            for block in pool.allocate(number):
                assert references[block] == 0, "handed out twice"
                references[block] = 1
        elif name == "allocate":
            with pytest.raises(RuntimeError):
                pool.allocate(number)
        elif number < num_blocks and references[number]:
            getattr(pool, name)([number])
            references[number] += 1 if name == "pin" else -1
        else:
            with pytest.raises(ValueError, match=f"block {number} is"):
                getattr(pool, name)([number])
        assert pool.num_free == references.count(0)
        assert pool.usage == pytest.approx(1 - references.count(0) / num_blocks)
        assert [pool.can_allocate(n) is Allocation.OK for n in range(num_blocks + 1)] == [
            n <= references.count(0) for n in range(num_blocks + 1)
        ]
