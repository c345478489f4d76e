"""A thread that owns an `LLMEngine`: commands reach it between steps, outputs leave it for event loops."""

import asyncio
import atexit
import contextlib
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from deepinfer_jax.engine.images.request_images import RequestImages
from deepinfer_jax.engine.llm_engine import LLMEngine
from deepinfer_jax.engine.requests.outputs import RequestOutput
from deepinfer_jax.engine.requests.preparation import prepare
from deepinfer_jax.engine.requests.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


class OutputStream:
    """The outputs of one request, on the event loop that is running where it is made. It may grow at will.

    Attributes:
        loop: where `take` and `put` are called.
        dropped: whether the reader is gone; the engine thread's.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.dropped = False
        self._items: asyncio.Queue[RequestOutput | Exception] = asyncio.Queue()

    def put(self, item: RequestOutput | Exception) -> None:
        """Adds an output, or the error that is raised in its place."""
        self._items.put_nowait(item)

    async def take(self) -> RequestOutput:
        """The next output, as soon as it is there."""
        item = await self._items.get()
        if isinstance(item, Exception):
            raise item
        return item


class EngineThread:
    """Steps an `LLMEngine` while it has work, and sleeps otherwise.

    All methods return at once, but `join`, and may be called from every thread, `stop` and `drop` from finalizers too.

    A step that fails ends what ran, as in `LLMEngine.step`, and the thread goes on. It ends if a second one fails in a
    row and nothing ended in between: the next one would fail likewise. All that wait then, or come later, get a
    RuntimeError with the cause.

    Arguments:
        engine: has no unfinished request. From now on only this thread calls it.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        # SimpleQueue: its `put` may interrupt itself, as a finalizer does.
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._streams: dict[str, OutputStream] = {}  # of requests that have not given their last output
        self._stopping = False
        self._ended = False
        self._cause: BaseException | None = None
        self._finished_at_failure = -1  # requests finished when the latest step failed, -1 if it did not
        self._thread = threading.Thread(target=self._main, name="deepinfer-engine", daemon=True)
        # The interpreter must not go while a step runs, and waits for no daemon; for another it would wait forever.
        atexit.register(self._stop_and_join)
        self._thread.start()

    def start(
        self,
        request_id: str,
        stream: OutputStream,
        prompt_token_ids: Any,
        params: SamplingParams,
        user_id: str,
        images: RequestImages | None,
    ) -> None:
        """Adds a request whose outputs go into the stream, or the error of `LLMEngine.add_prepared`.

        params: a checked copy (`copy_params`), which nobody changes.
        """
        self._send(partial(self._start, request_id, stream, prompt_token_ids, params, user_id, images))

    def drop(self, request_id: str, stream: OutputStream) -> None:
        """Aborts the request of a stream that nobody reads any more; its name is free."""
        self._send(partial(self._drop, request_id, stream))

    def ask[T](self, call: Callable[[LLMEngine], T]) -> Future[T]:
        """What the call gives, or raises, between two steps."""
        answer: Future[T] = Future()
        self._send(partial(self._answer, answer, call))
        return answer

    def stop(self) -> None:
        """Ends the thread after the step that runs, if one does, and closes the engine. May be called again."""
        self._send(self._stop)

    def join(self) -> None:
        """Waits until the thread has ended."""
        self._thread.join()

    def _stop_and_join(self) -> None:
        self.stop()
        self.join()

    def _send(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        if self._ended:  # the thread set it before it looked for commands the last time
            self._run_commands(wait=False)

    def _run_commands(self, *, wait: bool) -> None:
        """Runs those that are there; `wait`: and at least one."""
        with contextlib.suppress(Empty):  # after the end several threads may be here
            if wait:
                self._commands.get()()
            for _ in range(self._commands.qsize()):
                self._commands.get_nowait()()

    def _main(self) -> None:
        try:
            self._run_commands(wait=True)
            while not self._stopping:
                busy = self._engine.has_unfinished_requests()
                self._deliver(self._advance())
                self._run_commands(wait=not busy)
        except BaseException as error:  # whatever it is, those who wait must hear of it
            logger.exception("the thread of the engine ends")
            self._cause = error
        unfinished, self._streams = self._streams, {}
        self._ended = True  # from here on commands come from other threads too, and find no stream
        for stream in unfinished.values():
            self._report(stream.loop, [(stream, _end_error(self._cause))])
        self._run_commands(wait=False)
        atexit.unregister(self._stop_and_join)
        self._engine.close()

    def _advance(self) -> list[RequestOutput]:
        """One step; if there is nothing to do, what is still in flight is read."""
        engine = self._engine
        with self._surviving():
            return engine.step() if engine.has_unfinished_requests() else engine.flush_inflight_reqs()
        return []

    @contextlib.contextmanager
    def _surviving(self) -> Iterator[None]:
        """Lets pass what the engine survives: an error after which something has ended."""
        try:
            yield
            self._finished_at_failure = -1
        except Exception:
            finished = sum(self._engine.stats()["num_finished"].values())
            if finished == self._finished_at_failure:
                raise
            self._finished_at_failure = finished
            logger.exception("a step of the engine failed; what ran has ended, the others go on")

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        by_loop: defaultdict[asyncio.AbstractEventLoop, list[tuple[OutputStream, RequestOutput]]] = defaultdict(list)
        for output in outputs:
            # A request that `add_prepared` failed on has a last output, but no stream.
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            if output.finished:
                del self._streams[output.request_id]
            if not stream.dropped:
                by_loop[stream.loop].append((stream, output))
        for loop, items in by_loop.items():
            if not self._report(loop, items):
                for stream, output in items:
                    self._drop(output.request_id, stream)

    def _report(self, loop: asyncio.AbstractEventLoop, items: list[tuple[OutputStream, Any]]) -> bool:
        """Puts each item into its stream, with one wake-up of the loop. Returns False if the loop is closed."""
        try:
            loop.call_soon_threadsafe(_put_all, items)
        except RuntimeError:
            return False
        return True

    def _start(
        self,
        request_id: str,
        stream: OutputStream,
        prompt_token_ids: Any,
        params: SamplingParams,
        user_id: str,
        images: RequestImages | None,
    ) -> None:
        if stream.dropped:
            return
        try:
            self._check_going()
            former = self._streams.get(request_id)
            if former is not None and former.dropped:  # its last output comes with the next step
                self.start(request_id, stream, prompt_token_ids, params, user_id, images)
                return
            prepared = prepare(prompt_token_ids, params, images, self._engine.rules)
            self._engine.add_prepared(user_id, request_id, prepared)
            self._streams[request_id] = stream
        except BaseException as error:
            self._report(stream.loop, [(stream, _for_a_caller(error))])
            if not isinstance(error, Exception):
                raise

    def _drop(self, request_id: str, stream: OutputStream) -> None:
        stream.dropped = True
        if self._streams.get(request_id) is stream:
            with self._surviving():
                self._engine.abort_request(request_id)

    def _answer[T](self, answer: Future[T], call: Callable[[LLMEngine], T]) -> None:
        if not answer.set_running_or_notify_cancel():
            return
        try:
            self._check_going()
            answer.set_result(call(self._engine))
        except BaseException as error:
            answer.set_exception(_for_a_caller(error))
            if not isinstance(error, Exception):
                raise

    def _stop(self) -> None:
        self._stopping = True

    def _check_going(self) -> None:
        if self._ended:
            raise _end_error(self._cause)


def _end_error(cause: BaseException | None) -> RuntimeError:
    """A new one for each to whom it is reported: raising it writes into it."""
    if cause is None:
        return RuntimeError("the engine was closed; make a new one")
    error = RuntimeError(f"the engine ended because of an error ({type(cause).__name__}: {cause}); make a new one")
    error.__cause__ = cause
    return error


def _for_a_caller(error: BaseException) -> Exception:
    """What is reported to a command's caller of an error in it: what ends a thread would end the event loop too."""
    return error if isinstance(error, Exception) else _end_error(error)


def _put_all(items: list[tuple[OutputStream, Any]]) -> None:
    for stream, item in items:
        stream.put(item)
