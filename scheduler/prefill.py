"""Plans the prefill step of an iteration: starts the sequences of the chosen chunks, gives each chunk its blocks.

Which chunks those are, `chunks.py` decides. A chunk that finds no blocks waits: a started prompt may preempt younger
sequences for it, a new one never does.

An imported sequence starts like any other, in the order of arrival, but its prompt is computed: it takes no row of the
step, and decodes from the next plan on.
"""

from collections.abc import Iterable

import numpy as np

from .buckets import BucketTable
from .chunks import Chunk, PrefillPolicy, Room
from .lifecycle import Lifecycle
from .plan import Int32Array, PrefillStep, Restore, blocks_for, row_places
from .prefix_cache import PrefixCache


class PrefillPlanner:
    """Makes the prefill steps of one scheduler, and the restores of the sequences that start.

    Arguments:
        lifecycle: the sequences; its `decoding` are the decode rows of the same plan.
        buckets: the step programs.
        prefix: finds the state that sequences start from, and says after which rows a snapshot is taken.
        policy: chooses the chunks.
        max_num_seqs: most sequences that hold a slot, in all.
        max_num_batched_tokens: most new tokens of a plan per dp rank.
        num_drafts: drafts that a decode row verifies.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        buckets: BucketTable,
        prefix: PrefixCache,
        policy: PrefillPolicy,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        num_drafts: int,
    ) -> None:
        self._lifecycle = lifecycle
        self._buckets = buckets
        self._prefix = prefix
        self._policy = policy
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._num_drafts = num_drafts

    def plan(self) -> tuple[PrefillStep | None, tuple[Restore, ...]]:
        """The step, None where no chunk can run, and what is put back into slots before it."""
        waiting, residents = self._lifecycle.waiting, self._lifecycle.residents
        if not waiting and not residents.prefilling:
            return None, ()
        shape, chosen = self._policy.choose(
            self._buckets.prefill_shapes,
            residents.prefilling,
            waiting,
            self._room(),
            lambda sequence, dp_rank: self._prefix.find(sequence, residents.blocks[dp_rank]),
        )
        for chunk in chosen:
            # There are blocks for all that starts now, these included: so these are not among those handed out first.
            residents.blocks[chunk.dp_rank].touch(chunk.hit.blocks)
        chunks, first_new_blocks, restores = self._reserve(chosen)
        if not chunks:
            return None, restores
        step = prefill_step(self._buckets, shape, chunks, first_new_blocks, self._prefix)
        flags = zip(step.completes.tolist(), step.samples.tolist(), strict=True)
        for chunk, (completes, samples) in zip(chunks, flags, strict=True):
            chunk.sequence.num_tokens = chunk.end
            chunk.sequence.num_inflight_steps += samples
            if completes:
                self._lifecycle.complete(chunk.sequence)
        return step, restores

    def _room(self) -> Room:
        residents = self._lifecycle.residents
        tokens = [self._max_num_batched_tokens] * len(residents.blocks)
        for sequence in self._lifecycle.decoding:
            tokens[sequence.dp_rank] -= 1 + self._num_drafts
        return Room(
            tokens=tokens,
            blocks=[pool.num_free for pool in residents.blocks],
            slots=[pool.num_free for pool in residents.slots],
            load=residents.load(),
            vacancies=self._max_num_seqs - len(residents),
        )

    def _reserve(self, chosen: list[Chunk]) -> tuple[list[Chunk], list[int], tuple[Restore, ...]]:
        """Starts the sequences that are new and gives the chunks their blocks, in order.

        Returns the chunks that have them, for each the former length of the block table, and the restores.
        """
        num_preemptions = self._lifecycle.num_preemptions
        chunks: list[Chunk] = []
        first_new_blocks: list[int] = []
        restores: list[Restore] = []
        for chunk in chosen:
            sequence = chunk.sequence
            if chunk.is_first:
                if self._lifecycle.num_preemptions > num_preemptions:
                    break  # what was preempted just now waits in front of it
                restores += self._start(chunk)
            elif sequence.state_id < 0:  # an older one has preempted it
                continue
            first = len(sequence.block_table)
            if chunk.num_tokens and self._lifecycle.reserve(sequence, chunk.end):
                chunks.append(chunk)
                first_new_blocks.append(first)
        return chunks, first_new_blocks, tuple(restores)

    def _start(self, chunk: Chunk) -> list[Restore]:
        """Gives a waiting sequence its slot, and the state that it starts with, if it does."""
        sequence, imported, hit = chunk.sequence, chunk.sequence.imported, chunk.hit.blocks
        sequence.branch = chunk.hit.branch
        self._lifecycle.start(sequence, chunk.dp_rank, hit)
        if imported is not None:
            self._lifecycle.reserve(sequence, imported.num_tokens)
            sequence.imported, sequence.num_tokens = None, imported.num_tokens
            self._lifecycle.complete(sequence)
            return [Restore(sequence, imported.num_tokens, imported.state, imported.blocks)]
        if not hit:
            return []
        sequence.num_tokens = len(hit) * self._prefix.tokens_per_block
        if not sequence.num_preemptions:
            sequence.num_cached_tokens = sequence.num_tokens
        return [Restore(sequence, sequence.num_tokens, self._prefix.take(sequence, len(hit)))]


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
    for row, (chunk, first) in enumerate(zip(chunks, first_new_blocks, strict=True)):
        sequence, count = chunk.sequence, chunk.num_tokens
        tokens[row, :count] = sequence.token_ids(sequence.num_tokens, count)
        added = sequence.block_table[first:]
        new_blocks[row, : len(added)] = added
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
