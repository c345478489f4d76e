"""Patches bit for bit: the golden images, and Pillow's own padding with every step written out."""

import json
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from PIL import Image, ImageOps

from deepinfer_jax.tokenization import ImageProcessor
from tests.support.image_rules import rules
from tests.support.paths import GOLDEN_A

pytestmark = pytest.mark.pure


def pixels(width, height, seed=0):
    """Random pixels, uint8 [height, width, 3]."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def test_the_golden_patches_are_bit_equal():
    config = json.loads((GOLDEN_A / "config.json").read_text())
    processor = ImageProcessor(SimpleNamespace(**config["vision_config"]))
    golden = np.load(GOLDEN_A / "img.f32nq.npz")
    for index in range(2):
        expected = golden[f"image{index}/patches"]
        patches = processor.patches(golden[f"image{index}/rgb"])
        assert patches.dtype == np.float32
        np.testing.assert_array_equal(patches, expected.reshape(len(expected), -1))


@pytest.mark.parametrize(
    ("size", "changes"),
    [
        ((64, 48), {}),
        ((37, 90), {}),
        ((1, 1), {}),
        ((300, 11), {"min_pixels": 0, "patch_size": 4}),
        ((11, 300), {"min_pixels": 0, "patch_size": 4, "max_image_tokens": 20}),
    ],
)
def test_patches_are_those_of_pillows_padding(size, changes):
    rule = rules(min_pixels=3000) if not changes else rules(**changes)
    processor, rgb = ImageProcessor(rule), pixels(*size)
    plan = processor.layout(*size)
    canvas = (plan.pixel_width, plan.pixel_height)
    # model.md §10.1 names this call.
    padded = ImageOps.pad(Image.fromarray(rgb), canvas, Image.Resampling.BICUBIC, (127, 127, 127))
    values = ((np.asarray(padded, np.float32) / 255 - np.float32(0.5)) / np.float32(0.5)).astype(ml_dtypes.bfloat16)
    p = rule.patch_size
    expected = [
        values[p * row : p * (row + 1), p * column : p * (column + 1), channel].ravel()
        for row in range(plan.vit_height)
        for column in range(plan.vit_width)
        for channel in range(3)
    ]
    expected = np.concatenate(expected).astype(np.float32).reshape(plan.vit_height * plan.vit_width, 3 * p * p)
    np.testing.assert_array_equal(processor.patches(rgb), expected)


def test_grey_stands_around_an_image_of_another_aspect():
    # 10 x 25 becomes 11 x 28 on a canvas of 14 x 28.
    processor = ImageProcessor(rules(min_pixels=0))
    white = np.full((25, 10, 3), 255, np.uint8)
    pixels = processor.process(white).pixels
    assert pixels.shape == (28, 14, 3)
    # 3 columns are left over: round(1.5) = 2 of them on the left.
    assert pixels[0, :, 0].tolist() == [127] * 2 + [255] * 11 + [127]


def test_a_wide_image_is_stretched_where_the_model_limits_the_ratio():
    processor, rgb = ImageProcessor(rules(min_pixels=0, max_wh_ratio=2)), pixels(200, 20)
    result = processor.process(rgb)
    assert (result.layout.pixel_width, result.layout.pixel_height) == (42, 28)
    np.testing.assert_array_equal(result.pixels, Image.fromarray(rgb).resize((42, 28), Image.Resampling.BICUBIC))


def test_an_image_that_would_vanish_is_stretched():
    # 1 x 3000 fits into 14 x 294 as 0.1 x 294; DB §4.4 falls back to a plain resize.
    processor, rgb = ImageProcessor(rules(min_pixels=0, max_image_tokens=16)), pixels(1, 3000)
    result = processor.process(rgb)
    canvas = (result.layout.pixel_width, result.layout.pixel_height)
    assert canvas == (42, 294)
    np.testing.assert_array_equal(result.pixels, Image.fromarray(rgb).resize(canvas, Image.Resampling.BICUBIC))


def test_equal_digests_mean_equal_pixels():
    processor = ImageProcessor(rules(min_pixels=0))
    rgb = pixels(28, 14)
    other = rgb.copy()
    other[3, 4, 1] ^= 1
    digests = {processor.process(image).digest for image in (rgb, other, rgb.reshape(28, 14, 3))}
    assert len(digests) == 3
    assert processor.process(Image.fromarray(rgb)).digest == processor.process(rgb).digest
