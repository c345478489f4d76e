"""What one engine step runs: plain NumPy data from the scheduler to the runner."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .sequence import Sequence


@dataclass(frozen=True)
class StepPlan:
    """The rows of one step, in the order in which their sequences started.

    Attributes:
        sequences: the sequences of the rows; all arrays below have this length.
        slots: int32 [rows], row of the cache.
        num_new_tokens: int32 [rows], at least 1.
        tokens: int32 [rows, max(num_new_tokens)], padded with 0 on the right.
        resets: bool [rows], the row's slot must be emptied first (its first step).
        completes: bool [rows], the step reaches the row's last token, so its sample counts.
        cache_rows: how many rows the cache must have; fewer than before only if all rows reset.
        chunk: the bound on num_new_tokens in a cache of that size.
        ignored: sequences that finished without running (too long, aborted while waiting).
    """

    sequences: tuple[Sequence, ...]
    slots: npt.NDArray[np.int32]
    num_new_tokens: npt.NDArray[np.int32]
    tokens: npt.NDArray[np.int32]
    resets: npt.NDArray[np.bool_]
    completes: npt.NDArray[np.bool_]
    cache_rows: int
    chunk: int
    ignored: tuple[Sequence, ...] = ()

    @staticmethod
    def of(scheduled: list[tuple[Sequence, int]], ignored: list[Sequence], *, rows: int, chunk: int) -> "StepPlan":
        """The plan that advances each sequence by its count of tokens, in a cache of `rows` rows."""
        counts = np.asarray([count for _, count in scheduled], np.int32)
        tokens = np.zeros((len(scheduled), int(counts.max(initial=0))), np.int32)
        for row, (sequence, count) in enumerate(scheduled):
            tokens[row, :count] = sequence.next_tokens(count)
        return StepPlan(
            sequences=tuple(sequence for sequence, _ in scheduled),
            slots=np.asarray([sequence.slot for sequence, _ in scheduled], np.int32),
            num_new_tokens=counts,
            tokens=tokens,
            resets=np.asarray([sequence.num_tokens == 0 for sequence, _ in scheduled], np.bool_),
            completes=np.asarray(
                [sequence.num_tokens + count == len(sequence) for sequence, count in scheduled], np.bool_
            ),
            cache_rows=rows,
            chunk=chunk,
            ignored=tuple(ignored),
        )
