"""Vision tower and aligner: the patches of one image to its rows among the embeddings (model.md §10.2, §10.3).

Everything is bf16 in the low precisions, whatever the checkpoint's format, and float32 in the others.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from deepinfer_jax.config.model_config import ModelConfig, VisionConfig
from deepinfer_jax.config.precision import PrecisionPolicy, precision_policy
from deepinfer_jax.kernels.dot import contract, matmul
from deepinfer_jax.model.checks import check_patches
from deepinfer_jax.model.norm import rms_norm
from deepinfer_jax.model.rope import Rotation
from deepinfer_jax.weights.params import Params, Vision, VisionBlock

SCORE_BYTES = 128 << 20
"""Attention scores, float32, that exist at once: of 16 heads and 9,189 patches, 228 queries."""
_EPS = 1e-6  # of all norms of the tower (model.md §1.2)


def encode_image(
    params: Params,
    config: ModelConfig,
    patches: jax.Array,
    vit_height: int,
    vit_width: int,
    *,
    precision: str = "reference",
) -> tuple[jax.Array, jax.Array]:
    """What the model sees of one image. Pure, jittable, differentiable; `forward` takes the second result.

    Args:
        params: from `load_params` or `init_params`, in the same precision.
        config: the model.
        patches: float [vit_height · vit_width, 3 · patch²], as `tokenization.ImageProcessor.patches` makes them.
        vit_height, vit_width: rows and columns of patches; static.
        precision: "reference", "bf16", "float32" or "float32_exact" (design.md §4).

    Returns:
        The patches after the tower, [vit_height · vit_width, vit hidden], and the aligner's rows in reading order,
        [⌈vit_height / downsample⌉ · ⌈vit_width / downsample⌉, hidden], both in the precision's activation type.

    Raises:
        ValueError: the model has no vision tower; a grid that is none, or patches of another number or size; params
            made for another precision or model.
    """
    vision = check_patches(params, config, patches, vit_height, vit_width, precision)
    num_features = feature_count(vit_height, vit_width, config.vision)
    return _encode_image(
        vision, patches, vit_height, vit_width, config=config, precision=precision, num_features=num_features
    )


@functools.partial(jax.jit, static_argnames=("config", "precision", "num_features"))
def _encode_image(
    vision: Vision,
    patches: jax.Array,
    vit_height: jax.Array,
    vit_width: jax.Array,
    *,
    config: ModelConfig,
    precision: str,
    num_features: int,
) -> tuple[jax.Array, jax.Array]:
    policy = precision_policy(config, precision)
    vit = vision_tower(vision, patches, vit_height, vit_width, config.vision, policy)
    return vit, align(vision, vit, vit_height, vit_width, num_features, config.vision, policy)


def feature_count(vit_height: int, vit_width: int, settings: VisionConfig) -> int:
    """How many IMAGE rows a grid of patches gives."""
    return math.ceil(vit_height / settings.downsample_ratio) * math.ceil(vit_width / settings.downsample_ratio)


@jax.named_scope("vision")
def vision_tower(
    vision: Vision,
    patches: jax.Array,
    vit_height: jax.Array,
    vit_width: jax.Array,
    settings: VisionConfig,
    policy: PrecisionPolicy,
) -> jax.Array:
    """The ViT of one image, of any grid that the patches hold.

    Args:
        patches: [n, 3 · patch²]; the first vit_height · vit_width count, in row-major order. The rest must be finite.
        vit_height, vit_width: int32 [].

    Returns:
        [n, vit hidden], normed; what stands behind the image means nothing.
    """
    index = jnp.arange(patches.shape[0], dtype=jnp.int32)
    rotation = _grid_rotation(index // vit_width, index % vit_width, settings)
    valid = index < vit_height * vit_width
    x = _linear(policy.round(patches), vision.patch_proj, vision.patch_bias, policy)
    for number, block in enumerate(vision.blocks):
        with jax.named_scope(f"vision.blocks.{number}"):
            x = _block(x, block, rotation, valid, settings, policy)
    return rms_norm(x, vision.norm, _EPS)


@jax.named_scope("vision")
def align(
    vision: Vision,
    vit: jax.Array,
    vit_height: jax.Array,
    vit_width: jax.Array,
    num_features: int,
    settings: VisionConfig,
    policy: PrecisionPolicy,
) -> jax.Array:
    """The aligner: each square of patches becomes one row, in reading order; the last squares are filled with zeros.

    Args:
        vit: [n, vit hidden], of which the first vit_height · vit_width count.
        vit_height, vit_width: int32 [].
        num_features: rows to make, at least as many as the image has; the rest mean nothing.

    Returns:
        [num_features, hidden].
    """
    side = settings.downsample_ratio
    columns = -(-vit_width // side)
    cell, within = jnp.arange(num_features, dtype=jnp.int32)[:, None], np.arange(side * side, dtype=np.int32)
    row = cell // columns * side + within // side
    column = cell % columns * side + within % side
    inside = (row < vit_height) & (column < vit_width)
    squares = jnp.take(vit, jnp.where(inside, row * vit_width + column, 0), axis=0)
    squares = jnp.where(inside[..., None], squares, 0).swapaxes(1, 2)  # channel-major
    inner = _linear(squares.reshape(num_features, -1), vision.aligner_w1, vision.aligner_b1, policy)
    bent = policy.round(jax.nn.gelu(inner.astype(jnp.float32), approximate=False))
    return _linear(bent, vision.aligner_w2, vision.aligner_b2, policy)


def _grid_rotation(rows: jax.Array, columns: jax.Array, settings: VisionConfig) -> Rotation:
    """2-D RoPE: the first half of the angles turns with the row, the second with the column. float32 [n, head / 2]."""
    axis_dim = settings.hidden_size // settings.num_attention_heads // 2
    # float64 before the rounding: a float32 power differs from one CPU to the next.
    powers = (settings.rope_theta ** (np.arange(0, axis_dim, 2) / axis_dim)).astype(np.float32)
    frequencies = np.reciprocal(powers)
    places = jnp.stack([rows, columns], axis=-1).astype(jnp.float32)
    angles = (places[..., None] * frequencies).reshape(len(rows), axis_dim)
    return Rotation(jnp.cos(angles), jnp.sin(angles))


def _rotate_half(x: jax.Array, rope: Rotation, policy: PrecisionPolicy) -> jax.Array:
    """Rotates channel i with channel i + head / 2 (T11). [n, heads, head] -> the same."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * rope.cos - second * rope.sin, second * rope.cos + first * rope.sin], axis=-1)
    return policy.round(turned)


def _block(
    x: jax.Array,
    block: VisionBlock,
    rotation: Rotation,
    valid: jax.Array,
    settings: VisionConfig,
    policy: PrecisionPolicy,
) -> jax.Array:
    attended = _attention(rms_norm(x, block.norm1, _EPS), block, rotation, valid, settings, policy)
    x = _add(x, _linear(attended, block.wo, block.wo_bias, policy), policy)
    inner = _linear(rms_norm(x, block.norm2, _EPS), block.w1, None, policy)
    gate, up = jnp.split(inner.astype(jnp.float32), 2, axis=-1)
    # Unlike in the experts, silu is rounded before the product.
    product = policy.round(policy.round(jax.nn.silu(gate)).astype(jnp.float32) * up)
    return _add(x, _linear(product, block.w2, None, policy), policy)


def _attention(
    x: jax.Array,
    block: VisionBlock,
    rotation: Rotation,
    valid: jax.Array,
    settings: VisionConfig,
    policy: PrecisionPolicy,
) -> jax.Array:
    """Every patch sees all patches of the image. [n, vit hidden] -> the same, before the output projection.

    Probabilities are not rounded: their products with values are float32 ones. Queries go in tiles, so that the scores
    of large images need no [heads, n, n]; in a gradient each tile is computed again.
    """
    n, width = x.shape
    heads = settings.num_attention_heads
    qkv = _linear(x, block.wqkv, block.wqkv_bias, policy).reshape(n, 3, heads, width // heads)
    rope = rotation.heads()
    queries, keys, values = _rotate_half(qkv[:, 0], rope, policy), _rotate_half(qkv[:, 1], rope, policy), qkv[:, 2]

    @jax.checkpoint
    def of_queries(queries: jax.Array) -> jax.Array:
        scores = contract("qhd,khd->hqk", queries, keys) * (width // heads) ** -0.5
        probabilities = jax.nn.softmax(jnp.where(valid, scores, -jnp.inf), axis=-1)
        return policy.round(contract("hqk,khd->hqd", probabilities, values).swapaxes(0, 1))

    tiles = math.ceil(4 * heads * n * n / SCORE_BYTES)
    if tiles == 1:
        return of_queries(queries).reshape(n, width)
    rows = math.ceil(n / tiles)
    padded = jnp.pad(queries, [(0, tiles * rows - n), (0, 0), (0, 0)])
    return lax.map(of_queries, padded.reshape(tiles, rows, *queries.shape[1:])).reshape(-1, width)[:n]


def _linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None, policy: PrecisionPolicy) -> jax.Array:
    """x Wᵀ + bias, rounded once. [n, in] -> [n, out]."""
    wide = matmul(x, weight)
    return policy.round(wide if bias is None else wide + bias.astype(jnp.float32))


def _add(x: jax.Array, y: jax.Array, policy: PrecisionPolicy) -> jax.Array:
    return policy.round(x.astype(jnp.float32) + y.astype(jnp.float32))
