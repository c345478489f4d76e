"""Accounts of the sequences that hold a slot: which blocks and slots of which dp rank each one has.

`lifecycle.py` decides who gets and loses them; a block is freed in `ResidentSequences.release` and nowhere else.
"""

from bisect import insort

from .block_manager import BlockManager
from .plan import blocks_for
from .sequence import Sequence


class ResidentSequences:
    """Block pools and slots of every dp rank, and the sequences that hold them.

    Arguments:
        data_parallel_size: dp ranks, each with its own pools.
        num_slots: slots of a dp rank.
        num_blocks: blocks of a dp rank.
        tokens_per_block: tokens that a block holds.

    Attributes:
        prefilling: sequences whose last chunk is not launched yet, in order of arrival.
        running: the others, in order of arrival.
        blocks, slots: the pools by dp rank.
    """

    def __init__(self, data_parallel_size: int, num_slots: int, num_blocks: int, tokens_per_block: int) -> None:
        self._data_parallel_size = data_parallel_size
        self._num_slots = num_slots
        self._num_blocks = num_blocks
        self._tokens_per_block = tokens_per_block
        self.reset()

    def reset(self) -> None:
        """Forgets all sequences; all pools are full."""
        self.prefilling: list[Sequence] = []
        self.running: list[Sequence] = []
        self.blocks = [BlockManager(self._num_blocks) for _ in range(self._data_parallel_size)]
        self.slots = [BlockManager(self._num_slots) for _ in range(self._data_parallel_size)]

    def __len__(self) -> int:
        return len(self.prefilling) + len(self.running)

    def start(self, sequence: Sequence, dp_rank: int, blocks: list[int]) -> None:
        """Gives a sequence a slot of the dp rank, and these blocks, which hold its first tokens, to share."""
        self.blocks[dp_rank].pin(blocks)
        sequence.dp_rank = dp_rank
        sequence.block_table, sequence.num_published = [*blocks], len(blocks)
        (sequence.state_id,) = self.slots[dp_rank].allocate(1)
        insort(self.prefilling, sequence, key=by_arrival)

    def complete(self, sequence: Sequence) -> None:
        """Its last chunk is launched."""
        self.prefilling.remove(sequence)
        insort(self.running, sequence, key=by_arrival)

    def missing_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        """How many blocks its table lacks for so many tokens."""
        return max(0, blocks_for(num_tokens, self._tokens_per_block) - len(sequence.block_table))

    def younger(self, sequence: Sequence, *, running: bool) -> list[Sequence]:
        """Sequences of the same dp rank that hold blocks and arrived later, the last first; without `running` only
        those whose prompt is not computed yet."""
        groups = (self.prefilling, self.running) if running else (self.prefilling,)
        return sorted(
            (
                other
                for group in groups
                for other in group
                if other.dp_rank == sequence.dp_rank and other.arrival > sequence.arrival and other.block_table
            ),
            key=by_arrival,
            reverse=True,
        )

    def load(self) -> list[int]:
        """By dp rank, the blocks in use and those that started prompts will still take."""
        load = [pool.num_blocks - pool.num_free for pool in self.blocks]
        for sequence in self.prefilling:
            load[sequence.dp_rank] += self.missing_blocks(sequence, len(sequence))
        return load

    def release(self, sequence: Sequence) -> None:
        """Takes slot and blocks from a sequence; blocks that others hold too stay theirs."""
        (self.prefilling if sequence in self.prefilling else self.running).remove(sequence)
        self.blocks[sequence.dp_rank].free(sequence.block_table)
        self.slots[sequence.dp_rank].free([sequence.state_id])
        sequence.block_table = []
        sequence.state_id = sequence.dp_rank = -1


def by_arrival(sequence: Sequence) -> int:
    """Sort key of the order of arrival."""
    return sequence.arrival
