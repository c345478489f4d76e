"""Compiles grammars on threads, so that the engine never waits for one, and caches them."""

import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from deepinfer_jax.structured.arguments import StructuredArgs
from deepinfer_jax.structured.grammar import CompiledGrammar, GrammarError, compile_grammar
from deepinfer_jax.structured.matcher import Matcher
from deepinfer_jax.structured.vocabulary import GrammarVocabulary

MAX_WAITING = 1024
MAX_CACHED = 4096

type _Key = tuple[str, str]


@dataclass
class _Job:
    """One grammar that is wanted, by one request or more."""

    args: StructuredArgs
    deadline: float
    done: threading.Event = field(default_factory=threading.Event)
    grammar: CompiledGrammar | None = None
    error: str = ""


@dataclass(frozen=True)
class PendingGrammar:
    """What `GrammarPool.submit` returns.

    Attributes:
        args: as they were submitted.
        deadline: in seconds of `time.monotonic()`.
    """

    args: StructuredArgs
    deadline: float
    timeout: float
    _job: _Job

    def matcher(self) -> Matcher | None:
        """Before the first token; None if the grammar is not ready yet.

        Raises GrammarError if it cannot be compiled, or is not ready in time.
        """
        job = self._job
        if job.done.is_set():
            if job.grammar is None:
                raise GrammarError(job.error)
            return Matcher(job.grammar, self.args)
        if time.monotonic() < self.deadline:
            return None
        raise GrammarError(f"the grammar was not ready within {self.timeout:g} s (DEEPINFER_XGRAMMAR_TIMEOUT)")


class GrammarPool:
    """Compiles grammars in threads of its own, which start with the first one.

    Arguments:
        vocabulary: makes it; called once, in a thread of the pool.
        num_threads: how many.
        timeout: seconds from submission until a grammar must be ready.
        cache_bytes: how much memory compiled grammars that are kept may hold; None: any; 0: none is kept.
    """

    def __init__(
        self,
        vocabulary: Callable[[], GrammarVocabulary],
        *,
        num_threads: int,
        timeout: float,
        cache_bytes: int | None,
    ) -> None:
        self._make_vocabulary = vocabulary
        self._vocabulary: GrammarVocabulary | None = None
        self._vocabulary_lock = threading.Lock()
        self._num_threads = num_threads
        self._timeout = timeout
        self._cache_bytes = cache_bytes
        self._cached: OrderedDict[_Key, CompiledGrammar] = OrderedDict()
        self._open: dict[_Key, _Job] = {}
        self._queue: deque[_Job] = deque()
        self._threads: list[threading.Thread] = []
        self._closed = False
        # Of all that is above; notified whenever a job is queued or done.
        self._changed = threading.Condition()

    def submit(self, args: StructuredArgs) -> PendingGrammar:
        """Asks for a grammar; one that is compiled, or being compiled, is not compiled again.

        Raises GrammarError if `MAX_WAITING` others wait to be compiled.
        """
        key = (args.schema_type, args.schema)
        deadline = time.monotonic() + self._timeout
        with self._changed:
            if (grammar := self._cached.get(key)) is not None:
                self._cached.move_to_end(key)
                job = _Job(args, deadline, grammar=grammar)
                job.done.set()
            elif (known := self._open.get(key)) is not None:
                job = known
                job.deadline = deadline
            else:
                if len(self._queue) >= MAX_WAITING:
                    raise GrammarError(f"{MAX_WAITING} other grammars wait to be compiled; send the request again")
                job = self._open[key] = _Job(args, deadline)
                self._queue.append(job)
                self._start_threads()
                self._changed.notify_all()
        return PendingGrammar(args, deadline, self._timeout, job)

    def wait(self, pending: list[PendingGrammar], seconds: float = math.inf) -> None:
        """Returns once one of these is ready, has failed or is late, at the latest after so many seconds."""
        end = min([time.monotonic() + seconds, *(each.deadline for each in pending)])
        with self._changed:
            while not any(each._job.done.is_set() for each in pending):
                left = end - time.monotonic()
                if left <= 0:
                    return
                self._changed.wait(left)

    def close(self) -> None:
        """Ends the threads, those that compile when they are done; what is queued fails."""
        with self._changed:
            self._closed = True
            for job in self._queue:
                self._finish(job, "the engine was closed")
            self._queue.clear()
            self._changed.notify_all()

    def _start_threads(self) -> None:
        if len(self._threads) < min(self._num_threads, len(self._open)):
            thread = threading.Thread(target=self._work, name=f"grammar-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._queue:
                    if self._closed:
                        return
                    self._changed.wait()
                job = self._queue.popleft()
                late = time.monotonic() >= job.deadline
                if late:
                    self._finish(job, "nobody waits for this grammar any more")
            if not late:
                self._compile(job)

    def _compile(self, job: _Job) -> None:
        error = ""
        try:
            with self._vocabulary_lock:
                if self._vocabulary is None:
                    self._vocabulary = self._make_vocabulary()
            job.grammar = compile_grammar(job.args, self._vocabulary)
        except Exception as problem:  # whatever it is, it must not end the thread, nor leave the request waiting
            error = str(problem) if isinstance(problem, ValueError) else f"{type(problem).__name__}: {problem}"
        with self._changed:
            if job.grammar is not None:
                self._keep(job, job.grammar)
            self._finish(job, error)

    def _finish(self, job: _Job, error: str) -> None:
        job.error = error
        self._open.pop((job.args.schema_type, job.args.schema), None)
        job.done.set()
        self._changed.notify_all()

    def _keep(self, job: _Job, grammar: CompiledGrammar) -> None:
        self._cached[job.args.schema_type, job.args.schema] = grammar
        while self._cached and (len(self._cached) > MAX_CACHED or self._too_large()):
            self._cached.popitem(last=False)

    def _too_large(self) -> bool:
        if self._cache_bytes is None:
            return False
        return sum(grammar.num_bytes for grammar in self._cached.values()) > self._cache_bytes
