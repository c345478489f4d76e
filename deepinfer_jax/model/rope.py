"""Rotary positions: interleaved pairs on the last channels, YaRN on compressed layers (model.md §5.2)."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import struct

from deepinfer_jax.config.model_config import TextConfig
from deepinfer_jax.kernels.rounding import round_to
from deepinfer_jax.kernels.rowwise import rowwise


@struct.dataclass
class Rotation:
    """cos and sin of position × frequency, float32 [..., rope_dim / 2]."""

    cos: jax.Array
    sin: jax.Array

    def heads(self) -> "Rotation":
        """The same with an axis for heads before the last."""
        return Rotation(self.cos[..., None, :], self.sin[..., None, :])

    def inverse(self) -> "Rotation":
        """The rotation by −position, applied to attention outputs (T13)."""
        return Rotation(self.cos, -self.sin)


@functools.cache
def frequencies(text: TextConfig, compressed: bool) -> npt.NDArray[np.float32]:
    """f_i of a layer kind, float32 [rope_dim / 2]: plain θ at ratio 0, base `compress_rope_theta` with YaRN
    above (T12); amplitudes are never scaled.

    The reference works in float32 from the power on (its window keys in the golden data tell θ^(2i/d), rounded and
    inverted, from θ^(−2i/d)): one unit in the last place of f_i is 0.03 rad at position 2²⁰.
    """
    dim = text.qk_rope_head_dim
    i = np.arange(dim // 2)
    base = text.compress_rope_theta if compressed else text.rope_theta
    # float64 before the rounding: a float32 power differs from one CPU to the next.
    plain: npt.NDArray[np.float32] = np.reciprocal((base ** (2 * i / dim)).astype(np.float32))
    scaling = text.rope_scaling if compressed else None
    if scaling is None:
        return plain

    def correction_dim(rotations: float) -> float:
        original = scaling.original_max_position_embeddings
        return dim * math.log(original / (2 * math.pi * rotations)) / (2 * math.log(base))

    low = max(math.floor(correction_dim(scaling.beta_fast)), 0)
    high = min(math.ceil(correction_dim(scaling.beta_slow)), dim - 1)
    ramp = np.clip((i - low) / max(high - low, 0.001), 0, 1).astype(np.float32)
    return plain / np.float32(scaling.factor) * ramp + plain * (1 - ramp)


def rotation(text: TextConfig, positions: jax.Array, compressed: bool) -> Rotation:
    """Rotation of integer positions [...], angles as fp32 position × fp32 frequency (T33)."""
    return rowwise(_turned, lead=positions.ndim)(positions, frequencies=frequencies(text, compressed))


def _turned(positions: jax.Array, *, frequencies: npt.NDArray[np.float32]) -> Rotation:
    angles = positions.astype(jnp.float32)[..., None] * frequencies
    return Rotation(jnp.cos(angles), jnp.sin(angles))


def rotate(x: jax.Array, rope: Rotation) -> jax.Array:
    """Rotates adjacent pairs of the last channels of x (T11), fp32 inside, rounded to its dtype.

    x: [..., dim], rope: [..., rope_dim / 2] with leading axes that broadcast against those of x.
    """
    width = 2 * rope.cos.shape[-1]
    still, turned = x[..., :-width], x[..., -width:].astype(jnp.float32)
    even, odd = turned[..., 0::2], turned[..., 1::2]
    pairs = jnp.stack([even * rope.cos - odd * rope.sin, even * rope.sin + odd * rope.cos], axis=-1)
    return jnp.concatenate([still, round_to(pairs.reshape(turned.shape), x.dtype)], axis=-1)
