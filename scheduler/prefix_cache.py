"""Finds where a sequence can start from state that others left, and publishes what a committed step computed."""

from collections.abc import Collection
from collections.abc import Sequence as Series
from typing import Any, NamedTuple

from .block_manager import BlockManager
from .plan import DecodeStep, Int32Array, PrefillStep
from .prefix import block_key
from .sequence import Sequence
from .snapshots import SnapshotStore


class Hit(NamedTuple):
    """Where a sequence may start.

    Attributes:
        blocks: the blocks of its first tokens, in order of position; none: it starts with its first token.
        num_held: how many of them are in use, so that they cost no free block.
        branch: tokens whose blocks are there, with a snapshot or without; where others part, so will the next one.
    """

    blocks: list[int]
    num_held: int
    branch: int = 0


NO_HIT = Hit([], 0)


class PrefixCache:
    """Finds and keeps the state of common beginnings.

    A sequence can go on from a position if its blocks up to there are in the pool of its dp rank and the slot
    state of that very position, a *snapshot*, is in host memory. Positions are multiples of tokens_per_block. Both
    get their names when the step that wrote them is committed, never before.

    A sequence that fails takes the names of all that it has left and of all that it may have read, whoever wrote it:
    what is not finite may have lain there, unread, since a sequence that ended well. So the next one alike is computed
    from its first token, and heals the cache.

    Arguments:
        tokens_per_block: tokens that a block holds.
        enabled: False finds and keeps nothing.
        snapshot_budget: bytes of host memory for snapshots.
        exact_decode: whether the host knows the length of a sequence after a decode step that is in flight; it does
            not with drafts, and takes no snapshots there.

    Attributes:
        snapshots: by the key of the block that ends at their position. One store for all dp ranks.
    """

    def __init__(self, tokens_per_block: int, *, enabled: bool, snapshot_budget: int, exact_decode: bool) -> None:
        self.tokens_per_block = tokens_per_block
        self.enabled = enabled
        self.snapshots = SnapshotStore(snapshot_budget)
        self.captures = enabled and snapshot_budget > 0
        self._captures_decode = self.captures and exact_decode

    def find(self, sequence: Sequence, pool: BlockManager) -> Hit:
        """The furthest position from which the sequence can go on; at least one token is left to compute."""
        if not self.enabled or not sequence.reuse:
            return NO_HIT
        most = sequence.prefill_len - 1
        if sequence.most_cached_tokens is not None:
            most = min(most, sequence.most_cached_tokens)
        blocks: list[int] = []
        for index in range(most // self.tokens_per_block):
            block = pool.match(block_key(sequence, index, self.tokens_per_block))
            if block is None:
                break
            blocks.append(block)
        branch = len(blocks) * self.tokens_per_block
        while blocks and sequence.block_keys[len(blocks) - 1] not in self.snapshots:
            blocks.pop()
        return Hit(blocks, sum(pool.num_references(block) > 0 for block in blocks), branch)

    def take(self, sequence: Sequence, num_blocks: int) -> Any:
        """The snapshot behind the sequence's first blocks, as `find` has found it."""
        return self.snapshots.take(block_key(sequence, num_blocks - 1, self.tokens_per_block))

    def prefill_captures(self, sequences: Series[Sequence], ends: Int32Array) -> tuple[int, ...]:
        """The rows of a prefill step after which a snapshot can be taken that is not there yet, one of those alike.

        Arguments:
            sequences: the rows.
            ends: int32 [n], the length of each after the step.
        """
        if not self.captures:
            return ()
        rows: dict[bytes, int] = {}
        for row, (sequence, end) in enumerate(zip(sequences, ends.tolist(), strict=True)):
            if not end % self.tokens_per_block:
                key = self._key_at(sequence, end)
                if key not in self.snapshots:
                    rows.setdefault(key, row)
        return tuple(rows.values())

    def decode_captures(self, sequences: Series[Sequence]) -> tuple[int, ...]:
        """The rows of a decode step after which a snapshot can be taken; num_tokens is each one's length by then."""
        if not self._captures_decode:
            return ()
        tokens_per_block = self.tokens_per_block
        return tuple([row for row, s in enumerate(sequences) if not s.num_tokens % tokens_per_block])

    def commit(
        self,
        step: PrefillStep | DecodeStep,
        finite: list[bool],
        states: Collection[Any],
        pools: Series[BlockManager],
    ) -> None:
        """Names what a step has computed, after its tokens are appended and before what they end is released.

        Arguments:
            step: its dropped rows leave nothing.
            finite: by row; of a sequence that fails, and of what it was computed from, all is forgotten.
            states: the state of each of the step's captures.
            pools: the block pools by dp rank.
        """
        if not self.enabled:
            return
        ends = (step.starts + step.num_new_tokens).tolist() if isinstance(step, PrefillStep) else None
        for row in self._rows_to_commit(step, finite):
            sequence = step.sequences[row]
            if not finite[row]:
                self._forget(sequence, pools)
            else:
                self._publish(sequence, ends[row] if ends else len(sequence) - 1, pools[sequence.dp_rank])
        for row, state in zip(step.captures, states, strict=True):
            sequence = step.sequences[row]
            if finite[row] and sequence not in step.dropped:
                key = self._key_at(sequence, ends[row] if ends else len(sequence) - 1)
                self.snapshots.store(key, state)

    def _rows_to_commit(self, step: PrefillStep | DecodeStep, finite: list[bool]) -> list[int]:
        dropped = step.dropped
        if isinstance(step, PrefillStep):
            return [row for row, sequence in enumerate(step.sequences) if sequence not in dropped]
        # All of a decode step's rows are looked at in every step: few have filled a block.
        tokens_per_block = self.tokens_per_block
        return [
            row
            for row, s in enumerate(step.sequences)
            if (len(s) > (s.num_published + 1) * tokens_per_block or not finite[row]) and s not in dropped
        ]

    def _publish(self, sequence: Sequence, num_tokens: int, pool: BlockManager) -> None:
        for index in range(sequence.num_published, num_tokens // self.tokens_per_block):
            block, key = sequence.block_table[index], block_key(sequence, index, self.tokens_per_block)
            if pool.publish(block, key):
                sequence.published.append((sequence.dp_rank, block, key))
            sequence.num_published = index + 1

    def _forget(self, sequence: Sequence, pools: Series[BlockManager]) -> None:
        for block, key in zip(sequence.block_table, sequence.block_keys, strict=False):
            pools[sequence.dp_rank].forget(block, key)
        for dp_rank, block, key in sequence.published:  # in its table, or left behind when it was preempted
            pools[dp_rank].forget(block, key)
        for key in sequence.block_keys:
            self.snapshots.forget(key)

    def _key_at(self, sequence: Sequence, num_tokens: int) -> bytes:
        """The name of the snapshot of so many tokens, a multiple of tokens_per_block."""
        return block_key(sequence, num_tokens // self.tokens_per_block - 1, self.tokens_per_block)
