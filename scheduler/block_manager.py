"""Reference-counted pool of numbered blocks or slots: hands ids out, shares them, finds them by key, frees them."""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence


class BlockManager:
    """Hands out the ids 0 … num_blocks - 1 and counts who refers to them (DB §5.2).

    The free list is first in, first out: allocation takes its head, a block that nobody refers to any more goes to
    its tail. Every id is usable; rows without a block name an id outside the pool instead of DeepInfer's block 0.
    The slots of a dp rank are counted by the same class.

    A block may have a key, which names its content. It keeps it when it is freed, so it can be matched and pinned
    again: a free block with a key is as free as any other, but those without one are handed out first, and of those
    with one the one that was freed or touched least recently. Handing it out takes its key.

    Every method takes constant time per block.

    Arguments:
        num_blocks: size of the pool, at least 1.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least 1 block, got {num_blocks}")
        self.num_blocks = num_blocks
        self._blank = deque(range(num_blocks))  # free and without a key
        self._cached: OrderedDict[int, None] = OrderedDict()  # free and with a key, in the order of use
        self._references = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._discarded: dict[int, None] = {}

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._cached)

    def num_references(self, block: int) -> int:
        return self._references[block]

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks, each with one reference. Raises RuntimeError if so many are not free."""
        if count > self.num_free:
            raise RuntimeError(f"{count} blocks asked for, {self.num_free} of {self.num_blocks} are free")
        blocks = []
        for _ in range(count):
            if self._blank:
                block = self._blank.popleft()
            else:
                block, _ = self._cached.popitem(last=False)
                self._discard(block)
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def pin(self, blocks: Iterable[int]) -> None:
        """Adds a reference to each block. Raises ValueError for one that nobody holds, unless it has a key."""
        for block in blocks:
            if block in self._cached:
                del self._cached[block]
            else:
                self._check_held(block)
            self._references[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Takes a reference from each block, the last one first. Raises ValueError for one that nobody holds."""
        for block in reversed(blocks):
            self._check_held(block)
            self._references[block] -= 1
            if self._references[block]:
                continue
            if self._keys[block] is None:
                self._blank.append(block)
                self._discard(block)
            else:
                self._cached[block] = None

    def match(self, key: bytes) -> int | None:
        """The block with this key, held or free."""
        return self._block_of.get(key)

    def publish(self, block: int, key: bytes) -> bool:
        """Gives a held block its key, unless an older one has it; returns whether it did.

        Raises ValueError for a block that nobody holds.
        """
        self._check_held(block)
        if key in self._block_of:
            return False
        self._keys[block] = key
        self._block_of[key] = block
        return True

    def forget(self, block: int, key: bytes) -> None:
        """Takes its key from a block; nothing happens if it has another one or none."""
        if self._keys[block] != key:
            return
        if block in self._cached:
            del self._cached[block]
            self._blank.append(block)
            self._discard(block)
        else:
            self._drop_key(block)

    def touch(self, blocks: Sequence[int]) -> None:
        """Makes the free ones of these blocks the last to be handed out, the first of them the very last."""
        for block in reversed(blocks):
            if block in self._cached:
                self._cached.move_to_end(block)

    def take_discarded(self) -> tuple[int, ...]:
        """The blocks whose content has lost its meaning since the last call, each once.

        They were freed without a key, or lost it while they were free; some may have been handed out since.
        """
        discarded, self._discarded = tuple(self._discarded), {}
        return discarded

    def _discard(self, block: int) -> None:
        self._drop_key(block)
        self._discarded[block] = None

    def _drop_key(self, block: int) -> None:
        key, self._keys[block] = self._keys[block], None
        if key is not None:
            del self._block_of[key]

    def _check_held(self, block: int) -> None:
        if not 0 <= block < self.num_blocks:
            raise ValueError(f"block {block} is not in the pool, whose ids are 0 to {self.num_blocks - 1}")
        if not self._references[block]:
            raise ValueError(f"block {block} is free: it was freed before, or never allocated")
