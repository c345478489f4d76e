"""The sequences that hold a slot, and the pools from which they hold it."""

from bisect import insort

from .block_manager import BlockManager
from .plan import blocks_for
from .sequence import Sequence


class Holders:
    """Block pools and slots of every data index, and who holds them.

    Arguments:
        data_parallel_size: data indices, each with its own pools.
        num_slots: slots of a data index.
        num_blocks: blocks of a data index.
        tokens_per_block: tokens that a block holds.

    Attributes:
        prefilling: sequences whose last chunk is not launched yet, in order of arrival.
        running: the others, in order of arrival.
        blocks, slots: the pools by data index.
    """

    def __init__(self, data_parallel_size: int, num_slots: int, num_blocks: int, tokens_per_block: int) -> None:
        self.prefilling: list[Sequence] = []
        self.running: list[Sequence] = []
        self.blocks = [BlockManager(num_blocks) for _ in range(data_parallel_size)]
        self.slots = [BlockManager(num_slots) for _ in range(data_parallel_size)]
        self._tokens_per_block = tokens_per_block

    def __len__(self) -> int:
        return len(self.prefilling) + len(self.running)

    def start(self, sequence: Sequence, data_index: int, blocks: list[int]) -> None:
        """Gives a sequence a slot of the data index, and these blocks, which hold its first tokens, to share."""
        self.blocks[data_index].pin(blocks)
        sequence.data_index = data_index
        sequence.block_table, sequence.num_published = [*blocks], len(blocks)
        (sequence.state_id,) = self.slots[data_index].allocate(1)
        insort(self.prefilling, sequence, key=by_arrival)

    def complete(self, sequence: Sequence) -> None:
        """Its last chunk is launched."""
        self.prefilling.remove(sequence)
        insort(self.running, sequence, key=by_arrival)

    def missing_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        """How many blocks its table lacks for so many tokens."""
        return max(0, blocks_for(num_tokens, self._tokens_per_block) - len(sequence.block_table))

    def younger(self, sequence: Sequence, *, running: bool) -> list[Sequence]:
        """Sequences of the same data index that hold blocks and arrived later, the last first; without `running` only
        those whose prompt is not computed yet."""
        groups = (self.prefilling, self.running) if running else (self.prefilling,)
        return sorted(
            (
                other
                for group in groups
                for other in group
                if other.data_index == sequence.data_index and other.arrival > sequence.arrival and other.block_table
            ),
            key=by_arrival,
            reverse=True,
        )

    def load(self) -> list[int]:
        """By data index, the blocks in use and those that started prompts will still take."""
        load = [pool.num_blocks - pool.num_free for pool in self.blocks]
        for sequence in self.prefilling:
            load[sequence.data_index] += self.missing_blocks(sequence, len(sequence))
        return load

    def release(self, sequence: Sequence) -> None:
        """Takes slot and blocks from a sequence; blocks that others hold too stay theirs."""
        (self.prefilling if sequence in self.prefilling else self.running).remove(sequence)
        self.blocks[sequence.data_index].free(sequence.block_table)
        self.slots[sequence.data_index].free([sequence.state_id])
        sequence.block_table = []
        sequence.state_id = sequence.data_index = -1


def by_arrival(sequence: Sequence) -> int:
    """Sort key of the order of arrival."""
    return sequence.arrival
