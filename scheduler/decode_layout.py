"""The arrays of a decode step, kept from plan to plan while the same sequences go on decoding in the same slots."""

from dataclasses import dataclass

import numpy as np

from .buckets import BucketTable
from .draft_policy import DraftPolicy
from .plan import DecodeStep, Int32Array, row_places
from .sequence import Sequence


@dataclass(eq=False)
class DecodeLayout:
    """The rows of decode steps of the same sequences, in the same slots.

    Attributes:
        sequences: the rows.
        index: sequence -> its index in `sequences`.
        dp_rank, row, slots, no_first_block, no_blocks: the arrays of a DecodeStep, the last two for a step that
            needs no new block.
        num_rows: the most rows of a dp rank.
        width: the longest block table.
    """

    sequences: list[Sequence]
    index: dict[Sequence, int]
    dp_rank: Int32Array
    row: Int32Array
    slots: Int32Array
    no_first_block: Int32Array
    no_blocks: Int32Array
    num_rows: int
    width: int

    @staticmethod
    def of(sequences: list[Sequence], new_blocks: int) -> "DecodeLayout":
        """Rows in the given order within each dp rank, at most `new_blocks` new blocks a step."""
        dp_rank = np.asarray([s.dp_rank for s in sequences], np.int32)
        row, num_rows = row_places(dp_rank)
        layout = DecodeLayout(
            sequences=sequences,
            index={sequence: index for index, sequence in enumerate(sequences)},
            dp_rank=dp_rank,
            row=row,
            slots=np.asarray([s.state_id for s in sequences], np.int32),
            no_first_block=np.zeros(len(sequences), np.int32),
            no_blocks=np.full((len(sequences), new_blocks), -1, np.int32),
            num_rows=num_rows,
            width=max((len(s.block_table) for s in sequences), default=0),
        )
        for array in (layout.dp_rank, layout.row, layout.slots, layout.no_first_block, layout.no_blocks):
            array.flags.writeable = False  # plans share them
        return layout

    def step(
        self,
        buckets: BucketTable,
        grown: dict[Sequence, int],
        captures: tuple[int, ...],
        verification: DraftPolicy | None,
    ) -> DecodeStep:
        """A step of these rows; `grown` gives the former length of each block table that became longer."""
        first_new_block, new_blocks = self.no_first_block, self.no_blocks
        if grown:
            first_new_block, new_blocks = first_new_block.copy(), new_blocks.copy()
            for sequence, first in grown.items():
                index, added = self.index[sequence], sequence.block_table[first:]
                first_new_block[index] = first
                new_blocks[index, : len(added)] = added
                self.width = max(self.width, len(sequence.block_table))
        sizes, budget = buckets.decode_sizes(self.num_rows, self.width), None
        bucket = sizes[-1]
        if verification is not None:
            bucket, budget = verification.choose(self.sequences, self.dp_rank, sizes)
        return DecodeStep(
            bucket=bucket,
            sequences=self.sequences,
            dp_rank=self.dp_rank,
            row=self.row,
            slots=self.slots,
            first_new_block=first_new_block,
            new_blocks=new_blocks,
            captures=captures,
            budget=budget,
        )
