"""RMSNorm (model.md §5)."""

import jax
import jax.numpy as jnp
from jax import lax

from deepinfer_jax.kernels.rounding import round_to


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """weight · x·rsqrt(mean(x²) + eps), fp32 inside, rounded once at the end (T34).

    x: [..., dim] -> [..., dim] in its dtype; weight: [dim]. eps may be 1e-20: it never leaves float32.
    """
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return round_to(weight.astype(jnp.float32) * (wide * scale), x.dtype)
