"""Which chunks of which prompts the next prefill step computes, and in which program."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .buckets import BucketTable
from .decode import row_places
from .plan import Int32Array, PrefillStep, blocks_for
from .prefix_cache import NO_HIT, Hit, PrefixCache
from .sequence import Sequence


class Chunk(NamedTuple):
    """The next tokens of a sequence.

    Attributes:
        sequence: whose.
        dp_rank: where it is, or is to start.
        num_tokens: how many; 0: none, the sequence is to start with imported state.
        end: how many tokens of the sequence have their state then.
        is_first: the sequence is to start with it.
        hit: the blocks from which it starts.
    """

    sequence: Sequence
    dp_rank: int
    num_tokens: int
    end: int
    is_first: bool
    hit: Hit = NO_HIT


@dataclass
class Room:
    """What the prefill step may take, per dp rank.

    Attributes:
        tokens: new tokens.
        blocks: free blocks; negative where started prompts ask for more than is free.
        slots: free slots.
        load: blocks in use, and blocks that started prompts will still take.
        vacancies: how many more sequences may hold a slot, in all.
    """

    tokens: list[int]
    blocks: list[int]
    slots: list[int]
    load: list[int]
    vacancies: int

    def copy(self) -> "Room":
        return Room([*self.tokens], [*self.blocks], [*self.slots], [*self.load], self.vacancies)


@dataclass(frozen=True)
class PrefillPolicy:
    """The rules by which chunks are chosen.

    Attributes:
        tokens_per_block: tokens that a block holds.
        chunked_prefill: whether a prompt may be cut.
        spare_tokens: how far beyond its text a preempted or imported sequence must have blocks before it starts.
        for_snapshots: whether chunks end where a snapshot can be taken, if that costs little.
    """

    tokens_per_block: int
    chunked_prefill: bool
    spare_tokens: int
    for_snapshots: bool

    def choose(
        self,
        shapes: Iterable[tuple[int, int]],
        started: list[Sequence],
        waiting: list[Sequence],
        room: Room,
        find: Callable[[Sequence, int], Hit],
    ) -> tuple[tuple[int, int], list[Chunk]]:
        """The (rows, time) of which the chunks fill the largest part; of equal ones that with more tokens.

        Returns it and its chunks, those of started prompts first; no chunk if nothing can run. Which one it is delays
        nobody for long: the first sequence that can run in a program is among its chunks.

        Arguments:
            shapes: (rows, time) of the programs.
            started, waiting: sequences in order of arrival.
            room: what there is; not changed.
            find: where a waiting sequence may start on a dp rank.

        The chunks of sequences that start together never ask for more free blocks than there are, those that they
        hit included.
        """
        find = functools.cache(find)
        choices = [(shape, self._chunks(shape, started, waiting, room.copy(), find)) for shape in shapes]

        def worth(choice: tuple[tuple[int, int], list[Chunk]]) -> tuple[float, int]:
            (rows, time), chunks = choice
            tokens = sum(chunk.num_tokens for chunk in chunks)
            return tokens / (rows * time), tokens

        return max(choices, key=worth)

    def _chunks(
        self,
        shape: tuple[int, int],
        started: list[Sequence],
        waiting: list[Sequence],
        room: Room,
        find: Callable[[Sequence, int], Hit],
    ) -> list[Chunk]:
        rows, time = shape
        rows_left = [rows] * len(room.slots)
        chunks: list[Chunk] = []

        def count(sequence: Sequence, start: int, dp_rank: int, branch: int) -> int:
            first = rows_left[dp_rank] == rows
            num_tokens = self._count(sequence, start, time, room.tokens[dp_rank], first=first)
            # The next one that shares just so much finds a snapshot at the branch.
            return branch - start if self._ends_at(branch, start, num_tokens) else num_tokens

        def first_chunk(sequence: Sequence, dp_rank: int) -> Chunk | None:
            if sequence.imported is not None:
                return Chunk(sequence, dp_rank, 0, sequence.imported.num_tokens, is_first=True)
            if not rows_left[dp_rank]:
                return None
            hit = find(sequence, dp_rank)
            start = len(hit.blocks) * self.tokens_per_block
            num_tokens = count(sequence, start, dp_rank, hit.branch)
            return Chunk(sequence, dp_rank, num_tokens, start + num_tokens, True, hit) if num_tokens else None

        def take(chunk: Chunk) -> None:
            sequence, dp_rank = chunk.sequence, chunk.dp_rank
            rows_left[dp_rank] -= chunk.num_tokens > 0
            room.tokens[dp_rank] -= chunk.num_tokens
            held = len(sequence.block_table) + chunk.hit.num_held
            room.blocks[dp_rank] -= blocks_for(chunk.end, self.tokens_per_block) - held
            chunks.append(chunk)

        for sequence in started:
            dp_rank, start = sequence.dp_rank, sequence.num_tokens
            if sequence.schedulable and rows_left[dp_rank]:
                num_tokens = count(sequence, start, dp_rank, sequence.branch)
                if num_tokens:
                    take(Chunk(sequence, dp_rank, num_tokens, start + num_tokens, is_first=False))
        for sequence in waiting:
            if not sequence.schedulable:
                continue
            if not room.vacancies:
                break
            options = [first_chunk(sequence, dp_rank) for dp_rank, slots in enumerate(room.slots) if slots]
            fitting = [c for c in options if c and self._blocks_to_start(c) <= room.blocks[c.dp_rank]]
            if not fitting:
                break  # admission in order of arrival: nobody overtakes it
            chunk = min(fitting, key=lambda c: (room.load[c.dp_rank] - len(c.hit.blocks), c.dp_rank))
            take(chunk)
            room.slots[chunk.dp_rank] -= 1
            room.load[chunk.dp_rank] += blocks_for(len(sequence), self.tokens_per_block) - chunk.hit.num_held
            room.vacancies -= 1
        return chunks

    def _count(self, sequence: Sequence, start: int, time: int, tokens: int, *, first: bool) -> int:
        """How many tokens from `start` on may be computed in a program of `time`, 0 for none."""
        remaining = sequence.prefill_len - start
        if self.chunked_prefill:
            return self._cut(start, max(0, min(remaining, time, tokens)), sequence.prefill_len)
        # With its output a preempted sequence may be longer than any program, so it may be cut in any case.
        if sequence.num_preemptions:
            return max(0, min(remaining, time, tokens))
        return remaining if remaining <= time and (first or remaining <= tokens) else 0

    def _ends_at(self, branch: int, start: int, count: int) -> bool:
        return self.for_snapshots and self.chunked_prefill and start < branch < start + count

    def _cut(self, start: int, count: int, length: int) -> int:
        """At most `count` of the tokens from `start` on, so that the chunk ends where a snapshot can be taken.

        The last chunk of a text ends at the last block boundary before the end: the same text hits there, and every
        text that goes on from it. An earlier chunk ends at a boundary if that leaves at least half of it.
        """
        if not self.for_snapshots:
            return count
        is_last = start + count == length
        boundary = (start + count - is_last) // self.tokens_per_block * self.tokens_per_block
        return boundary - start if boundary > start and (is_last or 2 * (boundary - start) >= count) else count

    def _blocks_to_start(self, chunk: Chunk) -> int:
        """Free blocks without which a waiting sequence does not start; what it hits and nobody holds counts as free.

        A preempted one needs all for its text and as many as it may just have asked for in vain: it would otherwise
        take back what it gave up and give way again. So does an imported one, which would have to be computed if it
        gave way.
        """
        sequence, end = chunk.sequence, chunk.end
        if sequence.num_preemptions or sequence.imported is not None:
            end = min(len(sequence) + self.spare_tokens, sequence.max_cached_tokens)
        return blocks_for(end, self.tokens_per_block) - chunk.hit.num_held


def prefill_step(
    buckets: BucketTable,
    shape: tuple[int, int],
    chunks: list[Chunk],
    first_new_blocks: list[int],
    prefix: PrefixCache,
) -> PrefillStep:
    """The step of these chunks, whose blocks are in the block tables from `first_new_blocks` on."""
    sequences = [chunk.sequence for chunk in chunks]
    bucket = buckets.choose_prefill(shape, max(len(s.block_table) for s in sequences))
    tokens = np.zeros((len(chunks), bucket.time), np.int32)
    new_blocks = np.full((len(chunks), blocks_for(bucket.time, prefix.tokens_per_block)), -1, np.int32)
    for place, (chunk, first) in enumerate(zip(chunks, first_new_blocks, strict=True)):
        sequence, count = chunk.sequence, chunk.num_tokens
        tokens[place, :count] = sequence.token_ids(sequence.num_tokens, count)
        added = sequence.block_table[first:]
        new_blocks[place, : len(added)] = added
    dp_rank = _int32(chunk.dp_rank for chunk in chunks)
    starts, counts = _int32(s.num_tokens for s in sequences), _int32(chunk.num_tokens for chunk in chunks)
    completes = starts + counts == _int32(s.prefill_len for s in sequences)
    return PrefillStep(
        bucket=bucket,
        sequences=sequences,
        dp_rank=dp_rank,
        row=row_places(dp_rank)[0],
        slots=_int32(s.state_id for s in sequences),
        first_new_block=_int32(first_new_blocks),
        new_blocks=new_blocks,
        starts=starts,
        num_new_tokens=counts,
        tokens=tokens,
        completes=completes,
        samples=completes & np.fromiter((not s.output_token_ids for s in sequences), np.bool_),
        captures=prefix.prefill_captures(sequences, starts + counts),
    )


def _int32(values: Iterable[int]) -> Int32Array:
    return np.fromiter(values, np.int32)
