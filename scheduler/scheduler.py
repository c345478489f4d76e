"""Which sequences run in the next step, and in which row of the cache."""

from collections import deque
from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from .plan import StepPlan
from .sequence import Sequence, SequenceStatus


class Scheduler:
    """Continuous batching over a cache of `max_num_seqs` rows.

    Every step first advances each running sequence by one token, then spends what is left of the
    budget on prompts in order of arrival, in chunks. Running sequences therefore never starve behind
    prompts, and a prompt never waits for a voting point (DB §15.2 traps 16, 19).

    Arguments:
        max_num_seqs: rows of the cache.
        max_num_batched_tokens: tokens of one step; at least `max_num_seqs`, so that every running
            sequence always fits.
        chunk_size: most tokens of one prompt in one step.
        max_model_len: longest prompt that is accepted.
    """

    def __init__(self, *, max_num_seqs: int, max_num_batched_tokens: int, chunk_size: int, max_model_len: int) -> None:
        if max_num_seqs < 1 or chunk_size < 1:
            raise ValueError(f"max_num_seqs ({max_num_seqs}) and chunk_size ({chunk_size}) must be at least 1")
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({max_num_batched_tokens}) must be at least max_num_seqs "
                f"({max_num_seqs}): every running sequence needs one token per step"
            )
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.chunk_size = chunk_size
        self.max_model_len = max_model_len
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._ignored: list[Sequence] = []

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
        budget = self.max_num_batched_tokens
        scheduled: list[tuple[Sequence, int]] = []

        for sequence in self.running:
            if sequence.num_tokens + 1 == len(sequence):
                scheduled.append((sequence, 1))
                budget -= 1

        prompts = deque(s for s in self.running if s.num_tokens + 1 < len(s))
        while budget > 0:  # a zero-length row never reaches the model (K10)
            if prompts:
                sequence = prompts.popleft()
            elif self.waiting and self._free_slots:
                sequence = self._start(self.waiting.popleft())
            else:
                break
            count = min(len(sequence) - sequence.num_tokens, self.chunk_size, budget)
            scheduled.append((sequence, count))
            budget -= count

        ignored, self._ignored = self._ignored, []
        return StepPlan.of(scheduled, ignored)

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

    def _start(self, sequence: Sequence) -> Sequence:
        sequence.slot = self._free_slots.pop()
        sequence.status = SequenceStatus.RUNNING
        self.running.append(sequence)
        return sequence

    def _release_finished(self) -> None:
        for sequence in self.running:
            if sequence.status.finished:
                self._free_slots.append(sequence.slot)
                sequence.slot = -1
        # Lowest slot first: the runner sizes its batch by the highest slot in use.
        self._free_slots.sort(reverse=True)
        self.running = [s for s in self.running if not s.status.finished]
