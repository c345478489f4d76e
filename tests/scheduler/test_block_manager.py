"""The accounts of a pool against a brute-force count of references."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax.scheduler import BlockManager

pytestmark = pytest.mark.pure


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
    assert pool.num_free == 1
    pool.free(blocks[:1])
    assert pool.num_free == 2


def test_every_id_of_the_pool_can_be_had_and_one_more_never() -> None:
    pool = BlockManager(3)
    assert sorted(pool.allocate(3)) == [0, 1, 2]
    assert pool.allocate(0) == []
    with pytest.raises(RuntimeError, match="1 blocks asked for, 0 of 3 are free"):
        pool.allocate(1)


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


def test_a_freed_block_keeps_its_key_and_goes_after_those_without_one() -> None:
    pool = BlockManager(5)
    pool.allocate(4)
    for block, key in ((0, b"a"), (1, b"b"), (2, b"c")):
        assert pool.publish(block, key)
    pool.free([0, 1, 2, 3])  # from the end of the table: 3 without a key, then 2, 1, 0
    assert pool.num_free == 5
    assert [pool.match(key) for key in (b"a", b"b", b"c", b"d")] == [0, 1, 2, None]
    pool.touch([2, 4])
    assert pool.allocate(3) == [4, 3, 1]  # 2 was the next to go before it was touched
    assert [pool.match(key) for key in (b"a", b"b", b"c")] == [0, None, 2]
    pool.pin([2])
    assert (pool.num_free, pool.num_references(2)) == (1, 1)
    assert pool.allocate(1) == [0]
    pool.free([2])
    assert pool.match(b"c") == 2


def test_a_key_stays_with_the_block_that_has_had_it_longest() -> None:
    pool = BlockManager(3)
    pool.allocate(2)
    assert pool.publish(0, b"a")
    assert not pool.publish(1, b"a")
    assert pool.match(b"a") == 0
    pool.forget(1, b"a")  # not its key
    assert pool.match(b"a") == 0
    pool.forget(0, b"a")
    assert pool.match(b"a") is None
    assert pool.publish(1, b"a")
    assert pool.match(b"a") == 1
    with pytest.raises(ValueError, match="block 2 is free"):
        pool.publish(2, b"b")


def test_what_nobody_can_find_any_more_is_told_once() -> None:
    pool = BlockManager(4)
    pool.allocate(4)
    for block in (0, 1, 2):
        pool.publish(block, bytes([block]))
    assert pool.take_discarded() == ()
    pool.free([0, 1, 3])
    assert pool.take_discarded() == (3,)  # freed without a key
    assert pool.take_discarded() == ()
    assert pool.allocate(2) == [3, 1]
    assert pool.take_discarded() == (1,)  # handed out
    pool.forget(0, bytes([0]))
    pool.forget(2, bytes([2]))  # held: its owner still reads it
    assert pool.take_discarded() == (0,)
    pool.free([2])
    pool.pin([1])
    pool.free([1])
    assert pool.take_discarded() == (2,)


CALLS = st.tuples(st.sampled_from(["allocate", "pin", "free", "publish", "forget", "touch"]), st.integers(0, 6))


@given(st.integers(1, 6), st.lists(st.tuples(CALLS, st.integers(0, 2)), max_size=60))
def test_any_calls_keep_the_accounts(num_blocks: int, calls: list[tuple[tuple[str, int], int]]) -> None:
    pool = BlockManager(num_blocks)
    references = [0] * num_blocks
    names: dict[bytes, int] = {}
    queue = list(range(num_blocks))  # free blocks; those with a key stand behind all others
    discarded: set[int] = set()

    def name_of(block: int) -> bytes | None:
        return next((key for key, named in names.items() if named == block), None)

    for (call, number), letter in calls:
        key = bytes([letter])
        is_held = number < num_blocks and references[number] > 0
        if call == "allocate" and number <= len(queue):
            expected = sorted(queue, key=lambda block: name_of(block) is not None)[:number]  # a stable sort
            assert pool.allocate(number) == expected
            for block in expected:
                queue.remove(block)
                references[block] = 1
                if name := name_of(block):
                    del names[name]
                    discarded.add(block)
        elif call == "allocate":
            with pytest.raises(RuntimeError):
                pool.allocate(number)
        elif call == "forget":
            if number < num_blocks:
                pool.forget(number, key)
                if names.get(key) == number:
                    del names[key]
                    if number in queue:
                        queue.remove(number)
                        queue.append(number)
                        discarded.add(number)
        elif call == "touch":
            if number < num_blocks:
                pool.touch([number])
                if number in queue and name_of(number):
                    queue.remove(number)
                    queue.append(number)
        elif call == "pin" and number < num_blocks and not is_held and name_of(number):
            pool.pin([number])
            queue.remove(number)
            references[number] = 1
        elif not is_held:
            with pytest.raises(ValueError, match=f"block {number} is"):
                pool.publish(number, key) if call == "publish" else getattr(pool, call)([number])
        elif call == "publish":
            if name_of(number) is None:  # a block is published once while it is held
                assert pool.publish(number, key) == (key not in names)
                names.setdefault(key, number)
        else:
            getattr(pool, call)([number])
            references[number] += 1 if call == "pin" else -1
            if not references[number]:
                queue.append(number)
                if not name_of(number):
                    discarded.add(number)
        assert pool.num_free == references.count(0) == len(queue)
        assert [pool.num_references(block) for block in range(num_blocks)] == references
        assert {name: pool.match(name) for name in (b"\0", b"\1", b"\2")} == {
            name: names.get(name) for name in (b"\0", b"\1", b"\2")
        }
    assert set(pool.take_discarded()) == discarded
