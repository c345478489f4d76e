"""Which sequences run in the next step, where their state lives, and who must give way."""

from bisect import insort
from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt

from .buckets import BucketTable
from .decode import DecodeLayout
from .holders import Holders, by_arrival
from .plan import DecodeStep, PrefillStep, StepPlan, blocks_for, blocks_per_decode
from .prefill import Chunk, PrefillPolicy, Room, prefill_step
from .sequence import Sequence, SequenceStatus

# Zero-overhead scheduling plans one iteration while the one before runs.
MAX_PLANS_IN_FLIGHT = 2


class Scheduler:
    """Continuous batching over paged caches: one block pool and one set of slots per data index.

    Every plan holds a decode step of all sequences whose prompt is computed and a prefill step of the next chunks
    of prompts, so neither starves behind the other and no prompt waits for a voting point (DB §15.2 traps 16–19).

    **Decode.** A sequence decodes in every plan unless the tokens that are surely on their way already fill its
    limits (an EOS on its way cannot be known). It needs blocks for its text, the most that the steps in flight may
    add, and the drafts.

    **Prefill.** Started prompts go on, oldest first; then new ones start in order of arrival, each on the data index
    with the least work that has a slot and blocks for the chunk. The first that finds no place ends the admission:
    nobody overtakes it. max_num_batched_tokens bounds what a plan computes per data index, decode rows included.
    Without chunked prefill a prompt is taken whole, the first of a data index whatever the decode rows leave.

    **Preemption.** Only for a block that is needed now and not free: of the sequences of the same data index that
    hold blocks the one that arrived last gives way, the one that decodes itself if it is that one. (DeepInfer takes
    the one with most output, and also when no block is needed: DB §5.5, §15.2 trap 22.) A started prompt that finds
    no younger one waits; a new one never preempts. The victim gives all up and is computed again, prompt and output,
    from its place in the order of arrival, as soon as all blocks for that are free; the results of its steps in
    flight are dropped. With `stop_preempted_request` it finishes instead.

    **Progress.** A sequence that is accepted fits into a pool alone. The oldest holder of a data index never gives
    way and can take the blocks of all others, so it advances in every plan and finishes. The oldest waiting sequence
    is overtaken by nobody; in front of it are only holders, each of which is the oldest of its index at some time.
    So all finish, in whatever order requests arrive. `schedulable=False` takes a sequence out of this argument: it
    keeps what it holds, younger ones pass it, and whoever set it sees to it that it ends.

    Blocks and slots are freed at once, even while a step that writes to them is in flight: the device runs steps in
    the order of launch, so what a later owner writes comes later.

    Arguments:
        buckets: the step programs.
        data_parallel_size: data indices.
        max_num_seqs: most sequences that hold a slot, in all; each data index has ceil(max_num_seqs / size) slots.
        max_model_len: longest prompt, and longest text that is computed on.
        max_num_batched_tokens: most new tokens of a plan per data index, at least max_num_seqs × (1 + num_drafts).
        num_blocks: size of each block pool.
        tokens_per_block: tokens that a block holds.
        num_drafts: drafts that a decode step verifies per sequence.
        chunked_prefill: whether a prompt may be cut.
        stop_preempted_request: whether preemption ends a request.
        prefix_caching: whether sequences start from state that earlier ones left.
        snapshot_budget: bytes of host memory for the slot states that this needs.
        decodes: False: sequences whose prompt is computed are held, for `hand_over`.
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
        longest = max(time for _, time in buckets.prefill_shapes)
        self.prompt_limit = max_model_len if chunked_prefill else min(max_model_len, longest)
        num_slots = -(-max_num_seqs // data_parallel_size)
        self._check_arguments(num_slots)

        self._blocks_per_decode = blocks_per_decode(tokens_per_block, num_drafts)
        self._prefill_policy = PrefillPolicy(
            tokens_per_block=tokens_per_block,
            chunked_prefill=chunked_prefill,
            # A decode step asks for blocks for the tokens in flight and its own.
            spare_tokens=MAX_PLANS_IN_FLIGHT * self.lookahead,
        )
        self.num_preemptions = 0
        self._num_slots = num_slots
        self._num_arrived = 0
        self._waiting: list[Sequence] = []  # in order of arrival; all others that are unfinished are holders
        self.reset()

    def reset(self) -> frozenset[Sequence]:
        """Forgets every plan, and every sequence but those that wait for a slot; all pools are full.

        For a step that broke, also in the middle of `schedule` or `update`: nothing that it may have left half done
        is relied on. Whoever calls it ends the sequences that are forgotten, those to be reported included.

        Returns the sequences that go on waiting.
        """
        self._holders = Holders(self.data_parallel_size, self._num_slots, self.num_blocks, self.tokens_per_block)
        self._decoding: list[Sequence] = []  # the decode rows of the plan being made
        self._layout = DecodeLayout.of([], self._blocks_per_decode)
        self._ignored: list[Sequence] = []
        self._in_flight: list[list[PrefillStep | DecodeStep]] = []  # the steps of each plan that are not booked yet
        return frozenset(self._waiting)

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences with a slot, those whose prompt is being computed included."""
        return len(self._holders)

    @property
    def num_unfinished(self) -> int:
        """Sequences of which a plan or an update will still tell something."""
        return self.num_waiting + self.num_running + len(self._ignored)

    @property
    def free_blocks(self) -> int:
        return sum(pool.num_free for pool in self._holders.blocks)

    @property
    def total_blocks(self) -> int:
        return sum(pool.num_blocks for pool in self._holders.blocks)

    @property
    def free_slots(self) -> int:
        return sum(pool.num_free for pool in self._holders.slots)

    @property
    def total_slots(self) -> int:
        return sum(pool.num_blocks for pool in self._holders.slots)

    def refusal(self, prompt_len: int, max_tokens: int) -> str | None:
        """Why such a request can never run, with the arithmetic; None if it can."""
        if prompt_len > self.prompt_limit:
            without = "" if self.chunked_prefill else " without chunked prefill"
            return f"the prompt has {prompt_len} tokens, the limit{without} is {self.prompt_limit}"
        # The last token is given out, never computed on.
        longest = min(prompt_len + max_tokens - 1, self.max_model_len)
        blocks = blocks_for(longest, self.tokens_per_block)
        if blocks > self.num_blocks:
            return (
                f"{prompt_len} prompt tokens and max_tokens {max_tokens}, at most {longest} tokens in the cache, need "
                f"{blocks} blocks of {self.tokens_per_block} tokens, the pool has {self.num_blocks}; lower max_tokens, "
                "shorten the prompt or give the engine more blocks"
            )
        return None

    def add_sequence(self, sequence: Sequence) -> None:
        """Queues a sequence. One that can never run (see `refusal`) finishes at once; the next plan reports it.

        Raises ValueError for an empty prompt, max_tokens below 1 or limits of its own above the scheduler's.
        """
        if not 0 < sequence.max_model_len <= self.max_model_len or sequence.prompt_len < 1 or sequence.max_tokens < 1:
            raise ValueError(
                f"request {sequence.request_id}: prompt_len {sequence.prompt_len} and max_tokens "
                f"{sequence.max_tokens} must be at least 1, max_model_len {sequence.max_model_len} from 1 to "
                f"{self.max_model_len}"
            )
        sequence.arrival = self._num_arrived
        self._num_arrived += 1
        if self.refusal(sequence.prompt_len, sequence.max_tokens):
            self._ignore(sequence, SequenceStatus.FINISHED_IGNORED)
        else:
            self._waiting.append(sequence)

    def schedule(self) -> StepPlan:
        """The next plan; empty if nothing can run. Its steps are launched in order and booked by `update`.

        Raises RuntimeError if two plans are in flight.
        """
        if len(self._in_flight) == MAX_PLANS_IN_FLIGHT:
            raise RuntimeError(f"{MAX_PLANS_IN_FLIGHT} plans are in flight; update() with the oldest one's results")
        grown = self._reserve_decode()
        prefill = self._plan_prefill()
        decode = self._plan_decode(grown)  # after prefill, which may take rows away
        steps = [step for step in (prefill, decode) if step is not None]
        if steps:
            self._in_flight.append(steps)
        ignored, self._ignored = tuple(self._ignored), []
        return StepPlan(prefill, decode, ignored)

    def update(
        self,
        step: PrefillStep | DecodeStep,
        tokens: npt.NDArray[np.int32],
        counts: npt.NDArray[np.int32],
        finite: npt.NDArray[np.bool_],
        states: Collection[Any] = (),
    ) -> list[tuple[int, int]]:
        """Books the results of a step. The plans are booked in their order.

        Arguments:
            step: a step of the oldest plan in flight.
            tokens: int32 [n, 1 or more], the tokens that each row gave, in the first `counts` columns.
            counts: int32 [n], 1 … 1 + num_drafts in a decode step, not looked at in a prefill step.
            finite: bool [n], False where the logits were not finite; such a sequence fails alone.
            states: uint8 [slot_bytes] of each of the step's captures.

        Returns (row, number of tokens that the sequence took) of each row that took tokens or failed (0 tokens).
        Raises ValueError for a step that is not of the oldest plan in flight.
        """
        self._land(step)
        # What the host counted on: of a prompt's last chunk its sample, of a decode step that all drafts are accepted.
        if isinstance(step, PrefillStep):
            counts, most = step.completes.astype(np.int32), 1
        else:
            most = self.lookahead
        taken: list[tuple[int, int]] = []
        finished: list[Sequence] = []
        dropped, running = step.dropped, SequenceStatus.RUNNING
        rows = zip(step.sequences, tokens.tolist(), counts.tolist(), finite.tolist(), strict=True)
        for row, (sequence, token_ids, count, is_finite) in enumerate(rows):
            if sequence in dropped:
                continue
            if not is_finite:
                sequence.status = SequenceStatus.FINISHED_FAILED
                number = 0
            elif count:
                sequence.num_inflight_steps -= 1
                number = sequence.append_tokens(token_ids[:count])
                sequence.num_tokens += number - most
            else:  # a chunk that is not the last
                continue
            taken.append((row, number))
            if sequence.status is not running:
                finished.append(sequence)
        for sequence in finished:
            self._release(sequence)
        return taken

    def abort(self, request_ids: Collection[str]) -> tuple[int, int]:
        """Ends the unfinished sequences with these request ids and frees what they hold; unknown ids are no error.

        The next plan reports each of them, whatever it was doing. Returns how many ended and the sum of their
        lengths in tokens.
        """
        wanted = frozenset(request_ids)
        groups = (self._holders.running, self._holders.prefilling, self._waiting)
        found = sorted((s for group in groups for s in group if s.request_id in wanted), key=by_arrival)
        self._waiting = [s for s in self._waiting if s.request_id not in wanted]
        for sequence in found:
            if sequence.state_id >= 0:
                self._release(sequence)
            self._ignore(sequence, SequenceStatus.FINISHED_ABORTED)
        return len(found), sum(map(len, found))

    def hand_over(self, sequence: Sequence) -> None:
        """Lets go of a sequence whose prompt is computed and booked, and frees what it holds; it is not finished.

        Raises ValueError if it does not run, or a result of it is in flight.
        """
        if sequence not in self._holders.running or sequence.num_inflight_steps:
            raise ValueError(
                f"request {sequence.request_id} cannot be handed over: its prompt is not computed and booked, or it "
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

    def _check_arguments(self, num_slots: int) -> None:
        max_blocks = blocks_for(self.max_model_len, self.tokens_per_block)
        self.buckets.choose_decode(num_slots, max_blocks)
        for shape in self.buckets.prefill_shapes:
            self.buckets.choose_prefill(shape, max_blocks)
        if any(bucket.time != self.lookahead for bucket in self.buckets.decode):
            raise ValueError(f"a decode program must take {self.lookahead} tokens per row, got {self.buckets.decode}")
        if self.max_num_batched_tokens < self.max_num_seqs * self.lookahead:
            raise ValueError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} must be at least max_num_seqs × (1 + drafts) = "
                f"{self.max_num_seqs} × {self.lookahead} = {self.max_num_seqs * self.lookahead}"
            )

    def _reserve_decode(self) -> dict[Sequence, int]:
        """Picks the decode rows and gives them their blocks, oldest first.

        Returns the former lengths of the block tables that became longer.
        """
        tokens_per_block, lookahead = self.tokens_per_block, self.lookahead
        self._decoding = [
            sequence
            for sequence in self._holders.running
            if sequence.schedulable
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
        return self._layout.step(self.buckets, {s: first for s, first in grown.items() if s in self._layout.index})

    def _plan_prefill(self) -> PrefillStep | None:
        """Chooses the chunks, starts new sequences, and gives each chunk its blocks."""
        if not self._waiting and not self._holders.prefilling:
            return None
        shape, chosen = self._prefill_policy.choose(
            self.buckets.prefill_shapes, self._holders.prefilling, self._waiting, self._prefill_room()
        )
        num_preemptions = self.num_preemptions
        chunks: list[Chunk] = []
        first_new_blocks: list[int] = []
        for chunk in chosen:
            sequence = chunk.sequence
            if chunk.is_first:
                if self.num_preemptions > num_preemptions:
                    break  # what gave way just now waits in front of it
                self._waiting.remove(sequence)
                self._holders.start(sequence, chunk.data_index)
            elif sequence.state_id < 0:  # it gave way to an older one
                continue
            first = len(sequence.block_table)
            if self._reserve(sequence, sequence.num_tokens + chunk.num_tokens):
                chunks.append(chunk)
                first_new_blocks.append(first)
        if not chunks:
            return None
        step = prefill_step(self.buckets, shape, chunks, first_new_blocks, self.tokens_per_block)
        for chunk, completes in zip(chunks, step.completes.tolist(), strict=True):
            chunk.sequence.num_tokens += chunk.num_tokens
            if completes:
                chunk.sequence.num_inflight_steps += 1
                chunk.sequence.status = SequenceStatus.RUNNING
                self._holders.complete(chunk.sequence)
        return step

    def _prefill_room(self) -> Room:
        tokens = [self.max_num_batched_tokens] * len(self._holders.blocks)
        for sequence in self._decoding:
            tokens[sequence.data_index] -= self.lookahead
        return Room(
            tokens=tokens,
            blocks=[pool.num_free for pool in self._holders.blocks],
            slots=[pool.num_free for pool in self._holders.slots],
            load=self._holders.load(),
            vacancies=self.max_num_seqs - self.num_running,
        )

    def _reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Lengthens the block table to so many tokens, at the cost of younger holders if it must be.

        Returns False, and takes nothing from anyone, if that would not do.
        """
        missing = self._holders.missing_blocks(sequence, num_tokens)
        pool = self._holders.blocks[sequence.data_index]
        if missing > pool.num_free:
            younger = self._holders.younger(sequence)
            if missing > pool.num_free + sum(len(other.block_table) for other in younger):
                return False
            while missing > pool.num_free:
                self._preempt(younger.pop())
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
        self._holders.release(sequence)
        if sequence in self._decoding:
            self._decoding.remove(sequence)
        for steps in self._in_flight:
            for step in steps:
                step.dropped.add(sequence)

    def _ignore(self, sequence: Sequence, status: SequenceStatus) -> None:
        sequence.status = status
        self._ignored.append(sequence)

    def _land(self, step: PrefillStep | DecodeStep) -> None:
        if not self._in_flight or step not in self._in_flight[0]:
            raise ValueError("the step is not of the oldest plan in flight; book each step once, plan by plan")
        self._in_flight[0].remove(step)
        if not self._in_flight[0]:
            self._in_flight.pop(0)
