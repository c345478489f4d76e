"""Expands a prompt and its images to the ids and roles that the engine runs (DB §4.2)."""

from __future__ import annotations

import logging
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from .image_layout import ImageRules
from .image_opening import ImageError, ImageSource, check_source, open_image
from .image_processor import ImageProcessor, ProcessedImage
from .image_spans import Span, find_spans
from .image_tokens import ImageTokenOffset, TokenType, find_image_placeholder

logger = logging.getLogger(__name__)

_KEYS = {"image_bytes", "image_sizes"}
# What people write when they mean a placeholder: <Image>, <|deepseek_image|>, <img/>, [image].
_LOOKS_LIKE_PLACEHOLDER = re.compile(r"[<\[]\s*[|｜]?\s*(?:deepseek[\s_▁-]*)?(?:image|img)\s*[|｜]?\s*/?[>\]]", re.I)


@dataclass(frozen=True)
class TextLengthInput:
    """A run of text in a prompt. `length`: its tokens."""

    length: int


@dataclass(frozen=True, eq=False)
class ImageInput:
    """An image in a prompt.

    Attributes:
        width, height: pixels, as declared or else as decoded.
        start, stop: its tokens are the positions start … stop - 1 of the expanded prompt.
        image: what the vision tower gets of it.
    """

    width: int
    height: int
    start: int
    stop: int
    image: ProcessedImage


@dataclass(frozen=True, eq=False)
class ImagePrompt:
    """A prompt with its images expanded.

    Attributes:
        token_ids: int32 [n]: of each image vocab_size + IMAGE, then vocab_size + IMAGE_PADs.
        mm_token_type: int32 [n], `TokenType`s: UNDEFINED for text, the structure of each image.
        segments: text, image, text, …, text in order; their lengths add up to n. Texts may be empty.
    """

    token_ids: npt.NDArray[np.int32]
    mm_token_type: npt.NDArray[np.int32]
    segments: tuple[TextLengthInput | ImageInput, ...]

    @property
    def images(self) -> tuple[ImageInput, ...]:
        """Its images, in order of position."""
        return tuple(segment for segment in self.segments if isinstance(segment, ImageInput))


_Piece = tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], TextLengthInput | ImageInput]


class MultimodalProcessor:
    """Puts images into prompts of one model. Without state: any number of threads may use it."""

    def __init__(
        self,
        vision_config: ImageRules,
        tokenizer: Any,
        *,
        image_token_id: int,
        vocab_size: int,
        on_image_mismatch: Literal["raise", "warn"] = "raise",
    ) -> None:
        """
        Args:
            vision_config: any object with the fields of `vision_config`.
            tokenizer: gives `get_vocab()`, `convert_ids_to_tokens(id)` and `decode(ids)`.
            image_token_id, vocab_size: of config.json.
            on_image_mismatch: "raise" refuses a request whose placeholders are not as many as its images, or whose
                declared sizes are not the real ones. "warn" does what DeepInfer does: placeholders are filled in
                order, those left over stay plain tokens, images left over are dropped, and declared sizes decide
                the layout.

        Raises:
            ValueError: the tokenizer and config.json disagree on the image token, by name or by id; a field of
                `vision_config` is out of range.
        """
        if on_image_mismatch not in ("raise", "warn"):
            raise ValueError(f'on_image_mismatch must be "raise" or "warn", not {on_image_mismatch!r}')
        self.image_processor = ImageProcessor(vision_config)
        self.placeholder = _resolve_placeholder(tokenizer, image_token_id)
        self._decode = tokenizer.decode
        self._image_token_id = image_token_id
        self._vocab_size = vocab_size
        self._tolerant = on_image_mismatch == "warn"

    def overwrite_prompt(
        self, token_ids: Sequence[int] | npt.NDArray[np.integer], multi_modal_data: Mapping[str, Any] | None
    ) -> ImagePrompt:
        """Decodes the images and expands their placeholders in the prompt. Neither argument is changed.

        An image is one placeholder, or it is expanded already: `image_token_id` as often as the image
        has tokens, or the ids of `ImagePrompt.token_ids`.

        Args:
            token_ids: [n].
            multi_modal_data: `image_bytes`, a list of ImageSource; `image_sizes`, a list of their (width, height)
                when upright, which may be left out.

        Raises:
            ImageError: an image cannot be used; the message says which.
            ValueError: the prompt, the images and their sizes do not belong together.
        """
        given = np.asarray(token_ids)
        ids = given.astype(np.int32)
        if ids.ndim != 1 or (ids != given).any():
            raise ValueError(f"a prompt is one list of token ids, all int32; got {given.dtype} {list(given.shape)}")
        sources, sizes = images_of(multi_modal_data or {})
        images = [
            self._process(index, source, None if sizes is None else sizes[index])
            for index, source in enumerate(sources)
        ]
        spans = self._find_spans(ids, [image.layout.tokens for _, image in images])
        return self._expand(ids, spans, images)

    def _process(self, index: int, source: ImageSource, declared: Span | None) -> tuple[Span, ProcessedImage]:
        """The size of an image, and what the vision tower gets of it."""
        try:
            upright = open_image(source)
            size = self._checked_size(upright.size, declared)
            return size, self.image_processor.fit(upright, self.image_processor.layout(*size))
        except ImageError as error:
            raise ImageError(f"image {index} of the request: {error}") from error

    def _checked_size(self, real: Span, declared: Span | None) -> Span:
        if declared is None or declared == real:
            return real
        message = f"its declared size is {declared[0]} x {declared[1]}, but it has {real[0]} x {real[1]} pixels"
        if declared == real[::-1]:
            message += "; an EXIF orientation may turn it, and sizes are those of the upright image"
        if not self._tolerant:
            raise ImageError(message)
        logger.warning("%s; the layout follows the declared size", message)
        return declared

    def _find_spans(self, ids: npt.NDArray[np.int32], counts: list[int]) -> list[Span]:
        try:
            return find_spans(ids, counts, image_token_id=self._image_token_id, vocab_size=self._vocab_size)
        except ValueError as error:
            placeholders = np.flatnonzero(ids == self._image_token_id).tolist()
            expanded = bool(((ids >= self._vocab_size) & (ids < self._vocab_size + ImageTokenOffset.NUM_SPECIAL)).any())
            if not self._tolerant or expanded:
                raise ValueError(f"{error}{self._spelling_hint(ids)}") from error
            logger.error("%s; the first %d are used", error, min(len(placeholders), len(counts)))
            return [(at, at + 1) for at in placeholders[: len(counts)]]

    def _spelling_hint(self, ids: npt.NDArray[np.int32]) -> str:
        text = self._decode([token for token in ids.tolist() if 0 <= token < self._vocab_size])
        found = {match for match in _LOOKS_LIKE_PLACEHOLDER.findall(text) if match != self.placeholder}
        return f". The prompt spells {', '.join(sorted(found))}; the placeholder is {self.placeholder}" if found else ""

    def _expand(
        self, ids: npt.NDArray[np.int32], spans: list[Span], images: list[tuple[Span, ProcessedImage]]
    ) -> ImagePrompt:
        pieces: list[_Piece] = []
        read = length = 0  # of the prompt as given; of the expanded one
        # In tolerant mode there may be fewer spans than images.
        for (start, stop), ((width, height), image) in zip(spans, images, strict=False):
            pieces.append(_text_piece(ids[read:start]))
            begin = length + start - read
            length, read = begin + image.layout.tokens, stop
            tokens = np.full(image.layout.tokens, self._vocab_size + ImageTokenOffset.IMAGE_PAD, np.int32)
            tokens[0] = self._vocab_size + ImageTokenOffset.IMAGE
            pieces.append((tokens, image.layout.roles(), ImageInput(width, height, begin, length, image)))
        pieces.append(_text_piece(ids[read:]))
        token_ids, roles, segments = zip(*pieces, strict=True)
        return ImagePrompt(np.concatenate(token_ids), np.concatenate(roles), segments)


def _text_piece(ids: npt.NDArray[np.int32]) -> _Piece:
    return ids, np.full(len(ids), TokenType.UNDEFINED, np.int32), TextLengthInput(len(ids))


def _resolve_placeholder(tokenizer: Any, image_token_id: int) -> str:
    """The placeholder's name, by which the tokenizer gives `image_token_id` and which it gives for that id."""
    placeholder = find_image_placeholder(tokenizer.get_vocab(), image_token_id)
    if (held := tokenizer.convert_ids_to_tokens(image_token_id)) != placeholder:
        raise ValueError(
            f"the tokenizer encodes {placeholder} as image_token_id {image_token_id}, but calls that id {held!r}: two "
            "of its tokens share an id"
        )
    return placeholder


def images_of(data: Mapping[str, Any]) -> tuple[list[ImageSource], list[Span] | None]:
    """The images of `multi_modal_data` and their declared sizes, None without. Nothing is opened.

    Raises:
        ImageError: `image_bytes` is None.
        ValueError: any other shape of the data.
    """
    if not isinstance(data, Mapping):
        raise ValueError(f"multi_modal_data must be a dict that holds {sorted(_KEYS)}, not a {type(data).__name__}")
    if unknown := sorted(map(str, set(data) - _KEYS)):
        raise ValueError(f"multi_modal_data has unknown keys {unknown}; it may hold {sorted(_KEYS)}")
    sources, sizes = data.get("image_bytes", []), data.get("image_sizes")
    if sources is None:
        raise ImageError("multi_modal_data['image_bytes'] is None: the images of the request never arrived")
    if not isinstance(sources, list | tuple):
        raise ValueError(f"multi_modal_data['image_bytes'] must be a list of images, not a {type(sources).__name__}")
    for index, source in enumerate(sources):
        try:
            check_source(source)
        except TypeError as error:
            raise ValueError(f"image {index} of the request: {error}") from None
    if sizes is None:
        return list(sources), None
    if not hasattr(sizes, "__len__"):
        raise ValueError(f"multi_modal_data['image_sizes'] must be a list of sizes, not a {type(sizes).__name__}")
    if len(sizes) != len(sources):
        raise ValueError(f"multi_modal_data has {len(sources)} images but {len(sizes)} sizes: give one for each")
    return list(sources), [_as_size(size) for size in sizes]


def _as_size(size: Any) -> Span:
    try:
        width, height = (operator.index(side) for side in size)
    except (TypeError, ValueError) as error:
        raise ValueError(f"a size in image_sizes is (width, height) in pixels, not {size!r}: two integers") from error
    return width, height
