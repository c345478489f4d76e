"""Which sequences run in the next step, and in which row of the cache."""

from collections import deque
from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from .plan import StepPlan
from .sequence import Sequence, SequenceStatus


class Scheduler:
    """Continuous batching over the rows of a cache.

    Every step advances every running sequence: one that generates by one token, a prompt by a chunk. Waiting
    sequences start as soon as a row is free, in order of arrival. Running sequences therefore never starve behind
    prompts, and a prompt never waits for a voting point (DB §15.2 traps 16, 19).

    Arguments:
        buckets: (rows, chunk) in ascending order of rows: a step that touches at most `rows` rows takes at most
            `chunk` tokens of each. The last one's rows are the most sequences that run at once. So rows × chunk
            bounds the work of a step, padding included.
        max_model_len: longest prompt that is accepted.
    """

    def __init__(self, *, buckets: tuple[tuple[int, int], ...], max_model_len: int) -> None:
        if not buckets or min(min(bucket) for bucket in buckets) < 1 or list(buckets) != sorted(buckets):
            raise ValueError(f"buckets must be (rows, chunk) pairs of at least 1, in ascending order, got {buckets}")
        self.buckets = buckets
        self.max_model_len = max_model_len
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._free_slots = list(range(buckets[-1][0] - 1, -1, -1))
        self._ignored: list[Sequence] = []
        self._rows = 0

    def add_sequence(self, sequence: Sequence) -> None:
        """Queues a sequence. One that can never run finishes at once and is reported by `schedule`."""
        if sequence.prompt_len > self.max_model_len:
            sequence.status = SequenceStatus.FINISHED_IGNORED
            self._ignored.append(sequence)
        else:
            self.waiting.append(sequence)

    @property
    def num_unfinished(self) -> int:
        return len(self.waiting) + len(self.running) + len(self._ignored)

    def schedule(self) -> StepPlan:
        """The next step. Empty if nothing waits or runs."""
        while self.waiting and self._free_slots:
            self._start(self.waiting.popleft())
        rows, chunk = self._bucket()
        scheduled = [(s, min(len(s) - s.num_tokens, chunk)) for s in self.running]
        ignored, self._ignored = self._ignored, []
        return StepPlan.of(scheduled, ignored, rows=rows, chunk=chunk)

    def update(self, plan: StepPlan, sampled: npt.NDArray[np.int32], finite: npt.NDArray[np.bool_]) -> list[Sequence]:
        """Books the results of a step.

        Arguments:
            plan: what was run.
            sampled: int32 [rows], the token sampled after each row's last new token.
            finite: bool [rows], false where the logits were not finite; such a sequence fails alone.

        Returns the sequences that took a token or failed, in the plan's order.
        """
        changed = []
        for row, sequence in enumerate(plan.sequences):
            if sequence.status.finished:  # aborted while the step ran
                continue
            sequence.num_tokens += int(plan.num_new_tokens[row])
            if not finite[row]:
                sequence.status = SequenceStatus.FINISHED_FAILED
            elif plan.completes[row]:
                sequence.append_token(int(sampled[row]))
            else:
                continue
            changed.append(sequence)
        self._release_finished()
        return changed

    def abort(self, request_ids: Collection[str]) -> tuple[int, int]:
        """Ends the unfinished sequences with these request ids; unknown ids are no error (K14).

        A running one gives no further output, a waiting one gives one (DB §15.2 trap 3).
        Returns how many ended and the sum of their lengths in tokens.
        """
        waiting = [s for s in self.waiting if s.request_id in request_ids]
        running = [s for s in self.running if s.request_id in request_ids]
        for sequence in waiting + running:
            sequence.status = SequenceStatus.FINISHED_ABORTED
        self.waiting = deque(s for s in self.waiting if not s.status.finished)
        self._ignored.extend(waiting)
        self._release_finished()
        return len(waiting) + len(running), sum(len(s) for s in waiting + running)

    def _bucket(self) -> tuple[int, int]:
        """The bucket of the next step. It shrinks only when all start from nothing: nothing need then be kept."""
        needed = max((sequence.slot + 1 for sequence in self.running), default=0)
        if any(sequence.num_tokens for sequence in self.running):
            needed = max(needed, self._rows)
        self._rows, chunk = next(bucket for bucket in self.buckets if bucket[0] >= needed)
        return self._rows, chunk

    def _start(self, sequence: Sequence) -> None:
        sequence.slot = self._free_slots.pop()
        sequence.status = SequenceStatus.RUNNING
        self.running.append(sequence)

    def _release_finished(self) -> None:
        for sequence in self.running:
            if sequence.status.finished:
                self._free_slots.append(sequence.slot)
                sequence.slot = -1
        # Lowest slot first: the runner sizes its batch by the highest slot in use.
        self._free_slots.sort(reverse=True)
        self.running = [s for s in self.running if not s.status.finished]
