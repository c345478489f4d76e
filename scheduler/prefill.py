"""Which chunks of which prompts the next prefill step computes, and in which program."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .buckets import BucketTable
from .decode import row_places
from .plan import Int32Array, PrefillStep, blocks_for
from .sequence import Sequence


class Chunk(NamedTuple):
    """The next tokens of a sequence.

    Attributes:
        sequence: whose.
        data_index: where it is, or is to start.
        num_tokens: how many.
        is_first: the sequence is to start with it.
    """

    sequence: Sequence
    data_index: int
    num_tokens: int
    is_first: bool


@dataclass
class Room:
    """What the prefill step may take, per data index.

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
        spare_tokens: how far beyond its text a preempted sequence must have blocks before it starts again.
    """

    tokens_per_block: int
    chunked_prefill: bool
    spare_tokens: int

    def choose(
        self, shapes: Iterable[tuple[int, int]], started: list[Sequence], waiting: list[Sequence], room: Room
    ) -> tuple[tuple[int, int], list[Chunk]]:
        """The (rows, time) of which the chunks fill the largest part; of equal ones that with more tokens.

        Returns it and its chunks, those of started prompts first; no chunk if nothing can run. Which one it is delays
        nobody for long: the first sequence that can run in a program is among its chunks.
        """
        choices = [(shape, self._chunks(shape, started, waiting, room.copy())) for shape in shapes]

        def worth(choice: tuple[tuple[int, int], list[Chunk]]) -> tuple[float, int]:
            (rows, time), chunks = choice
            tokens = sum(chunk.num_tokens for chunk in chunks)
            return tokens / (rows * time), tokens

        return max(choices, key=worth)

    def _chunks(
        self, shape: tuple[int, int], started: list[Sequence], waiting: list[Sequence], room: Room
    ) -> list[Chunk]:
        rows, time = shape
        rows_left = [rows] * len(room.slots)
        chunks: list[Chunk] = []

        def take(sequence: Sequence, data_index: int, count: int, *, is_first: bool) -> None:
            rows_left[data_index] -= 1
            room.tokens[data_index] -= count
            room.blocks[data_index] -= self._new_blocks(sequence, count)
            chunks.append(Chunk(sequence, data_index, count, is_first))

        for sequence in started:
            data_index = sequence.data_index
            if sequence.schedulable and rows_left[data_index]:
                count = self._count(sequence, time, room.tokens[data_index], first=rows_left[data_index] == rows)
                if count:
                    take(sequence, data_index, count, is_first=False)
        for sequence in waiting:
            if not sequence.schedulable:
                continue
            if not room.vacancies:
                break
            places = []
            for data_index, slots in enumerate(room.slots):
                if slots and rows_left[data_index]:
                    count = self._count(sequence, time, room.tokens[data_index], first=rows_left[data_index] == rows)
                    if count and self._blocks_to_start(sequence, count) <= room.blocks[data_index]:
                        places.append((room.load[data_index], data_index, count))
            if not places:
                break  # admission in order of arrival: nobody overtakes it
            _, data_index, count = min(places)
            take(sequence, data_index, count, is_first=True)
            room.slots[data_index] -= 1
            room.load[data_index] += blocks_for(len(sequence), self.tokens_per_block)
            room.vacancies -= 1
        return chunks

    def _count(self, sequence: Sequence, time: int, tokens: int, *, first: bool) -> int:
        """How many tokens the sequence may have computed in a program of `time`, 0 for none."""
        remaining = len(sequence) - sequence.num_tokens
        # With its output a preempted sequence may be longer than any program, so it may be cut in any case.
        if self.chunked_prefill or sequence.num_preemptions:
            return max(0, min(remaining, time, tokens))
        return remaining if remaining <= time and (first or remaining <= tokens) else 0

    def _new_blocks(self, sequence: Sequence, count: int) -> int:
        return blocks_for(sequence.num_tokens + count, self.tokens_per_block) - len(sequence.block_table)

    def _blocks_to_start(self, sequence: Sequence, count: int) -> int:
        """Free blocks without which a waiting sequence does not start.

        A preempted one needs all for its text and as many as it may just have asked for in vain: it would otherwise
        take back what it gave up and give way again.
        """
        if sequence.num_preemptions:
            count = min(len(sequence) + self.spare_tokens, sequence.max_cached_tokens)
        return blocks_for(count, self.tokens_per_block)


def prefill_step(
    buckets: BucketTable,
    shape: tuple[int, int],
    chunks: list[Chunk],
    first_new_blocks: list[int],
    tokens_per_block: int,
) -> PrefillStep:
    """The step of these chunks, whose blocks are in the block tables from `first_new_blocks` on."""
    sequences = [chunk.sequence for chunk in chunks]
    bucket = buckets.choose_prefill(shape, max(len(s.block_table) for s in sequences))
    tokens = np.zeros((len(chunks), bucket.time), np.int32)
    new_blocks = np.full((len(chunks), blocks_for(bucket.time, tokens_per_block)), -1, np.int32)
    for place, ((sequence, _, count, _), first) in enumerate(zip(chunks, first_new_blocks, strict=True)):
        tokens[place, :count] = sequence.token_ids(sequence.num_tokens, count)
        added = sequence.block_table[first:]
        new_blocks[place, : len(added)] = added
    data_index = _int32(chunk.data_index for chunk in chunks)
    starts, counts = _int32(s.num_tokens for s in sequences), _int32(chunk.num_tokens for chunk in chunks)
    return PrefillStep(
        bucket=bucket,
        sequences=sequences,
        data_index=data_index,
        row=row_places(data_index)[0],
        slots=_int32(s.state_id for s in sequences),
        first_new_block=_int32(first_new_blocks),
        new_blocks=new_blocks,
        starts=starts,
        num_new_tokens=counts,
        tokens=tokens,
        completes=starts + counts == _int32(map(len, sequences)),
    )


def _int32(values: Iterable[int]) -> Int32Array:
    return np.fromiter(values, np.int32)
