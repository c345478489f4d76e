"""The store of snapshots against a list in the order of use."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.scheduler.snapshots import SnapshotStore

pytestmark = pytest.mark.pure


def test_the_least_recently_used_goes_when_the_budget_is_full() -> None:
    store = SnapshotStore(budget=25)
    states = {key: np.zeros(10, np.uint8) for key in (b"a", b"b", b"c")}
    assert store.store(b"a", states[b"a"]) and store.store(b"b", states[b"b"])
    assert store.take(b"a") is states[b"a"]
    assert store.store(b"c", states[b"c"])
    assert [key in store for key in (b"a", b"b", b"c")] == [True, False, True]
    assert (store.used, store.num_hits, store.num_stored, store.num_evicted) == (20, 1, 3, 1)
    with pytest.raises(KeyError):
        store.take(b"b")
    assert (store.num_hits, len(store)) == (1, 2)


def test_what_exceeds_the_budget_alone_is_not_kept_and_drives_nobody_out() -> None:
    store = SnapshotStore(budget=10)
    assert store.store(b"a", np.zeros(10, np.uint8))
    assert not store.store(b"b", np.zeros(11, np.uint8))
    assert b"a" in store and len(store) == 1
    assert not SnapshotStore(0).store(b"a", np.zeros(1, np.uint8))
    with pytest.raises(ValueError, match="at least 0 bytes, got -1"):
        SnapshotStore(-1)


@settings(max_examples=300)
@given(
    budget=st.integers(0, 6),
    calls=st.lists(
        st.tuples(
            st.sampled_from(["store", "store", "take", "forget", "clear", "told"]), st.integers(0, 2), st.integers(1, 3)
        ),
        max_size=50,
    ),
)
def test_any_calls_keep_the_order_of_use_under_the_budget(budget: int, calls: list[tuple[str, int, int]]) -> None:
    store = SnapshotStore(budget)
    kept: list[tuple[bytes, np.ndarray]] = []  # least recently used first
    stored: list[np.ndarray] = []
    discarded: list[np.ndarray] = []
    for call, letter, size in calls:
        key = bytes([letter])
        known = [entry for entry in kept if entry[0] == key]
        others = [entry for entry in kept if entry[0] != key]
        if call == "told":
            gone = [state for state in stored if not any(state is own for _, own in kept)]
            reported = store.take_discarded()
            assert {*map(id, reported)} == {*map(id, gone)} - {*map(id, discarded)} and len(
                {*map(id, reported)}
            ) == len(reported)
            discarded += reported
        elif call == "clear":
            store.clear()
            kept = []
        elif call == "forget":
            store.forget(key)
            kept = others
        elif call == "take" and known:
            assert store.take(key) is known[0][1]
            kept = others + known
        elif call == "store":
            state = np.zeros(size, np.uint8)
            assert store.store(key, state) == (not known and size <= budget)
            if known:
                kept = others + known
            elif size <= budget:
                stored.append(state)
                kept.append((key, state))
                while sum(state.nbytes for _, state in kept) > budget:
                    kept.pop(0)
        assert list(store._states.items()) == kept
        assert store.used == sum(state.nbytes for _, state in kept) <= budget


def test_what_is_given_up_is_not_kept_in_memory_to_be_told() -> None:
    store = SnapshotStore(budget=10)
    held = np.zeros(10, np.uint8)
    store.store(b"a", held)
    for key in (b"b", b"c"):
        store.store(key, np.zeros(10, np.uint8))
    (reported,) = store.take_discarded()
    assert reported is held
    assert store.take_discarded() == ()
