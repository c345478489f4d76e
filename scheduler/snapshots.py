"""Least-recently-used store of slot states in host memory, under a budget of bytes."""

import weakref
from collections import OrderedDict
from typing import Any


class SnapshotStore:
    """Keeps the most recently used states under a number of bytes.

    Arguments:
        budget: bytes; 0 keeps nothing.

    Attributes:
        used: bytes of what is kept, at most `budget`.
        num_hits, num_stored, num_evicted: how many states were taken out, put in, and given up for others.
    """

    def __init__(self, budget: int) -> None:
        if budget < 0:
            raise ValueError(f"the budget of snapshots must be at least 0 bytes, got {budget}")
        self.budget = budget
        self.num_hits = self.num_stored = self.num_evicted = 0
        self.used = 0
        self._states: OrderedDict[bytes, Any] = OrderedDict()
        self._discarded: list[weakref.ref[Any]] = []  # weak: what is given up is no longer kept in memory

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, key: bytes) -> bool:
        return key in self._states

    def take(self, key: bytes) -> Any:
        """The state with this key, which is now the most recently used. Raises KeyError if there is none."""
        self._states.move_to_end(key)
        self.num_hits += 1
        return self._states[key]

    def store(self, key: bytes, state: Any) -> bool:
        """Keeps a state of state.nbytes bytes; returns whether it did.

        It does not if it has one with this key, which counts as used now, or if the state alone exceeds the budget.
        """
        if key in self._states:
            self._states.move_to_end(key)
            return False
        if state.nbytes > self.budget:
            return False
        while self.used + state.nbytes > self.budget:
            self._discard(next(iter(self._states)))
            self.num_evicted += 1
        self._states[key] = state
        self.used += state.nbytes
        self.num_stored += 1
        return True

    def forget(self, key: bytes) -> None:
        """Drops the state with this key, if there is one."""
        if key in self._states:
            self._discard(key)

    def clear(self) -> None:
        """Drops all states; what was counted stays."""
        self._discarded += map(weakref.ref, self._states.values())
        self._states = OrderedDict()
        self.used = 0

    def take_discarded(self) -> tuple[Any, ...]:
        """The states that were given up since the last call, as far as someone still holds them, each once."""
        discarded, self._discarded = self._discarded, []
        return tuple(state for state in (reference() for reference in discarded) if state is not None)

    def _discard(self, key: bytes) -> None:
        state = self._states.pop(key)
        self.used -= state.nbytes
        self._discarded.append(weakref.ref(state))
