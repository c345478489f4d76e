"""`Scheduler`: takes sequences, makes plans, commits results; its docstring shows why every sequence finishes.

The work is done by `decode.py` and `prefill.py` (the two steps of a plan), `commit.py` (results) and `lifecycle.py`
(who waits, who holds what, and who loses it).
"""

from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt

from .buckets import BucketTable
from .chunks import PrefillPolicy
from .commit import commit_tokens
from .decode import DecodePlanner
from .draft_policy import DraftPolicy
from .in_flight import MAX_PLANS_IN_FLIGHT, PlansInFlight
from .lifecycle import Lifecycle
from .limits import Limits, check_sizes
from .plan import DecodeStep, PrefillStep, StepPlan
from .prefill import PrefillPlanner
from .prefix_cache import PrefixCache
from .resident_sequences import ResidentSequences
from .sequence import Sequence, SequenceStatus
from .snapshots import SnapshotStore


class Scheduler[R]:
    """Continuous batching over paged caches: one block pool and one set of slots per dp rank.

    Every plan holds a decode step of all sequences whose prompt is computed and a prefill step of the next chunks
    of prompts, so neither starves behind the other and no prompt waits for a voting point (DB §15.2 traps 16–19).
    The rules: decode.py says which sequences decode, chunks.py which prompts go on or start, preemption.py which
    sequence is preempted, prefix_cache.py from where a sequence starts.

    **Hand-over.** Without `decodes` nothing decodes: computed prompts are held until `hand_over`, and are never
    preempted, as their first token is reported and their state is what everything was done for. What needs their
    blocks waits.

    **Progress.** A sequence that is accepted fits into a pool alone. The oldest resident sequence of a dp rank is never
    preempted and can take the blocks of all others: when they have let go, all blocks but its own are free, however
    they were shared. So it advances in every plan and finishes. The oldest waiting sequence is overtaken by nobody; in
    front of it are only resident ones, each of which is the oldest of its dp rank at some time. So all finish, in
    whatever order requests arrive. `schedulable=False` takes a sequence out of this argument, and so does being held
    for hand-over: it keeps what it holds, younger ones pass it, and whoever does so sees to it that it ends.

    Arguments:
        limits: sizes and rules.
        buckets: the step programs.
        verification: chooses how many drafts a decode step verifies; None: all of them.

    Attributes:
        limits: what decides whether a request can run at all.

    Raises ValueError for limits that some step of theirs has no program for.
    """

    def __init__(self, limits: Limits, buckets: BucketTable, verification: DraftPolicy | None = None) -> None:
        check_sizes(buckets, limits)
        self.buckets = buckets
        self.verification = verification
        self.limits = limits
        self._residents = ResidentSequences(
            limits.data_parallel_size, limits.num_slots, limits.num_blocks, limits.tokens_per_block
        )
        self._in_flight = PlansInFlight()
        self._lifecycle = Lifecycle(
            self._residents,
            self._in_flight,
            preempt_running=limits.decodes,
            stop_preempted_request=limits.stop_preempted_request,
        )
        self._prefix = PrefixCache(
            limits.tokens_per_block,
            enabled=limits.prefix_caching,
            snapshot_budget=limits.snapshot_budget,
            exact_decode=limits.num_drafts == 0,
        )
        self._prefill = PrefillPlanner(
            self._lifecycle,
            buckets,
            self._prefix,
            PrefillPolicy(
                tokens_per_block=limits.tokens_per_block,
                chunked_prefill=limits.chunked_prefill,
                # A decode step asks for blocks for the tokens in flight and its own.
                spare_tokens=MAX_PLANS_IN_FLIGHT * (1 + limits.num_drafts) if limits.decodes else 0,
                for_snapshots=self._prefix.captures,
            ),
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            num_drafts=limits.num_drafts,
        )
        self._decode = DecodePlanner(self._lifecycle, buckets, self._prefix, num_drafts=limits.num_drafts)

    def reset(self) -> frozenset[Sequence[R]]:
        """Forgets every plan, all cached state, and every sequence but those that wait for a slot; all pools are full.

        For a step that broke, also in the middle of `schedule` or `update`: nothing that it may have left half done
        is relied on. Whoever calls it ends the sequences that are forgotten, those to be reported included.

        Returns the sequences that go on waiting.
        """
        waiting = self._lifecycle.reset()
        self._decode.reset()
        self._prefix.snapshots.clear()
        return waiting

    @property
    def snapshots(self) -> SnapshotStore:
        """The slot states that sequences may start from, with their counters."""
        return self._prefix.snapshots

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot."""
        return len(self._lifecycle.waiting)

    @property
    def num_running(self) -> int:
        """Sequences with a slot, those whose prompt is being computed included."""
        return len(self._residents)

    @property
    def num_unfinished(self) -> int:
        """Sequences of which a plan or an update will still report something."""
        return self._lifecycle.num_unfinished

    @property
    def num_preemptions(self) -> int:
        """How often a sequence was preempted."""
        return self._lifecycle.num_preemptions

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
        refusal = self.refusal(sequence.prompt_len, sequence.max_tokens, imported=sequence.imported is not None)
        self._lifecycle.add(sequence, refused=refusal is not None)
        return refusal

    def schedule(self) -> StepPlan[R]:
        """The next plan; empty if nothing can run. Its steps are launched in order and committed by `update`.

        Raises RuntimeError if two plans are in flight.
        """
        self._in_flight.check_room()
        grown = self._decode.reserve() if self.limits.decodes else {}
        prefill, restores = self._prefill.plan()
        decode = self._decode.plan(grown, self.verification)  # after prefill, which may preempt its rows

        self._in_flight.launch(prefill, decode)
        return StepPlan(
            prefill,
            decode,
            self._lifecycle.take_ended(),
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

        Returns (row, number of tokens that it emitted) of each row that emitted tokens or failed.
        Raises ValueError for a step that is not of the oldest plan in flight, and if a state is missing.
        """
        if len(states) != len(step.captures):
            raise ValueError(f"the step captures the state of {len(step.captures)} rows, got {len(states)} states")
        self._in_flight.land(step)
        is_finite = finite.tolist()
        emitted, ended = commit_tokens(step, tokens, counts, is_finite, self.limits.num_drafts)
        self._prefix.commit(step, is_finite, states, self._residents.blocks)
        for sequence in ended:
            self._lifecycle.release(sequence)
        return emitted

    def abort(
        self, request_ids: Collection[str], status: SequenceStatus = SequenceStatus.FINISHED_ABORTED
    ) -> tuple[int, int]:
        """Ends the unfinished sequences with these request ids and frees what they hold; unknown ids are no error.

        The next plan reports each of them, whatever it was doing. Returns how many ended and the sum of their
        lengths in tokens.
        """
        aborted = self._lifecycle.abort(request_ids, status)
        return len(aborted), sum(map(len, aborted))

    def hand_over(self, sequence: Sequence[R]) -> None:
        """Lets go of a sequence whose prompt is computed and committed, and frees what it holds; it is not finished.

        Raises ValueError if it does not run, or a result of it is in flight.
        """
        if sequence not in self._residents.running or sequence.num_inflight_steps:
            raise ValueError(
                f"request {sequence.request_id} cannot be handed over: its prompt is not computed and committed, or it "
                "has ended"
            )
        self._lifecycle.release(sequence)

    def check_idle(self) -> None:
        """Raises AssertionError unless no sequence holds anything and all pools are full."""
        if self.num_running or self.free_blocks != self.total_blocks or self.free_slots != self.total_slots:
            raise AssertionError(
                f"the scheduler is not idle: {self.num_running} sequences run, {self.free_blocks} of "
                f"{self.total_blocks} blocks and {self.free_slots} of {self.total_slots} slots are free"
            )
