"""Chooses the chunks of the next prefill step and its program, from the room that is left; changes nothing itself.

Started prompts go on, oldest first; then new ones start in order of arrival, each on the dp rank with the least work
that has a slot and blocks for the chunk. The first that finds no room ends the admission: nobody overtakes it. Without
chunked prefill a prompt is taken whole, the first of a dp rank whatever the decode rows leave.
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from .plan import blocks_for
from .prefix_cache import NO_HIT, Hit
from .sequence import Sequence

type Find = Callable[[Sequence, int], Hit]
"""Where a waiting sequence may start on a dp rank."""


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
    """What a prefill step may take, per dp rank.

    Attributes:
        tokens: new tokens.
        blocks: free blocks; negative where started prompts ask for more than is free.
        slots: free slots.
        load: blocks in use, and blocks that started prompts will still take.
        vacancies: how many more sequences may hold a slot, in all.
        rows: rows of the step that have no chunk; see `for_program`.
    """

    tokens: list[int]
    blocks: list[int]
    slots: list[int]
    load: list[int]
    vacancies: int
    rows: list[int] = field(default_factory=list)

    def for_program(self, rows: int) -> "Room":
        """A copy for a program of so many rows, all without a chunk."""
        empty = [rows] * len(self.slots)
        return Room([*self.tokens], [*self.blocks], [*self.slots], [*self.load], self.vacancies, empty)

    def take(self, chunk: Chunk, tokens_per_block: int) -> None:
        """Subtracts what a chunk takes, and what its sequence takes if it starts with it."""
        sequence, dp_rank = chunk.sequence, chunk.dp_rank
        self.rows[dp_rank] -= chunk.num_tokens > 0
        self.tokens[dp_rank] -= chunk.num_tokens
        owned = len(sequence.block_table) + chunk.hit.num_held
        self.blocks[dp_rank] -= blocks_for(chunk.end, tokens_per_block) - owned
        if chunk.is_first:
            self.slots[dp_rank] -= 1
            self.load[dp_rank] += blocks_for(len(sequence), tokens_per_block) - chunk.hit.num_held
            self.vacancies -= 1


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
        find: Find,
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
        choices = [(shape, self._fill(shape, started, waiting, room.for_program(shape[0]), find)) for shape in shapes]

        def worth(choice: tuple[tuple[int, int], list[Chunk]]) -> tuple[float, int]:
            (rows, time), chunks = choice
            tokens = sum(chunk.num_tokens for chunk in chunks)
            return tokens / (rows * time), tokens

        return max(choices, key=worth)

    def _fill(
        self, shape: tuple[int, int], started: list[Sequence], waiting: list[Sequence], room: Room, find: Find
    ) -> list[Chunk]:
        """The chunks of a program of this (rows, time). They are taken from the room, which has all its rows."""
        chunks: list[Chunk] = []
        for sequence in started:
            if sequence.schedulable:
                chunk = self._chunk(sequence, sequence.dp_rank, shape, room, sequence.num_tokens, sequence.branch)
                if chunk is not None:
                    room.take(chunk, self.tokens_per_block)
                    chunks.append(chunk)
        for sequence in waiting:
            if not sequence.schedulable:
                continue
            chunk = self._admit(sequence, shape, room, find) if room.vacancies else None
            if chunk is None:
                break  # admission in order of arrival: nobody overtakes it
            room.take(chunk, self.tokens_per_block)
            chunks.append(chunk)
        return chunks

    def _admit(self, sequence: Sequence, shape: tuple[int, int], room: Room, find: Find) -> Chunk | None:
        """With what a waiting sequence starts, on the dp rank with the least work that has room for it; None: none."""
        options = [self._first_chunk(sequence, rank, shape, room, find) for rank, free in enumerate(room.slots) if free]
        fitting = [c for c in options if c and self._blocks_to_start(c) <= room.blocks[c.dp_rank]]
        return min(fitting, key=lambda c: (room.load[c.dp_rank] - len(c.hit.blocks), c.dp_rank), default=None)

    def _first_chunk(
        self, sequence: Sequence, dp_rank: int, shape: tuple[int, int], room: Room, find: Find
    ) -> Chunk | None:
        """With what it would start on this dp rank."""
        if sequence.imported is not None:
            return Chunk(sequence, dp_rank, 0, sequence.imported.num_tokens, is_first=True)
        if not room.rows[dp_rank]:
            return None
        hit = find(sequence, dp_rank)
        chunk = self._chunk(sequence, dp_rank, shape, room, len(hit.blocks) * self.tokens_per_block, hit.branch)
        return None if chunk is None else chunk._replace(is_first=True, hit=hit)

    def _chunk(
        self, sequence: Sequence, dp_rank: int, shape: tuple[int, int], room: Room, start: int, branch: int
    ) -> Chunk | None:
        """Its tokens from `start` on that one row may compute, up to the branch if it reaches that; None: none."""
        rows, time = shape
        if not room.rows[dp_rank]:
            return None
        is_first_row = room.rows[dp_rank] == rows
        num_tokens = self._count(sequence, start, time, room.tokens[dp_rank], first=is_first_row)
        if self.for_snapshots and self.chunked_prefill and start < branch < start + num_tokens:
            num_tokens = branch - start  # the next one that shares just so much finds a snapshot there
        return Chunk(sequence, dp_rank, num_tokens, start + num_tokens, is_first=False) if num_tokens else None

    def _count(self, sequence: Sequence, start: int, time: int, tokens: int, *, first: bool) -> int:
        """How many tokens from `start` on may be computed in a program of `time`, 0 for none."""
        remaining = sequence.prefill_len - start
        if self.chunked_prefill:
            return self._cut(start, max(0, min(remaining, time, tokens)), sequence.prefill_len)
        # With its output a preempted sequence may be longer than any program, so it may be cut in any case.
        if sequence.num_preemptions:
            return max(0, min(remaining, time, tokens))
        return remaining if remaining <= time and (first or remaining <= tokens) else 0

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
        """Free blocks without which a waiting sequence does not start; what it hits and no sequence has counts as free.

        A preempted one needs all for its text and as many as it may just have asked for in vain: it would otherwise
        take back what it gave up and be preempted again. So does an imported one, whose prompt would have to be
        computed if it were preempted.
        """
        sequence, end = chunk.sequence, chunk.end
        if sequence.num_preemptions or sequence.imported is not None:
            end = min(len(sequence) + self.spare_tokens, sequence.max_cached_tokens)
        return blocks_for(end, self.tokens_per_block) - chunk.hit.num_held
