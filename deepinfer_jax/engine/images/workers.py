"""Threads that open images, so that the step loop never waits for one, with a bound on what lies ready."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer_jax.tokenization import ImageError, ImagePrompt

logger = logging.getLogger(__name__)

Process = Callable[[npt.NDArray[np.int32], Mapping[str, Any]], ImagePrompt]
"""`MultimodalProcessor.overwrite_prompt`."""


class PendingImages:
    """What `ImageWorkers.submit` returns: the images of one prompt, from submission to release."""

    def __init__(self, workers: "ImageWorkers", token_ids: npt.NDArray[np.int32], data: Mapping[str, Any]) -> None:
        self._workers = workers
        # All that follows belongs to the workers' lock.
        self.source: tuple[npt.NDArray[np.int32], Mapping[str, Any]] | None = (token_ids, data)
        self.prompt: ImagePrompt | None = None
        self.error: Exception | None = None
        self.num_bytes = 0

    @property
    def is_done(self) -> bool:
        """Whether `result` has an answer."""
        return self.prompt is not None or self.error is not None

    def result(self) -> ImagePrompt | None:
        """The prompt with its images in place; None if it is not ready yet.

        Raises:
            ImageError: an image cannot be used, or took longer than the timeout.
            ValueError: prompt and images do not belong together.
        """
        self._workers.end_late()
        if self.error is not None:
            raise self.error
        return self.prompt

    def release(self) -> None:
        """Says that nobody waits for this any more, whatever became of it; may be called again."""
        self._workers.release(self)


class ImageWorkers:
    """Opens the images of prompts in threads, in the order of submission.

    What is ready and not released counts. While it is `max_requests`, or `max_bytes` of pixels, none is begun; so a
    request of any size gets its turn, and what is held exceeds the bound by no more than one request for each thread.
    Submitted images stay with the caller's data until then: encoded ones are small.

    A thread ends when there is nothing to do. One that hangs, in a file system for example, cannot be ended: after
    `timeout` seconds its request fails, and another thread takes its place.

    Arguments:
        process: called in the threads, at any time by several.
        num_threads: how many run at once.
        max_bytes, max_requests: the bound.
        timeout: seconds that one request may take; 0 or less: any time.
        clock: seconds.
    """

    def __init__(
        self,
        process: Process,
        *,
        num_threads: int,
        max_bytes: int,
        max_requests: int,
        timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._process = process
        self._num_threads = num_threads
        self._max_bytes = max_bytes
        self._max_requests = max_requests
        self._timeout = timeout
        self._clock = clock
        self._queue: deque[PendingImages] = deque()
        self._begun: dict[PendingImages, float] = {}  # in a thread, and since when
        self._held: set[PendingImages] = set()  # ready
        self._held_bytes = 0
        self._num_processed = 0
        self._num_threads_made = 0
        # Of all that is above; notified whenever a request is done.
        self._changed = threading.Condition()

    @property
    def num_processed(self) -> int:
        """Images opened since the start."""
        return self._num_processed

    @property
    def held_bytes(self) -> int:
        """Bytes of pixels that are ready and not released."""
        return self._held_bytes

    def submit(self, token_ids: npt.NDArray[np.int32], data: Mapping[str, Any]) -> PendingImages:
        """Asks for a prompt; neither argument is changed, nor may be until it is done."""
        pending = PendingImages(self, token_ids, data)
        try:
            with self._changed:
                self._queue.append(pending)
                self._start_threads()
            return pending
        except BaseException:  # an interrupt: who asked never gets it
            self.release(pending)
            raise

    def release(self, pending: PendingImages) -> None:
        """See `PendingImages.release`."""
        with self._changed:
            if pending in self._held:
                self._held.remove(pending)
                self._held_bytes -= pending.num_bytes
            elif pending in self._queue:
                self._queue.remove(pending)
            pending.source = None  # what a thread still makes of it is dropped
            pending.prompt = None
            self._start_threads()

    def wait(self, pending: list[PendingImages], seconds: float) -> None:
        """Returns once one of these is done, at the latest after so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: any(each.is_done for each in pending), seconds)

    def end_late(self) -> None:
        """Fails what has been in a thread for longer than the timeout."""
        with self._changed:
            now = self._clock()
            late = [pending for pending, begun in self._begun.items() if 0 < self._timeout <= now - begun]
            for pending in late:
                del self._begun[pending]
                pending.source = None
                pending.error = ImageError(
                    f"the images were not opened within {self._timeout:g} s (DEEPINFER_MULTI_MODAL_WORKER_TIMEOUT)"
                )
                logger.warning("a thread that opens images has hung for %g s; another takes its place", self._timeout)
            if late:
                self._changed.notify_all()
                self._start_threads()

    def close(self) -> None:
        """Drops what is queued and what is ready; threads end when they are done with what they are at."""
        with self._changed:
            for pending in [*self._queue, *self._begun, *self._held]:
                pending.source = pending.prompt = None
                pending.error = ImageError("the engine was closed")
            self._queue.clear()
            self._held.clear()
            self._held_bytes = 0
            self._changed.notify_all()

    def _start_threads(self) -> None:
        while len(self._begun) < self._num_threads and (pending := self._begin()) is not None:
            try:
                self._num_threads_made += 1
                name = f"images-{self._num_threads_made}"
                threading.Thread(target=self._work, args=(pending,), name=name, daemon=True).start()
            except RuntimeError as error:  # the system has no more of them
                del self._begun[pending]
                self._finish(pending, None, ImageError(f"no thread could be started to open the images: {error}"))
            except BaseException:  # an interrupt: whether the thread runs nobody knows, so what it gives is dropped
                del self._begun[pending]
                self._queue.appendleft(pending)
                raise

    def _begin(self) -> PendingImages | None:
        """Takes the next request for a thread; None if there is none, or no room for what it will be."""
        if not self._queue or len(self._held) >= self._max_requests or self._held_bytes >= self._max_bytes:
            return None
        pending = self._queue[0]
        self._begun[pending] = self._clock()
        self._queue.popleft()
        return pending

    def _work(self, pending: PendingImages | None) -> None:
        while pending is not None:
            prompt, error = None, None
            source = pending.source
            try:
                prompt = None if source is None else self._process(*source)
            except ValueError as problem:
                error = _without_frames(problem)
            except Exception as problem:  # whatever it is, it must not leave the request waiting
                error = ImageError(f"the images cannot be opened: {type(problem).__name__}: {problem}")
            with self._changed:
                if pending not in self._begun:  # it was late, and another thread is in this one's place
                    return
                del self._begun[pending]
                if pending.source is not None:  # somebody still waits for it
                    self._finish(pending, prompt, error)
                pending = self._begin()

    def _finish(self, pending: PendingImages, prompt: ImagePrompt | None, error: Exception | None) -> None:
        pending.source = None
        pending.prompt, pending.error = prompt, error
        if prompt is not None:
            pending.num_bytes = sum(own.image.pixels.nbytes for own in prompt.images)
            self._held.add(pending)
            self._held_bytes += pending.num_bytes
            self._num_processed += len(prompt.images)
        self._changed.notify_all()


def _without_frames(error: Exception) -> Exception:
    """What `raise` wrote into it is gone: its frames hold the images, and lie in a circle with the error."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
