"""Rounding to a narrower dtype that XLA does not optimise away."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike


def round_to(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """bf16(x) of model.md for `dtype` bfloat16; the identity for float32.

    XLA may drop a float32 -> bfloat16 -> float32 pair of conversions when it fuses their neighbours
    (`xla_allow_excess_precision`, on by default); it never drops `reduce_precision`.
    """
    if jnp.dtype(dtype) == jnp.bfloat16 and x.dtype == jnp.float32:
        x = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return x.astype(dtype)
