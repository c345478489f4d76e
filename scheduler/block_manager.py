"""Accounts of a pool of equal things: the blocks of a cache, or the slots of running sequences."""

from collections import deque
from collections.abc import Iterable, Sequence
from enum import Enum


class Allocation(Enum):
    """Whether a number of blocks can be had: now, once others are free, or not even from an empty pool."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


class BlockManager:
    """Hands out the ids 0 … num_blocks - 1 and counts who refers to them (DB §5.2).

    The free list is first in, first out: allocation takes its head, a block that nobody refers to any more goes to
    its tail. Every id is usable; rows without a block name an id outside the pool instead of DeepInfer's block 0.
    The slots of a data index are counted by the same class.

    Arguments:
        num_blocks: size of the pool, at least 1.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least 1 block, got {num_blocks}")
        self.num_blocks = num_blocks
        self._free = deque(range(num_blocks))
        self._references = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def usage(self) -> float:
        """The fraction of the pool in use, 0 … 1."""
        return (self.num_blocks - self.num_free) / self.num_blocks

    def can_allocate(self, count: int) -> Allocation:
        if count > self.num_blocks:
            return Allocation.NEVER
        return Allocation.OK if count <= self.num_free else Allocation.LATER

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks, each with one reference. Raises RuntimeError if so many are not free."""
        if count > self.num_free:
            raise RuntimeError(
                f"{count} blocks asked for, {self.num_free} of {self.num_blocks} are free; ask can_allocate first"
            )
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def pin(self, blocks: Iterable[int]) -> None:
        """Adds a reference to each block. Raises ValueError for one that nobody holds."""
        for block in blocks:
            self._check_held(block)
            self._references[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Takes a reference from each block, the last one first. Raises ValueError for one that nobody holds."""
        for block in reversed(blocks):
            self._check_held(block)
            self._references[block] -= 1
            if not self._references[block]:
                self._free.append(block)

    def _check_held(self, block: int) -> None:
        if not 0 <= block < self.num_blocks:
            raise ValueError(f"block {block} is not in the pool, whose ids are 0 to {self.num_blocks - 1}")
        if not self._references[block]:
            raise ValueError(f"block {block} is free: it was freed before, or never allocated")
