"""Work on requests beside the step loop, which never waits for it: grammars are compiled, images are opened.

A request that needs such work is in the scheduler from the start, so that it counts, keeps its place in the order of
arrival and can be aborted, but no plan has it until all of its work is done (`Request.awaits`).
"""

from abc import ABC, abstractmethod
from collections.abc import Set
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from deepinfer_jax.engine.requests.request import Request, mark_ready
from deepinfer_jax.scheduler import Sequence, SequenceStatus


class Job[T](Protocol):
    """Work on one request, done by threads."""

    def result(self) -> T | None:
        """What came of it, None if it is not done. Raises ValueError if nothing can come of it."""

    def release(self) -> None:
        """Says that nobody needs it any more, whatever became of it. May be called again."""


@dataclass(frozen=True, eq=False)
class Done[T]:
    """What came of the work on a sequence."""

    sequence: Sequence[Request]
    value: T


@dataclass(frozen=True, eq=False)
class Failure:
    """Why a sequence is to end, and in which status."""

    sequence: Sequence[Request]
    reason: str
    status: SequenceStatus


class BackgroundWork[T, J: Job[Any]](ABC):
    """The work of one kind on an engine's requests; J: its jobs, T: what comes of them.

    Whoever polls acts on what it gets and then says so (`settle`): after an interrupt in between the next poll gives
    it again.

    Attributes:
        name: of the kind, in `Request.awaits`.
    """

    name: ClassVar[str]

    def __init__(self) -> None:
        self._pending: dict[Sequence[Request], J] = {}
        self._settled: dict[Sequence[Request], J] = {}  # of sequences that have neither started nor ended

    @abstractmethod
    def _wait_for(self, jobs: list[J], seconds: float) -> None:
        """Returns once one of the jobs is done, at the latest after so many seconds."""

    @abstractmethod
    def _status(self, error: ValueError) -> SequenceStatus:
        """In which a sequence ends whose job raised this."""

    @property
    def pending(self) -> Set[Sequence[Request]]:
        """Sequences whose work is not settled."""
        return self._pending.keys()

    def is_lost(self, sequence: Sequence[Request]) -> bool:
        """Whether a sequence awaits work that nobody does, as its submission was interrupted."""
        return self.name in sequence.request.awaits and sequence not in self._pending

    def poll(self) -> list[Done[T] | Failure]:
        """What came of the jobs that are done, in the order of submission; those of ended sequences are let go."""
        for held in (self._pending, self._settled):
            for sequence in [one for one in held if one.status.finished or one.request.launched]:
                held[sequence].release()
                del held[sequence]
        outcomes = [self._outcome(sequence, job) for sequence, job in self._pending.items()]
        return [outcome for outcome in outcomes if outcome is not None]

    def settle(self, sequence: Sequence[Request]) -> None:
        """Says that what the poll gave for a sequence has been acted on. May be said again.

        Unless it ended, the sequence awaits this work no longer; its job is held until it starts.
        """
        job = self._pending.get(sequence)
        if job is None:
            return
        if sequence.status.finished:
            job.release()
        else:
            self._settled[sequence] = job
            mark_ready(sequence, self.name)
        del self._pending[sequence]

    def wait(self, seconds: float) -> None:
        """Returns once a job is done, at the latest after so many seconds."""
        self._wait_for(list(self._pending.values()), seconds)

    def close(self) -> None:
        """Forgets all of it. May be called again."""
        self._pending.clear()
        self._settled.clear()

    def _outcome(self, sequence: Sequence[Request], job: J) -> Done[T] | Failure | None:
        try:
            value: T | None = job.result()
        except ValueError as error:
            return Failure(sequence, str(error), self._status(error))
        return None if value is None else Done(sequence, value)
