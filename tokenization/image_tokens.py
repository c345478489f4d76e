"""Constants of images among ids: sentinel ids beyond the vocabulary, roles, and the placeholder token's name."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum


class ImageTokenOffset(IntEnum):
    """Sentinel id minus the model's `vocab_size` (DB §4.1); wire format.

    Engine token streams hold only IMAGE (first position of an image) and IMAGE_PAD (all others); the structure
    of the span is in its `TokenType`s.
    """

    IMAGE_START = 0
    IMAGE_PAD = 1
    IMAGE = 2
    IMAGE_NEW_LINE = 3
    IMAGE_END = 4
    NUM_SPECIAL = 5


class TokenType(IntEnum):
    """Role of a position in `mm_token_type` (DB §4.1); wire format. A position is an image's iff >= IMAGE."""

    UNDEFINED = 0
    TEXT = 1
    IMAGE = 2
    IMAGE_START = 3
    IMAGE_END = 4
    IMAGE_NEW_LINE = 5
    IMAGE_PAD = 6


IMAGE_PLACEHOLDERS = ("<image>", "<｜deepseek_image｜>")
"""Names under which a tokenizer may hold the image placeholder, in order of preference (DB §4.1)."""


def find_image_placeholder(vocabulary: Mapping[str, int], image_token_id: int) -> str:
    """The name that stands for one image in a text prompt: the first of IMAGE_PLACEHOLDERS in `vocabulary`.

    Args:
        vocabulary: name -> id, added tokens included.
        image_token_id: what `config.json` says.

    Raises:
        ValueError: the vocabulary holds none of the names, or holds the first one under another id.
    """
    for name in IMAGE_PLACEHOLDERS:
        if name not in vocabulary:
            continue
        if vocabulary[name] != image_token_id:
            raise ValueError(
                f"the tokenizer's image placeholder {name} has id {vocabulary[name]}, but config.json has "
                f"image_token_id {image_token_id}: tokenizer and config.json belong to different models"
            )
        return name
    raise ValueError(
        f"the tokenizer holds neither {' nor '.join(IMAGE_PLACEHOLDERS)}, so no prompt can place an image; "
        f"config.json expects one of them at id {image_token_id}: use the tokenizer of this checkpoint"
    )
