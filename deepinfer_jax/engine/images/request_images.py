"""The images of a request: as its caller gave them, and as the scheduler knows them."""

from dataclasses import dataclass
from typing import Any, Self

from deepinfer_jax.scheduler import ImageContent, SequenceStatus
from deepinfer_jax.tokenization import ImageError, ImagePrompt, ImageSource, images_of


@dataclass(frozen=True, eq=False)
class RequestImages:
    """A request's `multi_modal_data`, in lists of its own; the images themselves are the caller's.

    Attributes:
        sources: None: they never arrived, and opening them says so.
        sizes: (width, height) of each as declared, None if they are not.
    """

    sources: list[ImageSource] | None
    sizes: list[tuple[int, int]] | None

    @classmethod
    def of(cls, data: Any) -> Self | None:
        """Copies `multi_modal_data`, and opens nothing; None if there is no image in it. Takes its own result too.

        Raises ValueError for what is no such data.
        """
        if data is None or isinstance(data, cls):
            return data
        try:
            sources, sizes = images_of(data)
        except ImageError:
            return cls(None, None)
        return cls(sources, sizes) if sources else None

    def data(self) -> dict[str, Any]:
        """As `MultimodalProcessor.overwrite_prompt` takes them."""
        return {"image_bytes": self.sources, "image_sizes": self.sizes}


def image_failure_status(error: ValueError) -> SequenceStatus:
    """How a request ends whose images could not be opened (ImageError), or do not belong to its prompt."""
    return SequenceStatus.FINISHED_VE_FAILED if isinstance(error, ImageError) else SequenceStatus.FINISHED_INVALID


def image_contents(prompt: ImagePrompt | None) -> tuple[ImageContent, ...]:
    """What the scheduler knows of a prompt's images."""
    images = () if prompt is None else prompt.images
    return tuple(ImageContent(own.start, own.stop, own.image.digest) for own in images)
