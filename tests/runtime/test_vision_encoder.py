"""The encoder's programs against `encode_image`, and the size classes against the layout rules."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import encode_image, load_config, load_params
from deepinfer_jax.config.model_config import parse_config
from deepinfer_jax.model.vision import feature_count
from deepinfer_jax.runtime.vision_encoder import VisionEncoder, bucket_features, most_features, patch_buckets
from deepinfer_jax.tokenization import ImageProcessor
from tests.support.paths import GOLDEN_A, RELEASED_CONFIG

pytestmark = pytest.mark.real

RELEASED = parse_config(json.loads(RELEASED_CONFIG.read_text())).vision
CONFIG = load_config(GOLDEN_A)


def test_every_image_has_a_class_that_holds_its_patches_and_its_features() -> None:
    assert patch_buckets(RELEASED) == (1664, 3968, 9216)
    assert patch_buckets(CONFIG.vision) == (576,)
    rng = np.random.default_rng(0)
    sizes = np.exp(rng.uniform(0, np.log(20_000), (3000, 2))).astype(int).tolist()
    used = set()
    for settings in (RELEASED, CONFIG.vision, dataclasses.replace(RELEASED, min_pixels=0, max_wh_ratio=30)):
        processor, buckets = ImageProcessor(settings), patch_buckets(settings)
        for width, height in [*sizes, (1, 10**6), (10**6, 1), (224, 224)]:
            layout = processor.layout(width, height)
            patches = layout.vit_height * layout.vit_width
            bucket = next(bucket for bucket in buckets if bucket >= patches)
            features = feature_count(layout.vit_height, layout.vit_width, settings)
            assert features == layout.llm_height * layout.llm_width <= bucket_features(bucket, settings)
            used.add((settings, bucket))
    assert len(used) == 3 + 1 + 3  # none is idle


def test_features_land_in_their_rows_and_nowhere_else() -> None:
    params = load_params(GOLDEN_A, CONFIG, precision="float32_exact")
    assert params.vision is not None
    encoder = VisionEncoder(params.vision, CONFIG, precision="float32_exact", num_rows=70)
    patch_size = 3 * CONFIG.vision.patch_size**2
    rng = np.random.default_rng(0)
    patches = rng.standard_normal((15, patch_size)).astype(np.float32)
    with pytest.raises(RuntimeError, match="no vision program was compiled for 15 patches; there are: none"):
        encoder.encode(patches, 3, 5, np.zeros(2, np.int32))
    encoder.warm_up()
    encoder.encode(patches, 3, 5, np.asarray([69, 7], np.int32))
    before = encoder.features
    encoder.encode(patches[::-1], 5, 3, np.asarray([8, 0], np.int32))
    assert before.is_deleted() and encoder.compile_count == 1
    expected = np.zeros((70, CONFIG.text.hidden_size), np.float32)
    for image, grid, rows in ((patches, (3, 5), [69, 7]), (patches[::-1], (5, 3), [8, 0])):
        _, embeds = encode_image(params, CONFIG, jnp.asarray(image), *grid, precision="float32_exact")
        expected[rows] = embeds
    # XLA sums rows of 576 patches in another order than rows of 15.
    np.testing.assert_allclose(encoder.features, expected, atol=1e-5)

    for match, arguments in (
        (r"patches of a grid of 4 x 5 have shape \[15, 588\], expected \[20, 588\]", (4, 5, [0, 1, 2, 3])),
        (r"rows has shape \[3\], but the image has 2 features", (3, 5, [0, 1, 2])),
        (r"rows 3 … 70 are not all in 0 … 69", (3, 5, [3, 70])),
        (r"rows -1 … 3 are not all in 0 … 69", (3, 5, [3, -1])),
    ):
        with pytest.raises(ValueError, match=match):
            encoder.encode(patches, *arguments[:2], np.asarray(arguments[2], np.int32))
    encoder.reset()
    assert not np.asarray(encoder.features).any()
    encoder.close()
    encoder.close()
    with pytest.raises(ValueError, match="60 rows of image features do not hold one image"):
        VisionEncoder(params.vision, CONFIG, precision="float32_exact", num_rows=most_features(CONFIG.vision) - 1)
