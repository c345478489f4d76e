"""Makes patches of an opened image, bit for bit as the released code does (model.md §10.1, DB §4.3–4.5)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image

from .image_layout import ImageLayout, ImageRules, check_image_rules, plan_layout
from .image_opening import ImageSource, open_image

_GREY = (127, 127, 127)


def _byte_values() -> npt.NDArray[np.float32]:
    """What the vision tower sees of each byte, float32 [256]: (x / 255 - 0.5) / 0.5, rounded to bf16."""
    values = (np.arange(256, dtype=np.float32) / np.float32(255) - np.float32(0.5)) / np.float32(0.5)
    bits = values.view(np.uint32)
    # To the nearest of the 16 upper bits, ties to even.
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32)


_VALUES = _byte_values()


@dataclass(frozen=True, eq=False)
class ProcessedImage:
    """An image on its canvas. Bytes, because its patches take four times their place.

    Attributes:
        layout: its grids.
        pixels: uint8 [pixel_height, pixel_width, 3].
        digest: SHA-256 of size and pixels: equal digests mean that the model sees the same.
    """

    layout: ImageLayout
    pixels: npt.NDArray[np.uint8]
    digest: bytes

    def patches(self) -> npt.NDArray[np.float32]:
        """float32 [vit_height * vit_width, 3 * p * p], row by row; a patch is flattened as (channel, row, column)."""
        rows, columns = self.layout.vit_height, self.layout.vit_width
        patch = self.layout.pixel_height // rows
        grid = self.pixels.reshape(rows, patch, columns, patch, 3).transpose(0, 2, 4, 1, 3)
        return _VALUES[grid.reshape(rows * columns, 3 * patch * patch)]


class ImageProcessor:
    """Fits images to one model's vision tower. Without state: any number of threads may use it."""

    def __init__(self, vision_config: ImageRules) -> None:
        """Takes any object with the fields of `vision_config`.

        Raises:
            ValueError: a field is out of range.
        """
        check_image_rules(vision_config)
        self._rules = vision_config

    def layout(self, width: int, height: int) -> ImageLayout:
        """The grids and the token count of an image of `width` x `height` pixels.

        Raises:
            ImageError: there is no layout for this size.
        """
        return plan_layout(width, height, self._rules)

    def process(self, image: ImageSource) -> ProcessedImage:
        """Opens an image and puts it on the canvas of its size's layout.

        Raises:
            ImageError: it cannot be opened, or there is no layout for its size.
        """
        upright = open_image(image)
        return self.fit(upright, self.layout(*upright.size))

    def fit(self, upright: Image.Image, layout: ImageLayout) -> ProcessedImage:
        """Puts an image from `open_image` on the canvas of `layout`, which may be that of another size."""
        pixels = np.asarray(self._canvas(upright, (layout.pixel_width, layout.pixel_height)))
        size = np.array(pixels.shape, "<i8").tobytes()
        return ProcessedImage(layout, pixels, hashlib.sha256(size + pixels.tobytes()).digest())

    def patches(self, image: ImageSource) -> npt.NDArray[np.float32]:
        """float32 [n_patches, 3 * p * p]: the patches of an image at the layout of its size.

        Raises:
            ImageError: as `process`.
        """
        return self.process(image).patches()

    def _canvas(self, image: Image.Image, canvas: tuple[int, int]) -> Image.Image:
        """Fits the image inside the canvas with its aspect, in the middle of grey; too wide a one is stretched."""
        ratio = self._rules.max_wh_ratio
        stretched = ratio is not None and image.width >= ratio * image.height
        fitted = canvas if stretched else _fitted_size(image.size, canvas)
        if 0 in fitted:  # thinner than half a pixel
            fitted = canvas
        resized = image.resize(fitted, Image.Resampling.BICUBIC)
        if fitted == canvas:
            return resized
        padded = Image.new("RGB", canvas, _GREY)
        padded.paste(resized, (round((canvas[0] - fitted[0]) * 0.5), round((canvas[1] - fitted[1]) * 0.5)))
        return padded


def _fitted_size(size: tuple[int, int], canvas: tuple[int, int]) -> tuple[int, int]:
    """The largest size with the aspect of `size` inside `canvas`, in the floating point steps of Pillow's `contain`."""
    (width, height), (canvas_width, canvas_height) = size, canvas
    aspect, canvas_aspect = width / height, canvas_width / canvas_height
    if aspect > canvas_aspect:
        return canvas_width, round(height / width * canvas_width)
    if aspect < canvas_aspect:
        return round(width / height * canvas_height), canvas_height
    return canvas
