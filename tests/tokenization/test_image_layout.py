"""Sizes to grids and token counts: golden rows, published vectors, and an exact twin on thousands of sizes."""

import math

import numpy as np
import pytest

from deepinfer_jax.tokenization import ImageError, ImageProcessor, TokenType
from tests.support.image_rules import rules
from tests.support.paths import GOLDEN

pytestmark = pytest.mark.pure


def test_plans_are_the_golden_ones():
    processor = ImageProcessor(rules())
    rows = np.load(GOLDEN / "image_plan_released.npz")["rows"]
    assert len(rows) == 16
    for width, height, *expected in rows.tolist():
        plan = processor.layout(width, height)
        assert [plan.llm_height, plan.llm_width, plan.pixel_height, plan.pixel_width, plan.tokens] == expected


@pytest.mark.parametrize(
    ("changes", "size", "canvas", "tokens"),
    [
        # DB §16; among them the branches of less than one column and of less than one row.
        ({"min_pixels": 0}, (756, 756), (756, 756), 344),
        ({"min_pixels": 0}, (1000, 700), (1008, 700), 427),
        ({"min_pixels": 0}, (4000, 3000), (1512, 1134), 1001),
        ({"min_pixels": 0}, (1, 100_000), (42, 21_462), 1024),
        ({"min_pixels": 0}, (100_000, 1), (42_882, 42), 1024),
        ({"min_pixels": 0}, (14, 14), (14, 14), 4),
        ({"min_pixels": 0}, (43, 43), (56, 56), 8),
        ({"min_pixels": 0}, (3000, 200), (3010, 210), 367),
        ({"min_pixels": 0, "max_image_tokens": 4096}, (4000, 3000), (3066, 2296), 4072),
        ({"min_pixels": 0, "max_image_tokens": 4096}, (1, 100_000), (42, 85_974), 4096),
        ({"min_pixels": 0, "max_image_tokens": 4096}, (100_000, 1), (100_002, 14), 2384),
        ({"min_pixels": 200_704}, (14, 14), (448, 448), 134),
        ({}, (14, 14), (546, 546), 184),
        ({}, (640, 480), (644, 490), 206),
        ({}, (1920, 1080), (1708, 966), 968),
        ({}, (512, 2048), (518, 2058), 688),
        # model.md §14.
        ({"patch_size": 4, "max_image_tokens": 32, "min_pixels": 144}, (20, 12), (20, 12), 5),
        ({"patch_size": 4, "max_image_tokens": 32, "min_pixels": 144}, (9, 30), (12, 32), 8),
        ({"patch_size": 4, "max_image_tokens": 32, "min_pixels": 144}, (100, 60), (60, 36), 20),
        # 400 x 10 becomes 20 x 10, then 35 x 17.
        ({"patch_size": 4, "min_pixels": 600, "max_wh_ratio": 2}, (400, 10), (36, 20), 10),
        ({"patch_size": 4, "min_pixels": 0, "max_wh_ratio": 2.5}, (399, 10), (28, 12), 6),
    ],
)
def test_sizes_are_the_published_ones(changes, size, canvas, tokens):
    plan = ImageProcessor(rules(**changes)).layout(*size)
    assert ((plan.pixel_width, plan.pixel_height), plan.tokens) == (canvas, tokens)


def twin(width, height, rule):
    """(canvas width, canvas height) in whole numbers, by trying; exact but for the last scale."""
    patch, limit = rule.patch_size, rule.max_image_tokens
    if 0 < width * height < rule.min_pixels:
        # floor(w sqrt(m / (w h))) is the largest n with n² h <= m w.
        width, height = math.isqrt(rule.min_pixels * width // height), math.isqrt(rule.min_pixels * height // width)

    def tokens(w, h):
        cell = patch * rule.downsample_ratio
        return -(-h // cell) * (-(-w // cell) + 1) + 2

    canvas = (-(-width // patch) * patch, -(-height // patch) * patch)
    if tokens(*canvas) <= limit:
        return canvas
    cell = patch * rule.downsample_ratio
    # Most columns with rows = columns x h / w, and most rows with columns = rows x w / h, whose cells may be cut.
    columns = max(n for n in range(limit) if n * (n + 1) * height <= (limit - 2) * width)
    rows = max(n for n in range(limit) if n * (n * width + height) <= (limit - 2) * height)
    if columns < 1:
        return cell, (limit - 2) // 2 * cell
    if rows < 1:
        return (limit - 3) * cell, cell
    scale = min(columns * cell / width, rows * cell / height)
    return int(width * scale / patch) * patch, int(height * scale / patch) * patch


@pytest.mark.parametrize(
    "changes",
    [{}, {"patch_size": 4, "max_image_tokens": 32, "min_pixels": 144}, {"downsample_ratio": 2, "min_pixels": 0}],
)
def test_thousands_of_sizes_are_those_of_whole_numbers(changes):
    rule = rules(**changes)
    processor = ImageProcessor(rule)
    drawn = np.exp(np.random.default_rng(0).uniform(0, np.log(60_000), (2000, 2))).astype(int)
    for width, height in drawn.tolist():
        plan = processor.layout(width, height)
        assert (plan.pixel_width, plan.pixel_height) == twin(width, height, rule), (width, height)
        assert plan.tokens <= rule.max_image_tokens
        assert (plan.vit_width * rule.patch_size, plan.vit_height * rule.patch_size) == (
            plan.pixel_width,
            plan.pixel_height,
        )
        assert plan.llm_width == math.ceil(plan.vit_width / rule.downsample_ratio)
        assert plan.llm_height == math.ceil(plan.vit_height / rule.downsample_ratio)


def test_the_roles_of_an_image_are_known():
    plan = ImageProcessor(rules(min_pixels=0)).layout(14 * 6, 14 * 4)
    assert plan.roles().dtype == np.int32
    start, image, line, end = TokenType.IMAGE_START, TokenType.IMAGE, TokenType.IMAGE_NEW_LINE, TokenType.IMAGE_END
    assert plan.roles().tolist() == [start, image, image, line, image, image, line, end]
    assert len(plan.roles()) == plan.tokens == 8


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (-1, 5)])
def test_a_size_without_pixels_is_refused(size):
    with pytest.raises(ImageError, match=f"an image of {size[0]} x {size[1]} pixels has nothing to show"):
        ImageProcessor(rules()).layout(*size)


def test_an_image_thinner_than_a_patch_is_refused():
    # Only where a cell is one patch: 1 column x 0.6 rows, rounded down.
    processor = ImageProcessor(rules(downsample_ratio=1, max_image_tokens=5, min_pixels=0))
    with pytest.raises(ImageError, match="scaled down to 5 tokens would be thinner than a patch of 14 pixels"):
        processor.layout(1000, 600)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patch_size": 0}, r"vision_config\.patch_size must be an integer of at least 1, not 0"),
        ({"downsample_ratio": True}, r"vision_config\.downsample_ratio must be an integer of at least 1, not True"),
        ({"max_image_tokens": 3}, r"vision_config\.max_image_tokens must be an integer of at least 4, not 3"),
        ({"min_pixels": 0.5}, r"vision_config\.min_pixels must be an integer of at least 0, not 0.5"),
        ({"max_wh_ratio": 0.5}, r"vision_config\.max_wh_ratio must be null or a number of at least 1, not 0.5"),
        ({"max_wh_ratio": math.nan}, r"vision_config\.max_wh_ratio must be null or a number of at least 1, not nan"),
    ],
)
def test_rules_out_of_range_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        ImageProcessor(rules(**changes))
