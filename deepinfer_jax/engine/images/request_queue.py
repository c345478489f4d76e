"""Images in the engine: a request with images stays out of every plan until they are opened and in its prompt.

It is in the scheduler from the start, with the prompt as it was given, so that it counts, keeps its place in the order
of arrival, and can be aborted. The images that lie ready for requests that have not started are bounded; what runs
keeps its own, from which it is computed again after a preemption.
"""

from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer_jax.engine.config import ImageLimits
from deepinfer_jax.engine.images.workers import ImageWorkers, PendingImages
from deepinfer_jax.scheduler import ImageContent, Sequence, SequenceStatus
from deepinfer_jax.tokenization import ImageError, ImagePrompt, MultimodalProcessor, images_of

Place = Callable[[Sequence, ImagePrompt], None]
"""Puts a prompt with its images in the place of a sequence's prompt."""

Fail = Callable[[Sequence, str, SequenceStatus], None]
"""Ends a sequence for a reason, in a status."""

_POLL = 0.1
"""Seconds between two looks at whether a thread hangs."""


class ImageRequestQueue:
    """The images of an engine's requests.

    Arguments:
        processor: of the model; None: it has no vision tower.
        limits: of the threads that open images.
        place: called for a sequence whose images are opened.
        fail: called for a sequence whose images cannot be used; it must end it.
    """

    def __init__(self, processor: MultimodalProcessor | None, limits: ImageLimits, place: Place, fail: Fail) -> None:
        self._processor = processor
        self._place = place
        self._fail = fail
        self._pending: dict[Sequence, PendingImages] = {}
        self._ready: dict[Sequence, PendingImages] = {}  # opened, for sequences that have not started
        self._workers: ImageWorkers | None = None
        if processor is not None:
            self._workers = ImageWorkers(
                processor.overwrite_prompt,
                num_threads=limits.num_threads,
                max_bytes=limits.max_bytes,
                max_requests=limits.max_requests,
                timeout=limits.timeout,
            )

    @property
    def pending(self) -> Set[Sequence]:
        """Sequences whose images are not opened."""
        return self._pending.keys()

    @property
    def placeholder(self) -> str | None:
        """What stands for an image in a text; None without a vision tower."""
        return None if self._processor is None else self._processor.placeholder

    def checked(self, data: Any) -> Mapping[str, Any] | None:
        """A copy of a request's multi_modal_data, None if there is no image in it; nothing is opened.

        Raises ValueError for what is no such data, and for images if the model has no vision tower.
        """
        if data is None:
            return None
        try:
            sources, sizes = images_of(data)
        except ImageError:  # images that never arrived: the request ends with the reason
            sources, sizes = None, None
        if sources is not None and not sources:
            return None
        self.check_tower()
        return {"image_bytes": sources, "image_sizes": sizes}

    def check_tower(self) -> None:
        """Raises ValueError if the model has no vision tower."""
        if self._processor is None:
            raise ValueError("the model has no vision tower, so a prompt takes no images: leave multi_modal_data out")

    def add(self, sequence: Sequence, data: Mapping[str, Any]) -> None:
        """Has the images of a submitted sequence opened; it must not be schedulable."""
        self._pending[sequence] = self._submit(sequence.prompt_token_ids, data)

    def pump(self) -> None:
        """Hands on the sequences whose images are opened, and ends those whose images cannot be used."""
        for sequence, pending in list(self._pending.items()):
            if not sequence.status.finished:  # not aborted
                try:
                    prompt = pending.result()
                except ImageError as error:
                    self._fail(sequence, str(error), SequenceStatus.FINISHED_VE_FAILED)
                except ValueError as error:
                    self._fail(sequence, str(error), SequenceStatus.FINISHED_INVALID)
                else:
                    if prompt is None:
                        continue
                    self._place(sequence, prompt)
            # In this order: an interrupt in between leaves it to the next call to do this again.
            self._ready[sequence] = pending
            del self._pending[sequence]
        for sequence in [one for one in self._ready if one.request.launched or one.status.finished]:
            self._ready[sequence].release()
            del self._ready[sequence]

    def wait(self, seconds: float) -> None:
        """Returns once the images of a request are opened or failed, at the latest after so many seconds."""
        if self._workers is not None:
            self._workers.wait(list(self._pending.values()), seconds)

    def open_all(
        self, requests: Iterable[tuple[npt.NDArray[np.int32], Mapping[str, Any]]]
    ) -> list[ImagePrompt | ValueError]:
        """Opens the images of prompts, data as of `checked`, and waits; of each the prompt or why there is none."""
        pending: list[PendingImages] = []
        try:
            for token_ids, data in requests:
                pending.append(self._submit(token_ids, data))
            return [self._outcome(one) for one in pending]
        finally:
            for one in pending:
                one.release()

    def snapshot(self) -> dict[str, int]:
        """Of `LLMEngine.stats`."""
        workers = self._workers
        return {
            "num_requests_awaiting_images": len(self._pending),
            "num_images_opened": 0 if workers is None else workers.num_processed,
            "image_bytes_waiting": 0 if workers is None else workers.held_bytes,
        }

    def close(self) -> None:
        """Ends the threads. May be called again."""
        self._pending.clear()
        self._ready.clear()
        if self._workers is not None:
            self._workers.close()

    def _submit(self, token_ids: npt.NDArray[np.int32], data: Mapping[str, Any]) -> PendingImages:
        assert self._workers is not None  # `checked` refused the data otherwise
        return self._workers.submit(token_ids, data)

    def _outcome(self, pending: PendingImages) -> ImagePrompt | ValueError:
        assert self._workers is not None
        try:
            while (prompt := pending.result()) is None:
                self._workers.wait([pending], _POLL)
        except ValueError as error:
            return error
        finally:
            pending.release()
        return prompt


def image_contents(prompt: ImagePrompt) -> tuple[ImageContent, ...]:
    """What the scheduler knows of a prompt's images."""
    return tuple(ImageContent(own.start, own.stop, own.image.digest) for own in prompt.images)
