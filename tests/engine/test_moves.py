"""The runner moves every kind of state, one that nothing names included, and puts it where it is told."""

import copy
from functools import cache

import numpy as np
import pytest

from tests.support.children import run_child
from tests.support.driven import CHUNK, TOKENS_PER_BLOCK, Driven, Row
from tests.support.dummy_kind import dummy_kind_twin
from tests.support.toy import make_table, random_prompt, toy_engine

pytestmark = [pytest.mark.toy, pytest.mark.unoptimised]

LENGTHS = [1, 3, 4, 5, 8, 9, 16, 20]


@cache
def driven() -> Driven:
    return Driven()


def rows(length: int, count: int = 6) -> list[Row]:
    """In slots and blocks that go from the front."""
    return [Row(random_prompt(length, seed=i), list(range(10 * i, 10 * i + 10)), slot=i, seed=i) for i in range(count)]


def elsewhere(own: list[Row]) -> list[Row]:
    """The same rows in other slots, and in blocks in another order."""
    return [
        Row(list(row.tokens), other.blocks[::-1], slot=6 - i, seed=row.seed)
        for i, (row, other) in enumerate(zip(own, own[::-1], strict=True))
    ]


def wipe(on: Driven) -> None:
    on.runner.poison([list(range(70))], [list(range(7))])


def finish(on: Driven, own: list[Row]) -> list[list[int]]:
    on.decode(own, 9)
    return [row.tokens for row in own]


def unmoved(length: int) -> list[list[int]]:
    own = rows(length)
    wipe(driven())
    driven().prefill(own)
    return finish(driven(), own)


@pytest.mark.parametrize("length", LENGTHS)
def test_greedy_rows_have_the_tokens_of_the_twin(length: int) -> None:
    table = make_table()
    for i, tokens in enumerate(unmoved(length)):
        if i % 2 == 0:
            assert tokens == random_prompt(length, seed=i) + dummy_kind_twin(table, random_prompt(length, seed=i), 10)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_computed_prompt_goes_on_in_another_runner(length: int) -> None:
    """More rows than a move takes at once; the other runner was full of poison."""
    source, target, own = driven(), Driven(), rows(length)
    source.prefill(own)
    other = elsewhere(own)
    wipe(target)
    for row, new in zip(own, other, strict=True):
        used = -(-length // TOKENS_PER_BLOCK)
        contents = source.runner.read_blocks(0, row.blocks[:used]).result()
        assert contents.shape == (used, source.runner.block_bytes)
        target.runner.write_blocks(0, new.blocks[:used], contents)
    target.restore(other, length, source.states(own))
    assert finish(target, other) == unmoved(length)


@pytest.mark.parametrize("length", [4, 8, 16])
def test_a_prefill_goes_on_from_a_snapshot(length: int) -> None:
    """As after a prefix hit: the blocks stayed, slot and sampling parameters come back, the rest is computed."""
    on, own, longer = driven(), rows(length), rows(length + 5)
    for row, whole in zip(own, longer, strict=True):
        row.tokens = whole.tokens[:length]
    wipe(on)
    on.prefill(own)
    states = on.states(own)
    on.runner.poison([[]], [list(range(7))])
    on.restore(longer, length, states)
    on.prefill(longer, computed=length)
    assert finish(on, longer) == unmoved(length + 5)


@pytest.mark.parametrize("what", ["state", "blocks"])
def test_a_state_that_is_not_moved_shows(what: str) -> None:
    on, own = driven(), rows(9)
    on.prefill(own)
    states = on.states(own)
    if what == "state":
        states = np.roll(states, 1, axis=0)
    else:
        on.runner.poison([[row.blocks[0] for row in own]], [[]])
    on.restore(own, 9, states)
    # A row may fall into the same tokens by chance, all six cannot.
    assert all(found != wanted for found, wanted in zip(finish(on, own), unmoved(9), strict=True))


def test_poison_and_moves_touch_nothing_else() -> None:
    on, own = driven(), rows(13)
    on.prefill(own)
    others = [number for row in own[1:] for number in row.blocks]
    before = on.states(own), on.runner.read_blocks(0, others).result()
    on.runner.poison([own[0].blocks], [[own[0].slot]])
    on.restore([copy.copy(own[0])], 13, before[0][1:2])
    after = on.states(own), on.runner.read_blocks(0, others).result()
    np.testing.assert_array_equal(after[0][1:], before[0][1:])
    np.testing.assert_array_equal(after[0][0], before[0][1])
    np.testing.assert_array_equal(after[1], before[1])
    poisoned = on.runner.read_blocks(0, own[0].blocks).result()
    assert (poisoned == poisoned[0]).all() and {0xFF, 0x80, 0} >= set(poisoned[0].tolist())


def test_bytes_are_those_of_the_launch_whatever_runs_later() -> None:
    on, own = driven(), rows(CHUNK)
    on.prefill(own)
    pending = on.runner.read_slots(np.zeros(6, np.int32), np.arange(6, dtype=np.int32), np.full(6, CHUNK, np.int32))
    expected = on.states(own)
    on.decode(own, 3)
    wipe(on)
    np.testing.assert_array_equal(pending.result(), expected)


def test_all_programs_are_made_at_the_start() -> None:
    on = driven()
    assert on.runner.compile_count == 2
    always = ["write_adjustments"]
    assert list(on.runner._programs.state_ops) == [
        "read_slots",
        "restore",
        "read_blocks",
        "write_blocks",
        "poison",
        *always,
    ]
    engine = toy_engine(enable_prefix_caching=False)
    has = "write_adjustments"
    with pytest.raises(RuntimeError, match=f"no poison program was compiled; this runner has: {has}"):
        engine.core.runner.poison([[0]], [[0]])
    with pytest.raises(RuntimeError, match="no read_slots program"):
        engine.core.runner.read_slots(*np.zeros((3, 1), np.int32))


def test_masks_are_written_to_their_slots_and_nowhere_else() -> None:
    on = driven()
    kept = np.asarray(on.runner._state.table.adjustments.masks).copy()
    rng, slots = np.random.default_rng(0), np.asarray([6, 2, 0, 5], np.int32)
    for count in (4, 1):
        masks = rng.integers(0, 2**32, (count, *kept.shape[2:]), np.uint32)
        on.runner.write_masks(np.zeros(count, np.int32), slots[:count], masks)
        kept[0, slots[:count]] = masks
    np.testing.assert_array_equal(on.runner._state.table.adjustments.masks, kept)
    donated = on.runner._programs.write_masks.memory_analysis()
    assert donated.alias_size_in_bytes == kept.nbytes  # in place


@pytest.mark.slow
def test_each_data_index_moves_its_own_pools() -> None:
    found = run_child("two_devices_moves")
    assert found["moved"] == found["stayed"]
    assert found["devices"] == 2
    assert found["gathered"] == []
