"""Matrix products of plain arrays with fp32 accumulation on every backend."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from deepinfer_jax.kernels.rowwise import is_batch_invariant, rowwise

Array = jax.Array


def contract(axes: str, a: Array, b: Array) -> Array:
    """`jnp.einsum` of two float32 or bfloat16 operands, accumulated and returned in float32, e.g. "bqd,bkd->bqk".

    A float32 operand makes it a true fp32 product (TF32 and bf16 passes must not sneak in on GPU and TPU). Two
    bfloat16 operands use the matrix units; the CPU, whose bf16 dots are slow or missing (jax.md §0.6, §1.3),
    widens them first, which changes nothing: products of bf16 are exact in fp32.
    """
    if a.dtype == jnp.float32 or b.dtype == jnp.float32:
        return _wide(axes, a, b)

    def narrow(a: Array, b: Array) -> Array:
        return jnp.einsum(axes, a, b, preferred_element_type=jnp.float32)

    result: Any = lax.platform_dependent(a, b, cpu=functools.partial(_wide, axes), default=narrow)
    return result


def _wide(axes: str, a: Array, b: Array) -> Array:
    return jnp.einsum(
        axes,
        a.astype(jnp.float32),
        b.astype(jnp.float32),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def matmul(x: Array, weight: Array) -> Array:
    """x Wᵀ, row by row. x [..., in], weight [out, in] -> float32 [..., out]."""
    if weight.shape[0] == 1 and is_batch_invariant():
        # XLA:CPU has two ways to multiply a matrix by a vector, one of them for short loops only.
        return matmul(x, jnp.repeat(weight, 2, axis=0))[..., :1]
    return rowwise(_product, lead=x.ndim - 1)(x, weight=weight)


def _product(x: Array, *, weight: Array) -> Array:
    return contract("...i,oi->...o", x, weight)


def batched_matmul(x: Array, weight: Array) -> Array:
    """One product per leading index. x [groups, rows, in], weight [groups, out, in] -> float32 [groups, rows, out]."""
    return contract("gri,goi->gro", x, weight)
