"""Which sequences run in the next step, where their state lives, and who must give way."""

from bisect import insort
from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt

from .buckets import BucketTable
from .commit import commit_tokens
from .decode import DecodeLayout
from .draft_policy import DraftPolicy
from .in_flight import MAX_PLANS_IN_FLIGHT, PlansInFlight
from .limits import Limits, check_sizes
from .plan import DecodeStep, PrefillStep, Restore, StepPlan, blocks_per_decode
from .preemption import select_preemptions
from .prefill import Chunk, PrefillPolicy, Room, prefill_step
from .prefix_cache import PrefixCache
from .resident_sequences import ResidentSequences, by_arrival
from .sequence import Sequence, SequenceStatus
from .snapshots import SnapshotStore


class Scheduler[R]:
    """Continuous batching over paged caches: one block pool and one set of slots per dp rank.

    Every plan holds a decode step of all sequences whose prompt is computed and a prefill step of the next chunks
    of prompts, so neither starves behind the other and no prompt waits for a voting point (DB §15.2 traps 16–19).

    **Decode.** A sequence decodes in every plan unless the tokens that are surely on their way already fill its
    limits (an EOS on its way cannot be known), or it waits for results in flight (`Sequence.waits_for_results`). It
    needs blocks for its text, the most that the steps in flight may add, and the drafts.

    **Prefill.** Started prompts go on, oldest first; then new ones start in order of arrival, each on the dp rank
    with the least work that has a slot and blocks for the chunk. The first that finds no place ends the admission:
    nobody overtakes it. max_num_batched_tokens bounds what a plan computes per dp rank, decode rows included.
    Without chunked prefill a prompt is taken whole, the first of a dp rank whatever the decode rows leave.

    **Reuse.** With `prefix_caching` a sequence starts behind the longest beginning whose blocks are in the pool of its
    dp rank and whose slot state is in host memory (see PrefixCache); it shares these blocks. So what is cached is
    one more reason to choose a dp rank, and prompts are cut so that slot states can be captured. A block that
    nobody holds is free, cached or not; those that start now keep what they hit.

    **Preemption.** Only for a block that is needed now and not free: of the sequences of the same dp rank that
    hold blocks the one that arrived last gives way, the one that decodes itself if it is that one. (DeepInfer takes
    the one with most output, and also when no block is needed: DB §5.5, §15.2 trap 22.) A sequence whose blocks older
    ones hold too would free nothing, and is passed over. A started prompt that finds no younger one waits; a new one
    never preempts. The victim gives all up and is computed again (`Sequence.prefill_len`), from its place in the order
    of arrival, as soon as all blocks for that are free; the results of its steps in flight are dropped. It finds again
    what is still cached of it. With `stop_preempted_request` it finishes instead.

    **Hand-over.** An imported sequence starts like any other, in the order of arrival, but its prompt is computed: it
    decodes from the next plan on. Without `decodes` nothing decodes: computed prompts are held until `hand_over`, and
    never give way, as their first token is told and their state is what everything was done for. What needs their
    blocks waits.

    **Progress.** A sequence that is accepted fits into a pool alone. The oldest holder of a dp rank never gives
    way and can take the blocks of all others: when they have let go, all blocks but its own are free, however they
    were shared. So it advances in every plan and finishes. The oldest waiting sequence is overtaken by nobody; in
    front of it are only holders, each of which is the oldest of its index at some time. So all finish, in whatever
    order requests arrive. `schedulable=False` takes a sequence out of this argument, and so does being held for
    hand-over: it keeps what it holds, younger ones pass it, and whoever does so sees to it that it ends.

    Blocks and slots are freed at once, even while a step that writes to them is in flight: the device runs steps in
    the order of launch, so what a later owner writes comes later. Such a step writes behind what is committed, so never
    into a block that others may find.

    Arguments:
        buckets: the step programs.
        data_parallel_size: dp ranks.
        max_num_seqs: most sequences that hold a slot, in all; each dp rank has ceil(max_num_seqs / size) slots.
        max_model_len: longest prompt, and longest text that is computed on.
        max_num_batched_tokens: most new tokens of a plan per dp rank, at least max_num_seqs × (1 + num_drafts).
        num_blocks: size of each block pool.
        tokens_per_block: tokens that a block holds.
        num_drafts: drafts that a decode step verifies per sequence.
        chunked_prefill: whether a prompt may be cut.
        stop_preempted_request: whether preemption ends a request.
        prefix_caching: whether sequences start from state that earlier ones left.
        snapshot_budget: bytes of host memory for the slot states that this needs.
        decodes: False: sequences whose prompt is computed are held, for `hand_over`.
        verification: chooses how many drafts a decode step verifies; None: all of them.

    Attributes:
        limits: what decides whether a request can run at all.
    """

    def __init__(
        self,
        *,
        buckets: BucketTable,
        data_parallel_size: int = 1,
        max_num_seqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        num_blocks: int,
        tokens_per_block: int,
        num_drafts: int = 0,
        chunked_prefill: bool = True,
        stop_preempted_request: bool = False,
        prefix_caching: bool = False,
        snapshot_budget: int = 0,
        decodes: bool = True,
        verification: DraftPolicy | None = None,
    ) -> None:
        self.buckets = buckets
        self.data_parallel_size = data_parallel_size
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.max_num_batched_tokens = max_num_batched_tokens
        self.num_blocks = num_blocks
        self.tokens_per_block = tokens_per_block
        self.num_drafts = num_drafts
        self.lookahead = 1 + num_drafts
        self.chunked_prefill = chunked_prefill
        self.stop_preempted_request = stop_preempted_request
        self.decodes = decodes
        self.verification = verification
        longest = max(time for _, time in buckets.prefill_shapes)
        self.prompt_limit = max_model_len if chunked_prefill else min(max_model_len, longest)
        num_slots = -(-max_num_seqs // data_parallel_size)
        self.limits = Limits(max_model_len, self.prompt_limit, num_blocks, tokens_per_block, decodes)
        check_sizes(
            buckets,
            self.limits,
            max_num_seqs=max_num_seqs,
            num_slots=num_slots,
            lookahead=self.lookahead,
            max_num_batched_tokens=max_num_batched_tokens,
        )

        self._prefix = PrefixCache(
            tokens_per_block, enabled=prefix_caching, snapshot_budget=snapshot_budget, exact_decode=num_drafts == 0
        )
        self._blocks_per_decode = blocks_per_decode(tokens_per_block, num_drafts)
        self._prefill_policy = PrefillPolicy(
            tokens_per_block=tokens_per_block,
            chunked_prefill=chunked_prefill,
            # A decode step asks for blocks for the tokens in flight and its own.
            spare_tokens=MAX_PLANS_IN_FLIGHT * self.lookahead if decodes else 0,
            for_snapshots=self._prefix.captures,
        )
        self.num_preemptions = 0
        self._num_slots = num_slots
        self._num_arrived = 0
        self._waiting: list[Sequence[R]] = []  # in order of arrival; all others that are unfinished are holders
        self.reset()

    def reset(self) -> frozenset[Sequence[R]]:
        """Forgets every plan, all cached state, and every sequence but those that wait for a slot; all pools are full.

        For a step that broke, also in the middle of `schedule` or `update`: nothing that it may have left half done
        is relied on. Whoever calls it ends the sequences that are forgotten, those to be reported included.

        Returns the sequences that go on waiting.
        """
        self._residents = ResidentSequences(
            self.data_parallel_size, self._num_slots, self.num_blocks, self.tokens_per_block
        )
        self._decoding: list[Sequence] = []  # the decode rows of the plan being made
        self._layout = DecodeLayout.of([], self._blocks_per_decode)
        self._ignored: list[Sequence] = []
        self._in_flight = PlansInFlight()
        self._prefix.snapshots.clear()
        return frozenset(self._waiting)

    @property
    def snapshots(self) -> SnapshotStore:
        """The slot states that sequences may start from, with their counters."""
        return self._prefix.snapshots

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences with a slot, those whose prompt is being computed included."""
        return len(self._residents)

    @property
    def num_unfinished(self) -> int:
        """Sequences of which a plan or an update will still tell something."""
        return self.num_waiting + self.num_running + len(self._ignored)

    @property
    def free_blocks(self) -> int:
        return sum(pool.num_free for pool in self._residents.blocks)

    @property
    def total_blocks(self) -> int:
        return sum(pool.num_blocks for pool in self._residents.blocks)

    @property
    def free_slots(self) -> int:
        return sum(pool.num_free for pool in self._residents.slots)

    @property
    def total_slots(self) -> int:
        return sum(pool.num_blocks for pool in self._residents.slots)

    def refusal(self, prompt_len: int, max_tokens: int, *, imported: bool = False) -> str | None:
        """Why such a request can never run, with the arithmetic; None if it can. `imported`: its prompt is computed."""
        return self.limits.refusal(prompt_len, max_tokens, imported=imported)

    def add_sequence(self, sequence: Sequence[R]) -> str | None:
        """Queues a sequence. One that can never run (see `refusal`) finishes at once; the next plan reports it.

        Returns why it can never run, None if it can.

        Raises ValueError for an empty prompt, max_tokens below 1, limits of its own above the scheduler's, or
        imported state that is not of all its tokens but the last, or with which there is nothing to do.
        """
        self.limits.check_sequence(sequence)
        sequence.arrival = self._num_arrived
        self._num_arrived += 1
        imported = sequence.imported is not None
        if refusal := self.refusal(sequence.prompt_len, sequence.max_tokens, imported=imported):
            self._ignore(sequence, SequenceStatus.FINISHED_IGNORED)
        else:
            self._waiting.append(sequence)
        return refusal

    def schedule(self) -> StepPlan[R]:
        """The next plan; empty if nothing can run. Its steps are launched in order and committed by `update`.

        Raises RuntimeError if two plans are in flight.
        """
        self._in_flight.check_room()
        grown = self._reserve_decode()
        prefill, restores = self._plan_prefill()
        decode = self._plan_decode(grown)  # after prefill, which may take rows away
        self._in_flight.launch(prefill, decode)
        ignored, self._ignored = tuple(self._ignored), []
        return StepPlan(
            prefill,
            decode,
            ignored,
            restores,
            discarded_blocks=tuple(pool.take_discarded() for pool in self._residents.blocks),
            discarded_slots=tuple(pool.take_discarded() for pool in self._residents.slots),
            discarded_snapshots=self._prefix.snapshots.take_discarded(),
        )

    def update(
        self,
        step: PrefillStep[R] | DecodeStep[R],
        tokens: npt.NDArray[np.int32],
        counts: npt.NDArray[np.int32],
        finite: npt.NDArray[np.bool_],
        states: Collection[Any] = (),
    ) -> list[tuple[int, int]]:
        """Commits the results of a step. The plans are committed in their order.

        Arguments:
            step: a step of the oldest plan in flight.
            tokens: int32 [n, 1 or more], the tokens that each row gave, in the first `counts` columns.
            counts: int32 [n], 1 … 1 + num_drafts in a decode step, not looked at in a prefill step.
            finite: bool [n], False where the logits of the last row that counts were not finite; such a sequence fails
                alone, unless the tokens before that row end it.
            states: uint8 [slot_bytes] of each of the step's captures, in memory of its own, as it is kept.

        Returns (row, number of tokens that the sequence took) of each row that took tokens or failed.
        Raises ValueError for a step that is not of the oldest plan in flight, and if a state is missing.
        """
        if len(states) != len(step.captures):
            raise ValueError(f"the step captures the state of {len(step.captures)} rows, got {len(states)} states")
        self._in_flight.land(step)
        is_finite = finite.tolist()
        emitted, ended = commit_tokens(step, tokens, counts, is_finite, self.lookahead)
        self._prefix.commit(step, is_finite, states, self._residents.blocks)
        for sequence in ended:
            self._release(sequence)
        return emitted

    def abort(
        self, request_ids: Collection[str], status: SequenceStatus = SequenceStatus.FINISHED_ABORTED
    ) -> tuple[int, int]:
        """Ends the unfinished sequences with these request ids and frees what they hold; unknown ids are no error.

        The next plan reports each of them, whatever it was doing. Returns how many ended and the sum of their
        lengths in tokens.
        """
        wanted = frozenset(request_ids)
        groups = (self._residents.running, self._residents.prefilling, self._waiting)
        found = sorted((s for group in groups for s in group if s.request_id in wanted), key=by_arrival)
        self._waiting = [s for s in self._waiting if s.request_id not in wanted]
        for sequence in found:
            if sequence.state_id >= 0:
                self._release(sequence)
            self._ignore(sequence, status)
        return len(found), sum(map(len, found))

    def hand_over(self, sequence: Sequence[R]) -> None:
        """Lets go of a sequence whose prompt is computed and committed, and frees what it holds; it is not finished.

        Raises ValueError if it does not run, or a result of it is in flight.
        """
        if sequence not in self._residents.running or sequence.num_inflight_steps:
            raise ValueError(
                f"request {sequence.request_id} cannot be handed over: its prompt is not computed and committed, or it "
                "has ended"
            )
        self._release(sequence)

    def check_idle(self) -> None:
        """Raises AssertionError unless no sequence holds anything and all pools are full."""
        if self.num_running or self.free_blocks != self.total_blocks or self.free_slots != self.total_slots:
            raise AssertionError(
                f"the scheduler is not idle: {self.num_running} sequences run, {self.free_blocks} of "
                f"{self.total_blocks} blocks and {self.free_slots} of {self.total_slots} slots are free"
            )

    def _reserve_decode(self) -> dict[Sequence, int]:
        """Picks the decode rows and gives them their blocks, oldest first.

        Returns the former lengths of the block tables that became longer.
        """
        if not self.decodes:
            return {}
        tokens_per_block, lookahead = self.tokens_per_block, self.lookahead
        self._decoding = [
            sequence
            for sequence in self._residents.running
            if sequence.schedulable
            and not (
                sequence.waits_for_results
                and (sequence.num_inflight_steps or self._in_flight.prefills(sequence))  # a chunk may sample nothing
            )
            and len(sequence.output_token_ids) + sequence.num_inflight_steps < sequence.output_limit
        ]
        short = [s for s in self._decoding if s.num_tokens + lookahead > len(s.block_table) * tokens_per_block]
        grown: dict[Sequence, int] = {}
        for sequence in short:
            if sequence.state_id < 0:  # it gave way to an older one
                continue
            num_blocks = len(sequence.block_table)
            # Up to its last token and the drafts, after all that the steps in flight may add.
            if not self._reserve(sequence, min(sequence.num_tokens + lookahead, sequence.max_cached_tokens)):
                self._preempt(sequence)
            elif len(sequence.block_table) > num_blocks:
                grown[sequence] = num_blocks
        return grown

    def _plan_decode(self, grown: dict[Sequence, int]) -> DecodeStep | None:
        """The decode step of the rows that are left after preemption."""
        decoding, self._decoding = self._decoding, []
        if decoding != self._layout.sequences:
            self._layout = DecodeLayout.of(decoding, self._blocks_per_decode)
        if not decoding:
            return None
        for sequence in decoding:
            sequence.num_tokens += self.lookahead
            sequence.num_inflight_steps += 1
        grown = {s: first for s, first in grown.items() if s in self._layout.index}
        return self._layout.step(self.buckets, grown, self._prefix.decode_captures(decoding), self.verification)

    def _plan_prefill(self) -> tuple[PrefillStep | None, tuple[Restore, ...]]:
        """Chooses the chunks, starts new sequences, and gives each chunk its blocks."""
        if not self._waiting and not self._residents.prefilling:
            return None, ()
        pools = self._residents.blocks
        shape, chosen = self._prefill_policy.choose(
            self.buckets.prefill_shapes,
            self._residents.prefilling,
            self._waiting,
            self._prefill_room(),
            lambda sequence, dp_rank: self._prefix.find(sequence, pools[dp_rank]),
        )
        for chunk in chosen:
            # There are blocks for all that starts now, these included: so these are not among those handed out first.
            pools[chunk.dp_rank].touch(chunk.hit.blocks)
        num_preemptions = self.num_preemptions
        chunks: list[Chunk] = []
        first_new_blocks: list[int] = []
        restores: list[Restore] = []
        for chunk in chosen:
            sequence = chunk.sequence
            if chunk.is_first:
                if self.num_preemptions > num_preemptions:
                    break  # what gave way just now waits in front of it
                restores += self._start(chunk)
            elif sequence.state_id < 0:  # it gave way to an older one
                continue
            first = len(sequence.block_table)
            if chunk.num_tokens and self._reserve(sequence, chunk.end):
                chunks.append(chunk)
                first_new_blocks.append(first)
        if not chunks:
            return None, tuple(restores)
        step = prefill_step(self.buckets, shape, chunks, first_new_blocks, self._prefix)
        flags = zip(step.completes.tolist(), step.samples.tolist(), strict=True)
        for chunk, (completes, samples) in zip(chunks, flags, strict=True):
            chunk.sequence.num_tokens = chunk.end
            chunk.sequence.num_inflight_steps += samples
            if completes:
                self._complete(chunk.sequence)
        return step, tuple(restores)

    def _start(self, chunk: Chunk) -> list[Restore]:
        """Gives a waiting sequence its slot, and the state that it starts with, if it does."""
        sequence, imported, hit = chunk.sequence, chunk.sequence.imported, chunk.hit.blocks
        self._waiting.remove(sequence)
        sequence.branch = chunk.hit.branch
        self._residents.start(sequence, chunk.dp_rank, hit)
        if imported is not None:
            self._reserve(sequence, imported.num_tokens)
            sequence.imported, sequence.num_tokens = None, imported.num_tokens
            self._complete(sequence)
            return [Restore(sequence, imported.num_tokens, imported.state, imported.blocks)]
        if not hit:
            return []
        sequence.num_tokens = len(hit) * self.tokens_per_block
        if not sequence.num_preemptions:
            sequence.num_cached_tokens = sequence.num_tokens
        return [Restore(sequence, sequence.num_tokens, self._prefix.take(sequence, len(hit)))]

    def _complete(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.RUNNING
        self._residents.complete(sequence)

    def _prefill_room(self) -> Room:
        tokens = [self.max_num_batched_tokens] * len(self._residents.blocks)
        for sequence in self._decoding:
            tokens[sequence.dp_rank] -= self.lookahead
        return Room(
            tokens=tokens,
            blocks=[pool.num_free for pool in self._residents.blocks],
            slots=[pool.num_free for pool in self._residents.slots],
            load=self._residents.load(),
            vacancies=self.max_num_seqs - self.num_running,
        )

    def _reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Lengthens the block table to so many tokens, at the cost of younger holders if it must be.

        Returns False, and takes nothing from anyone, if that would not do.
        """
        missing = self._residents.missing_blocks(sequence, num_tokens)
        pool = self._residents.blocks[sequence.dp_rank]
        if missing > pool.num_free:
            for other in select_preemptions(missing, self._residents.younger(sequence, running=self.decodes), pool):
                self._preempt(other)
            if missing > pool.num_free:
                return False
        sequence.block_table += pool.allocate(missing)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Takes everything from the sequence, which is computed again later, or finishes it."""
        self._release(sequence)
        self.num_preemptions += 1
        sequence.num_preemptions += 1
        if self.stop_preempted_request:
            self._ignore(sequence, SequenceStatus.FINISHED_PREEMPTED)
        else:
            sequence.status = SequenceStatus.WAITING
            sequence.num_tokens = sequence.num_inflight_steps = 0
            insort(self._waiting, sequence, key=by_arrival)

    def _release(self, sequence: Sequence) -> None:
        """Frees what a sequence holds, and has its rows passed over, planned or in flight."""
        self._residents.release(sequence)
        if sequence in self._decoding:
            self._decoding.remove(sequence)
        self._in_flight.drop(sequence)

    def _ignore(self, sequence: Sequence, status: SequenceStatus) -> None:
        sequence.status = status
        self._ignored.append(sequence)
