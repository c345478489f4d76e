"""Sequences from arrival to end: they wait, get blocks, are preempted, and give back all that they hold.

Nobody else calls `ResidentSequences.start`, `complete` and `release`: what holds a slot or a block got it here.
"""

from bisect import insort
from collections.abc import Collection

from .in_flight import PlansInFlight
from .preemption import select_preemptions
from .resident_sequences import ResidentSequences, by_arrival
from .sequence import Sequence, SequenceStatus


class Lifecycle:
    """The unfinished sequences of a scheduler, and every change of what they hold.

    add → waiting; start → prefilling; complete → running; `preempt` leads back to waiting, `release` and `end` out.

    Blocks and slots are freed at once, even while a step that writes to them is in flight: the device runs steps in
    the order of launch, so what a later owner writes comes later. Such a step writes behind what is committed, so never
    into a block that others may find.

    Arguments:
        residents: the sequences that hold a slot, and the pools.
        in_flight: the plans whose results a released sequence no longer takes.
        preempt_running: whether sequences whose prompt is computed may be preempted.
        stop_preempted_request: whether preemption ends a request.

    Attributes:
        waiting: sequences without a slot, in order of arrival; all others that are unfinished are resident.
        decoding: the decode rows of the plan that is being made, in order of arrival.
        num_preemptions: so far.
    """

    def __init__(
        self,
        residents: ResidentSequences,
        in_flight: PlansInFlight,
        *,
        preempt_running: bool,
        stop_preempted_request: bool,
    ) -> None:
        self.residents = residents
        self.in_flight = in_flight
        self.waiting: list[Sequence] = []
        self.decoding: list[Sequence] = []
        self.num_preemptions = 0
        self._preempt_running = preempt_running
        self._stop_preempted_request = stop_preempted_request
        self._num_arrived = 0
        self._unreported: list[Sequence] = []

    @property
    def num_unfinished(self) -> int:
        """Sequences that wait or are resident, and those that have ended and that no plan has reported."""
        return len(self.waiting) + len(self.residents) + len(self._unreported)

    def reset(self) -> frozenset[Sequence]:
        """Forgets every sequence but those that wait, which it returns; all pools are full."""
        self.residents.reset()
        self.in_flight.reset()
        self.decoding = []
        self._unreported = []
        return frozenset(self.waiting)

    def add(self, sequence: Sequence, *, refused: bool) -> None:
        """Queues a sequence that arrives, or ends it at once."""
        sequence.arrival = self._num_arrived
        self._num_arrived += 1
        if refused:
            self.end(sequence, SequenceStatus.FINISHED_IGNORED)
        else:
            self.waiting.append(sequence)

    def start(self, sequence: Sequence, dp_rank: int, blocks: list[int]) -> None:
        """Gives a waiting sequence a slot of the dp rank, and these blocks, which hold its first tokens, to share."""
        self.waiting.remove(sequence)
        self.residents.start(sequence, dp_rank, blocks)

    def complete(self, sequence: Sequence) -> None:
        """Its last chunk is launched, or its prompt was computed elsewhere: it decodes from the next plan on."""
        sequence.status = SequenceStatus.RUNNING
        self.residents.complete(sequence)

    def reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Lengthens the block table to so many tokens, preempting younger sequences if it must.

        Returns False, and takes nothing from anyone, if that would not do.
        """
        missing = self.residents.missing_blocks(sequence, num_tokens)
        pool = self.residents.blocks[sequence.dp_rank]
        if missing > pool.num_free:
            younger = self.residents.younger(sequence, running=self._preempt_running)
            for other in select_preemptions(missing, younger, pool):
                self.preempt(other)
            if missing > pool.num_free:
                return False
        sequence.block_table += pool.allocate(missing)
        return True

    def preempt(self, sequence: Sequence) -> None:
        """Takes everything from the sequence, which is computed again later, or ends it."""
        self.release(sequence)
        self.num_preemptions += 1
        sequence.num_preemptions += 1
        if self._stop_preempted_request:
            self.end(sequence, SequenceStatus.FINISHED_PREEMPTED)
        else:
            sequence.status = SequenceStatus.WAITING
            sequence.num_tokens = sequence.num_inflight_steps = 0
            insort(self.waiting, sequence, key=by_arrival)

    def release(self, sequence: Sequence) -> None:
        """Frees the slot and the blocks of a sequence, and has its rows passed over, planned or in flight."""
        self.residents.release(sequence)
        if sequence in self.decoding:
            self.decoding.remove(sequence)
        self.in_flight.drop(sequence)

    def end(self, sequence: Sequence, status: SequenceStatus) -> None:
        """Finishes a sequence that holds nothing; the next plan reports it."""
        sequence.status = status
        self._unreported.append(sequence)

    def abort(self, request_ids: Collection[str], status: SequenceStatus) -> list[Sequence]:
        """Ends the unfinished sequences with these request ids, which it returns in order of arrival."""
        wanted = frozenset(request_ids)
        groups = (self.residents.running, self.residents.prefilling, self.waiting)
        found = sorted((s for group in groups for s in group if s.request_id in wanted), key=by_arrival)
        self.waiting = [s for s in self.waiting if s.request_id not in wanted]
        for sequence in found:
            if sequence.state_id >= 0:
                self.release(sequence)
            self.end(sequence, status)
        return found

    def take_ended(self) -> tuple[Sequence, ...]:
        """The sequences that `end` has finished since the last call."""
        ended, self._unreported = tuple(self._unreported), []
        return ended
