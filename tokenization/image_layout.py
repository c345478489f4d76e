"""Computes an image's size on its canvas and its number of tokens: integers and roots (model.md §10.1, DB §4.3)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from .image_opening import ImageError
from .image_tokens import TokenType


class ImageRules(Protocol):
    """The fields of `vision_config` that decide what becomes of an image (DB §4.8)."""

    @property
    def patch_size(self) -> int: ...
    @property
    def downsample_ratio(self) -> int: ...
    @property
    def max_image_tokens(self) -> int: ...
    @property
    def min_pixels(self) -> int: ...
    @property
    def max_wh_ratio(self) -> float | None: ...


@dataclass(frozen=True)
class ImageLayout:
    """The grids of one image.

    Attributes:
        llm_height, llm_width: rows and columns of IMAGE tokens.
        pixel_height, pixel_width: the canvas, multiples of the patch size.
        vit_height, vit_width: rows and columns of patches.
        tokens: positions that the image takes in a prompt: START, llm_height lines of llm_width IMAGE and one
            NEW_LINE, END.
    """

    llm_height: int
    llm_width: int
    pixel_width: int
    pixel_height: int
    vit_height: int
    vit_width: int
    tokens: int

    def roles(self) -> npt.NDArray[np.int32]:
        """The `TokenType` of each of its positions, int32 [tokens]."""
        line = [TokenType.IMAGE] * self.llm_width + [TokenType.IMAGE_NEW_LINE]
        return np.array([TokenType.IMAGE_START, *line * self.llm_height, TokenType.IMAGE_END], np.int32)


def check_image_rules(rules: ImageRules) -> None:
    """Raises ValueError, naming the field, unless `rules` leave room for at least one patch."""
    # One cell costs START, IMAGE, NEW_LINE, END.
    smallest = {"patch_size": 1, "downsample_ratio": 1, "max_image_tokens": 4, "min_pixels": 0}
    for name, least in smallest.items():
        value = getattr(rules, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"vision_config.{name} must be an integer of at least {least}, not {value!r}")
    ratio = rules.max_wh_ratio
    if ratio is not None and (isinstance(ratio, bool) or not isinstance(ratio, int | float) or not ratio >= 1):
        raise ValueError(f"vision_config.max_wh_ratio must be null or a number of at least 1, not {ratio!r}")


def plan_layout(width: int, height: int, rules: ImageRules) -> ImageLayout:
    """The layout of an image of `width` x `height` pixels.

    Too few pixels are scaled up to `min_pixels`; each side is rounded up to patches; what would then take more than
    `max_image_tokens` is scaled down to fit.

    Raises:
        ImageError: a side is below 1, or becomes less than a patch (only with downsample_ratio 1).
    """
    if width < 1 or height < 1:
        raise ImageError(f"an image of {width} x {height} pixels has nothing to show: both sides must be at least 1")
    patch = rules.patch_size
    w, h = _enlarged(width, height, rules)
    layout = _layout(math.ceil(w / patch) * patch, math.ceil(h / patch) * patch, rules)
    if layout.tokens > rules.max_image_tokens:
        layout = _layout(*_fitting_canvas(w, h, rules), rules)
    if layout.vit_height < 1 or layout.vit_width < 1:
        raise ImageError(
            f"an image of {width} x {height} pixels scaled down to {rules.max_image_tokens} tokens would be thinner "
            f"than a patch of {patch} pixels: crop it"
        )
    return layout


def _enlarged(width: float, height: int, rules: ImageRules) -> tuple[float, int]:
    if rules.max_wh_ratio is not None:
        width = min(width, height * rules.max_wh_ratio)
    if (pixels := width * height) >= rules.min_pixels:
        return width, height
    scale = math.sqrt(rules.min_pixels / pixels)
    return int(width * scale), int(height * scale)


def _fitting_canvas(w: float, h: int, rules: ImageRules) -> tuple[int, int]:
    """(width, height) in pixels of the largest canvas with about the aspect of w x h that the token limit allows."""
    patch, limit = rules.patch_size, rules.max_image_tokens
    cell = patch * rules.downsample_ratio
    aspect = h / w
    # The positive root of columns x aspect x (columns + 1) + 2 = limit.
    columns = math.sqrt((limit - 2) / aspect + 0.25) - 0.5
    rows = columns * aspect
    if columns < 1:
        return cell, (limit - 2) // 2 * cell
    if rows < 1:
        return (limit - 3) * cell, cell
    scale = min(math.floor(columns) * cell / w, math.floor(rows) * cell / h)
    return math.floor(w * scale / patch) * patch, math.floor(h * scale / patch) * patch


def _layout(pixel_width: int, pixel_height: int, rules: ImageRules) -> ImageLayout:
    vit_height, vit_width = pixel_height // rules.patch_size, pixel_width // rules.patch_size
    llm_height, llm_width = (-(-side // rules.downsample_ratio) for side in (vit_height, vit_width))
    return ImageLayout(
        llm_height=llm_height,
        llm_width=llm_width,
        pixel_width=pixel_width,
        pixel_height=pixel_height,
        vit_height=vit_height,
        vit_width=vit_width,
        tokens=llm_height * (llm_width + 1) + 2,
    )
