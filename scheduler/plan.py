"""The scheduler's output for one engine iteration (`StepPlan`): plain NumPy data, read by the runner.

Row i of every array belongs to sequences[i]; n is their number. `row` is its index in the step program's arrays,
which have bucket.rows rows for each dp rank; rows without a sequence are idle. Arrays may be shared
between plans and must not be written to.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from .buckets import Bucket
from .sequence import Sequence

Int32Array = npt.NDArray[np.int32]


def blocks_for(num_tokens: int, tokens_per_block: int) -> int:
    """How many blocks hold so many tokens."""
    return -(-num_tokens // tokens_per_block)


def blocks_per_decode(tokens_per_block: int, num_drafts: int) -> int:
    """The most blocks that a decode step adds to a block table, as it adds at most 1 + num_drafts tokens."""
    return blocks_for(1 + num_drafts, tokens_per_block)


def row_places(dp_rank: Int32Array) -> tuple[Int32Array, int]:
    """(int32 [n], the index of each row among those of its dp rank; the most rows of a dp rank)."""
    row = np.zeros(len(dp_rank), np.int32)
    counts = np.bincount(dp_rank) if len(dp_rank) else np.zeros(1, np.intp)
    for rank, count in enumerate(counts):
        row[dp_rank == rank] = np.arange(count, dtype=np.int32)
    return row, int(counts.max())


@dataclass(frozen=True, eq=False)
class Restore[R]:
    """State that was computed before and is put back into a slot, which it fills whole: state, block table, length.

    Attributes:
        sequence: whose. Its block table holds the blocks of these tokens first.
        num_tokens: tokens whose state it is, at least 1.
        state: uint8 [slot_bytes], what `read_slots` gave for a sequence of these tokens.
        blocks: None: the blocks are in the pool, and a prefill step goes on from num_tokens in this very plan. Else
            uint8 [ceil(num_tokens / tokens_per_block), block_bytes], to be written into the first blocks of the block
            table; decode steps go on, from the next plan on.
    """

    sequence: Sequence[R]
    num_tokens: int
    state: Any
    blocks: Any = None


@dataclass(frozen=True, eq=False, kw_only=True)
class Step[R]:
    """What the device needs of any step.

    Attributes:
        bucket: the program.
        sequences: the rows.
        dp_rank, row, slots: int32 [n], where each is.
        first_new_block: int32 [n], index in the sequence's block table of its first new block.
        new_blocks: int32 [n, k], the blocks that the table has grown by, padded with -1.
        captures: rows, in ascending order, whose slot is to be read right after the step: the state of their first
            tokens, a multiple of tokens_per_block, for others to start from. `update` takes what was read.
        dropped: sequences that were released since; `update` passes over their rows.
    """

    bucket: Bucket
    sequences: list[Sequence[R]]
    dp_rank: Int32Array
    row: Int32Array
    slots: Int32Array
    first_new_block: Int32Array
    new_blocks: Int32Array
    captures: tuple[int, ...] = ()
    dropped: set[Sequence[R]] = field(default_factory=set)


@dataclass(frozen=True, eq=False, kw_only=True)
class DecodeStep[R](Step[R]):
    """One step of sequences whose prompt is computed, oldest first: the last token and the drafts of each. At most
    blocks_per_decode(...) new blocks each.

    Where a sequence is in its text only the device knows while steps are in flight. Its block table then reaches as
    far as any outcome of them can need. It stops at the longest text that the sequence may reach: rows of drafts
    beyond that have no block, their writes must be dropped and their results mean nothing.

    Attributes:
        budget: int32 [data], drafts that are verified on each dp rank if the bucket is packed, at most its tokens
            less the sequences there; else all are. Which of them, the device decides.
    """

    budget: Int32Array | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class PrefillStep[R](Step[R]):
    """One chunk each of sequences of whose `Sequence.prefill_len` tokens not all are in the cache yet. At most
    ceil(bucket.time / tokens_per_block) new blocks each.

    Attributes:
        starts: int32 [n], tokens of the sequence whose state earlier chunks or a restore give; 0 empties the slot.
        num_new_tokens: int32 [n], at least 1.
        tokens: int32 [n, bucket.time], padded with 0 on the right.
        completes: bool [n], the chunk is the sequence's last one.
        samples: bool [n], and what it samples counts: the first output. After a preemption, when there is output, the
            last token is known.
    """

    starts: Int32Array
    num_new_tokens: Int32Array
    tokens: Int32Array
    completes: npt.NDArray[np.bool_]
    samples: npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class StepPlan[R]:
    """What one iteration launches: the restores, the prefill step, the decode step, in this order.

    No sequence is in both steps, and no block that one of them writes to.

    Attributes:
        prefill, decode: None where there is nothing to run. They are committed by `update`; a plan without them is not.
        ignored: sequences that finished without a token since the last plan: refused, aborted, or preempted and
            stopped. Each is in one plan only.
        restores: of sequences that start in this plan.
        discarded_blocks, discarded_slots: by dp rank, what has lost its meaning since the last plan, this one's
            own start included. Whoever overwrites it, to see that nobody reads it, does so before the restores.
        discarded_snapshots: states that were kept for restores and are given up since the last plan, as far as someone
            still holds them; none of this plan's restores has one. Those of earlier plans may: they are launched first.
    """

    prefill: PrefillStep[R] | None
    decode: DecodeStep[R] | None
    ignored: tuple[Sequence[R], ...] = ()
    restores: tuple[Restore[R], ...] = ()
    discarded_blocks: tuple[tuple[int, ...], ...] = ()
    discarded_slots: tuple[tuple[int, ...], ...] = ()
    discarded_snapshots: tuple[Any, ...] = ()

    @property
    def empty(self) -> bool:
        """Nothing is to be launched."""
        return self.prefill is None and self.decode is None and not self.restores
