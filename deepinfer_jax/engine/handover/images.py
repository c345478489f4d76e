"""The images of a prompt in a file: a description of each, and the pixels of all."""

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer_jax.tokenization import ImageInput, ImageLayout, ImagePrompt, ProcessedImage, TextLengthInput, TokenType


def described_images(image_prompt: ImagePrompt | None) -> list[dict[str, Any]]:
    """What JSON can hold of each image, in order: its place, sizes, layout and digest."""
    return [
        {
            "start": own.start,
            "stop": own.stop,
            "width": own.width,
            "height": own.height,
            "layout": dataclasses.asdict(own.image.layout),
            "digest": own.image.digest.hex(),
        }
        for own in (() if image_prompt is None else image_prompt.images)
    ]


def joined_pixels(image_prompt: ImagePrompt | None) -> npt.NDArray[np.uint8]:
    """The pixels of all images, uint8 [n]."""
    images = () if image_prompt is None else image_prompt.images
    return np.concatenate([np.zeros(0, np.uint8), *(own.image.pixels.reshape(-1) for own in images)])


def image_prompt(
    token_ids: npt.NDArray[np.int32], described: list[dict[str, Any]], pixels: npt.NDArray[np.uint8]
) -> ImagePrompt | None:
    """The prompt that `described_images` and `joined_pixels` describe; None if it has no image.

    Args:
        token_ids: int32 [n], of the expanded prompt.
    """
    if not described:
        return None
    roles = np.full(len(token_ids), TokenType.UNDEFINED, np.int32)
    segments: list[TextLengthInput | ImageInput] = []
    position = read = 0
    for own in described:
        layout = ImageLayout(**own["layout"])
        shape = layout.pixel_height, layout.pixel_width, 3
        canvas = pixels[read : read + int(np.prod(shape))].reshape(shape)
        start, stop = own["start"], own["stop"]
        image = ImageInput(
            own["width"], own["height"], start, stop, ProcessedImage(layout, canvas, bytes.fromhex(own["digest"]))
        )
        roles[start:stop] = layout.roles()
        segments += [TextLengthInput(start - position), image]
        position, read = stop, read + canvas.size
    segments.append(TextLengthInput(len(token_ids) - position))
    return ImagePrompt(token_ids, roles, tuple(segments))
