"""A quantised linear in plain XLA: the definition, and the path of every backend (model.md §2.2, §2.3)."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from deepinfer_jax.kernels.dot import matmul
from deepinfer_jax.kernels.formats import decode_e4m3, decode_e8m0, fake_quant_fp8, unpack_e2m1
from deepinfer_jax.kernels.rounding import round_to
from deepinfer_jax.kernels.weights import Fp4Weight, Fp8Rows, Fp8Weight, Weight

Array = jax.Array
_BLOCK = 32


def dequantize(weight: Weight | Fp8Rows, dtype: DTypeLike) -> Array:
    """The matrix that a weight stands for, `[..., out, in]`; a plain array comes back as it is.

    Every FP8 and FP4 value times its power of two is exact in bfloat16 (the lemma of model.md §2.3).
    """
    if isinstance(weight, Fp8Weight):
        out, inputs = weight.codes.shape[-2:]
        scales = decode_e8m0(weight.scales)
        scales = jnp.repeat(jnp.repeat(scales, _BLOCK, axis=-2)[..., :out, :], _BLOCK, axis=-1)[..., :inputs]
        return (decode_e4m3(weight.codes) * scales).astype(dtype)
    if isinstance(weight, Fp4Weight):
        return (unpack_e2m1(weight.codes) * jnp.repeat(decode_e8m0(weight.scales), _BLOCK, axis=-1)).astype(dtype)
    if isinstance(weight, Fp8Rows):
        return (decode_e4m3(weight.codes) * jnp.repeat(decode_e8m0(weight.scales), _BLOCK, axis=-1)).astype(dtype)
    return weight


def linear(x: Array, weight: Weight, *, quantize_input: bool = False) -> Array:
    """bf16( Σ_k q(x)[k]·w[n, k] ) with fp32 accumulation; float32 inputs give float32 outputs unrounded.

    Args:
        x: `[..., in]`, bfloat16 or float32.
        weight: `[out, in]`.
        quantize_input: apply the dynamic FP8 activation quantiser first (groups of 32).

    Returns:
        `[..., out]` in the dtype of `x`.
    """
    if quantize_input:
        x = fake_quant_fp8(x)
    return round_to(product(x, weight), x.dtype)


def product(x: Array, weight: Weight) -> Array:
    """x Wᵀ in float32, activations as they are. x: [..., in], weight: [out, in] -> float32 [..., out].

    A stored weight is decoded to the type that the product wants: bfloat16 for matrix units, float32 on a CPU, which
    would only widen it again (`dot`). Both are exact.
    """
    if isinstance(weight, jax.Array) or x.dtype == jnp.float32:
        return matmul(x, dequantize(weight, x.dtype))

    def narrow(x: Array, weight: Weight) -> Array:
        return matmul(x, dequantize(weight, x.dtype))

    def wide(x: Array, weight: Weight) -> Array:
        return matmul(x.astype(jnp.float32), dequantize(weight, jnp.float32))

    result: Array = lax.platform_dependent(x, weight, cpu=wide, default=narrow)
    return result
