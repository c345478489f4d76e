"""The vision tower on the golden images in all precisions, and what padding, tiles and arguments may not change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepinfer_jax.model.vision
from deepinfer_jax import Params, encode_image
from deepinfer_jax.config.precision import precision_policy
from deepinfer_jax.model.vision import align, vision_tower
from tests.support.golden import MODES, Array, Case, as_float32, model, worst

pytestmark = pytest.mark.real

GRIDS = ((4, 5), (3, 3))
"""Rows and columns of patches of the two golden images."""


def golden_image(mode: str, index: int) -> tuple[Array, Array, Array]:
    """(patches, after the tower, aligner rows) of a golden image."""
    arrays = Case("A_s28", "img", mode).arrays
    patches, vit, embeds = (arrays[f"image{index}/{key}"] for key in ("patches", "vit", "embeds"))
    return patches.reshape(len(patches), -1), vit, embeds


@pytest.mark.parametrize("index", range(2))
@pytest.mark.parametrize("precision", MODES)
def test_tower_and_aligner_are_the_golden_ones(precision: str, index: int) -> None:
    """Measured: at most 2e-6 in float32. In bf16 a sum in another order lands on the other side of a rounding edge now
    and then, which moves its successors by a bf16 step of a value of about 1, 2⁻⁷."""
    config, params = model("A_s28", precision)
    patches, vit, embeds = golden_image(MODES[precision], index)
    found = encode_image(params, config, jnp.asarray(patches), *GRIDS[index], precision=precision)
    for array, wanted in zip(found, (vit, embeds), strict=True):
        assert array.shape == wanted.shape
        if precision.startswith("float32"):
            assert worst(array, wanted) < 1e-5
        else:
            assert array.dtype == jnp.bfloat16
            assert (as_float32(array) != wanted).mean() < 0.01 and worst(as_float32(array), wanted) < 2**-5


def padded(params: Params, patches: Array, grid: tuple[int, int], room: int, num_features: int) -> tuple[Array, Array]:
    """An image among `room` patches and `num_features` rows, cut out again."""
    config, vision = model("A_s28", "float32_exact")[0], params.vision
    policy = precision_policy(config, params.precision)
    more = np.full((room - len(patches), patches.shape[1]), 7, np.float32)  # whatever: nobody may look

    @jax.jit
    def run(patches: jax.Array, height: jax.Array, width: jax.Array) -> tuple[jax.Array, jax.Array]:
        assert vision is not None
        vit = vision_tower(vision, patches, height, width, config.vision, policy)
        return vit, align(vision, vit, height, width, num_features, config.vision, policy)

    vit, embeds = run(np.concatenate([patches, more]), *grid)
    return as_float32(vit)[: len(patches)], as_float32(embeds)[: -(-grid[0] // 3) * -(-grid[1] // 3)]


@pytest.mark.parametrize(("grid", "queries"), [((1, 40), 80), ((5, 8), 23)])
def test_padding_and_tiles_change_nothing(grid: tuple[int, int], queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits may: XLA sums rows of another length in another order. Measured: 1e-6."""
    config, params = model("A_s28", "float32_exact")
    patches = np.random.default_rng(0).standard_normal((40, 3 * config.vision.patch_size**2)).astype(np.float32)
    alone = encode_image(params, config, jnp.asarray(patches), *grid, precision="float32_exact")
    scores = 4 * config.vision.num_attention_heads * 80 * queries
    monkeypatch.setattr(deepinfer_jax.model.vision, "SCORE_BYTES", scores)
    for found, wanted in zip(padded(params, patches, grid, 80, 27), alone, strict=True):
        assert worst(found, wanted) < 1e-5


def test_gradients_reach_pixels_and_weights_and_are_those_of_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Along one random direction, in tiles: central differences in float32 leave a few parts in ten thousand."""
    monkeypatch.setattr(deepinfer_jax.model.vision, "SCORE_BYTES", 4 * 2 * 20 * 7)
    config, params = model("A_s28", "float32_exact")
    patches = jnp.asarray(golden_image("f32nq", 0)[0])
    rng = np.random.default_rng(0)
    weights, direction = rng.standard_normal((4, config.text.hidden_size)), rng.standard_normal(patches.shape)

    def loss(patches: jax.Array, bias: jax.Array) -> jax.Array:
        vision = params.vision.replace(patch_bias=bias)
        vit = vision_tower(vision, patches, 4, 5, config.vision, precision_policy(config, "float32_exact"))
        return jnp.sum(align(vision, vit, 4, 5, 4, config.vision, precision_policy(config, "float32_exact")) * weights)

    bias, step = params.vision.patch_bias, 1e-3
    by_patches, by_bias = jax.jit(jax.grad(loss, argnums=(0, 1)))(patches, bias)
    jitted = jax.jit(loss)
    slope = (jitted(patches + step * direction, bias) - jitted(patches - step * direction, bias)) / (2 * step)
    np.testing.assert_allclose(jnp.vdot(by_patches, direction), slope, rtol=2e-3)
    assert np.abs(by_bias).min() > 0


def test_what_cannot_be_encoded_is_refused() -> None:
    config, params = model("A_s28", "float32_exact")
    patches = jnp.zeros((20, 3 * config.vision.patch_size**2))

    def refused(match: str, patches: jax.Array = patches, params: Params = params, **other: object) -> None:
        arguments = {"vit_height": 4, "vit_width": 5, "precision": "float32_exact"} | other
        with pytest.raises(ValueError, match=match):
            encode_image(params, config, patches, **arguments)

    refused(r"patches has shape \[20, 588\], expected \[25, 588\]", vit_height=5)
    refused("patches must hold floats, found uint8", patches.astype(jnp.uint8))
    refused("a grid of 0 x 5 patches has none", vit_height=0)
    refused("made for precision 'float32_exact' cannot run in 'bf16'", precision="bf16")
    other_config, other = model("B_s15", "float32_exact")
    with pytest.raises(ValueError, match="has no vision tower"):
        encode_image(other, other_config, patches, 4, 5, precision="float32_exact")
    refused("belong to different models", params=other)
