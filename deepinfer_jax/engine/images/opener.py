"""`ImageOpener`: the requests that wait for their images, which the threads of `workers.py` open.

The images that lie ready for requests that have not started are bounded (`ImageWorkers`); what runs keeps its own, from
which it is computed again after a preemption.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer_jax.engine.config import ImageLimits
from deepinfer_jax.engine.images.request_images import RequestImages, image_failure_status
from deepinfer_jax.engine.images.workers import ImageWorkers, PendingImages
from deepinfer_jax.engine.requests.background import BackgroundWork
from deepinfer_jax.engine.requests.request import Request
from deepinfer_jax.scheduler import Sequence, SequenceStatus
from deepinfer_jax.tokenization import ImagePrompt, MultimodalProcessor

_POLL = 0.1
"""Seconds between two looks at whether a thread hangs."""


class ImageOpener(BackgroundWork[ImagePrompt, PendingImages]):
    """Opens images and puts them into prompts.

    Arguments:
        processor: of the model; None: it has no vision tower.
        limits: of the threads that open images.
    """

    name = "images"

    def __init__(self, processor: MultimodalProcessor | None, limits: ImageLimits) -> None:
        super().__init__()
        self._processor = processor
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
    def has_vision_tower(self) -> bool:
        """Whether prompts may have images."""
        return self._processor is not None

    @property
    def placeholder(self) -> str | None:
        """What stands for an image in a text; None without a vision tower."""
        return None if self._processor is None else self._processor.placeholder

    def submit(self, sequence: Sequence[Request], images: RequestImages) -> None:
        """Has the images of a submitted sequence opened; it must not be schedulable."""
        self._pending[sequence] = self._submit(sequence.prompt_token_ids, images.data())

    def open_all(
        self, requests: Iterable[tuple[npt.NDArray[np.int32], RequestImages | Mapping[str, Any]]]
    ) -> list[ImagePrompt | ValueError]:
        """Opens the images of prompts and waits; of each the prompt with them in place, or why there is none.

        Arguments:
            requests: ids of each prompt, int32 [prompt_len], and its images, as `multi_modal_data` too.
        """
        pending: list[PendingImages] = []
        try:
            for token_ids, images in requests:
                data = images.data() if isinstance(images, RequestImages) else images
                pending.append(self._submit(token_ids, data))
            return [self._opened(one) for one in pending]
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
        super().close()
        if self._workers is not None:
            self._workers.close()

    def _wait_for(self, jobs: list[PendingImages], seconds: float) -> None:
        if self._workers is not None:
            self._workers.wait(jobs, seconds)

    def _status(self, error: ValueError) -> SequenceStatus:
        return image_failure_status(error)

    def _submit(self, token_ids: npt.NDArray[np.int32], data: Mapping[str, Any]) -> PendingImages:
        assert self._workers is not None  # `prepare` refuses images otherwise
        return self._workers.submit(token_ids, data)

    def _opened(self, pending: PendingImages) -> ImagePrompt | ValueError:
        assert self._workers is not None
        try:
            while (prompt := pending.result()) is None:
                self._workers.wait([pending], _POLL)
        except ValueError as error:
            return error
        finally:
            pending.release()
        return prompt
