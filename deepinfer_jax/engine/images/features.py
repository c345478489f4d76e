"""Image features from step to step: which rows of the device's array hold what, and which a prefill step reads.

An image is encoded when a step first needs it, and not again as long as its rows are not wanted for others: not for
its later chunks, nor for other requests with the same image.
"""

import functools
from collections import OrderedDict
from collections.abc import Mapping

import jax
import numpy as np
import numpy.typing as npt

from deepinfer_jax.engine.requests.request import Request
from deepinfer_jax.model.embedding import PLACE_OF, ROLE_OF, TEXT_PLACE
from deepinfer_jax.runtime.vision_encoder import VisionEncoder
from deepinfer_jax.scheduler import PrefillStep
from deepinfer_jax.tokenization import ImageInput, ImageLayout, ImagePrompt, TokenType

Rows = npt.NDArray[np.int32]


class FeatureRows:
    """Which rows are whose: images by digest, the least recently used go first.

    Rows of one image need not lie side by side, so whatever has room in all has room.

    Attributes:
        num_rows: of all images.
        num_encoded: images that got rows.
        num_reused: times that an image was found.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.num_encoded = self.num_reused = 0
        self._held: OrderedDict[bytes, Rows] = OrderedDict()
        self._free = list(range(num_rows))

    def take(self, wanted: Mapping[bytes, int]) -> tuple[dict[bytes, Rows], list[bytes]]:
        """Rows of all these images at once, each int32 [its features], and those whose rows are yet to be filled.

        Args:
            wanted: digest -> number of features.

        Raises:
            RuntimeError: more features than there are rows.
        """
        if (total := sum(wanted.values())) > self.num_rows:
            raise RuntimeError(f"a step needs {total} rows of image features, and there are {self.num_rows}")
        for digest in wanted:
            if digest in self._held:
                self._held.move_to_end(digest)
                self.num_reused += 1
        new = [digest for digest in wanted if digest not in self._held]
        for digest in new:
            while len(self._free) < wanted[digest]:  # the wanted ones are the last
                _, rows = self._held.popitem(last=False)
                self._free += rows.tolist()
            first = len(self._free) - wanted[digest]
            self._held[digest] = np.asarray(self._free[first:], np.int32)
            del self._free[first:]
        self.num_encoded += len(new)
        return {digest: self._held[digest] for digest in wanted}, new

    def forget(self, digest: bytes) -> None:
        """Gives the rows of an image back, if it has some."""
        if (rows := self._held.pop(digest, None)) is not None:
            self._free += rows.tolist()

    def clear(self) -> None:
        """Forgets all images."""
        self._held.clear()
        self._free = list(range(self.num_rows))


class FeatureCache:
    """The features of an engine's images, made by `encoder` when a step needs them.

    Attributes:
        rows: what is kept, and how often it was of use.
    """

    def __init__(self, encoder: VisionEncoder) -> None:
        self.rows = FeatureRows(encoder.num_rows)
        self._encoder = encoder

    def warm_up(self) -> None:
        """Compiles these programs."""
        self._encoder.warm_up()

    def for_step(self, step: PrefillStep[Request]) -> tuple[Rows, jax.Array]:
        """What a prefill step reads of images; the step is to be launched next.

        Images that it needs and that are not there are encoded first.

        Returns:
            The place of each of its tokens (`model.embedding`), int32 [n, bucket.time], and the features.
        """
        shown = _shown(step)
        images = {image.image.digest: image for _, image, part in shown if part.max() >= 0}
        wanted = {digest: _num_features(image.image.layout) for digest, image in images.items()}
        rows, new = self.rows.take(wanted)
        for digest in new:
            image = images[digest].image
            self._encoder.encode(image.patches(), image.layout.vit_height, image.layout.vit_width, rows[digest])
        return _places(step, shown, rows), self._encoder.features

    def forget(self, image_prompt: ImagePrompt | None) -> None:
        """Has the images of a prompt encoded again when they are needed next: a request that read them failed."""
        for image in () if image_prompt is None else image_prompt.images:
            self.rows.forget(image.image.digest)

    def reset(self) -> None:
        """Forgets all images, after a failure too."""
        self.rows.clear()
        self._encoder.reset()

    def close(self) -> None:
        """Frees what the device holds."""
        self._encoder.close()


def _shown(step: PrefillStep[Request]) -> list[tuple[int, ImageInput, Rows]]:
    """The images of which a step has positions: row, image, and what stands at these positions (`_structure`)."""
    shown = []
    for row, sequence in enumerate(step.sequences):
        image_prompt = sequence.request.image_prompt
        start = int(step.starts[row])
        stop = start + int(step.num_new_tokens[row])
        for image in () if image_prompt is None else image_prompt.images:
            if image.start < stop and image.stop > start:
                part = _structure(image.image.layout)[max(start - image.start, 0) : stop - image.start]
                shown.append((row, image, part))
    return shown


def _places(step: PrefillStep[Request], shown: list[tuple[int, ImageInput, Rows]], rows: Mapping[bytes, Rows]) -> Rows:
    places = np.full(step.tokens.shape, TEXT_PLACE, np.int32)
    for row, image, part in shown:
        at = max(image.start - int(step.starts[row]), 0)
        own = rows.get(image.image.digest)
        places[row, at : at + len(part)] = part if own is None else np.where(part >= 0, own[np.maximum(part, 0)], part)
    return places


@functools.lru_cache(maxsize=256)
def _structure(layout: ImageLayout) -> Rows:
    """What stands at each position of an image: the number of a feature, or the place of a delimiter. int32 [tokens].

    Nobody may write to it.
    """
    kinds = layout.roles()
    places = np.cumsum(kinds == TokenType.IMAGE, dtype=np.int32) - 1
    for kind, role in ROLE_OF.items():
        if role in PLACE_OF:
            places[kinds == kind] = PLACE_OF[role]
    return places


def _num_features(layout: ImageLayout) -> int:
    return layout.llm_height * layout.llm_width
