"""Low-precision number formats and the quantisers of the caches and activations (model.md §2.2-2.4).

Formats
    e4m3   8 bits, largest value 448, no infinity (`float8_e4m3fn`)
    e8m0   8 bits b, value 2^(b - 127); 255 is NaN
    e2m1   4 bits, sign and magnitudes 0 0.5 1 1.5 2 3 4 6; two per byte, the even element in the low nibble

All arithmetic is float32, with the same bits eagerly and under jit, on every backend. Two habits of XLA
would break that, so they are avoided here:

* under jit `x / s` with a broadcast (or constant) divisor becomes `x * (1 / s)`, which loses ties (T8): see
  `_divide`;
* on CPU, float32 subnormals count as zero. Inputs below 2^-126 are therefore quantised as zero.

NaN and infinity are never quantised away: a group that holds one is not finite after its fake quantiser.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

FP8_GROUP = 32
"""Channels that share one e8m0 scale in an e4m3 activation or window row."""
FP4_KV_GROUP = 16
"""Channels that share one e4m3 scale in a compressed-KV entry."""
FP4_INDEX_GROUP = 32
"""Channels that share one e8m0 scale in an index query or index key."""

_E4M3_MAX = np.float32(448.0)
_E2M1_MAX = np.float32(6.0)
_EXPONENT = np.uint32(0x7F800000)
_MANTISSA = np.uint32(0x007FFFFF)

# Reciprocals are rounded to float32 before the product, as in model.md §2.3.
_INVERSE_448 = np.float32(1 / 448)
_INVERSE_6 = np.float32(1 / 6)

# Floors on the largest magnitude of a group (T9: on the magnitude, not on the scale).
_FP8_FLOOR = np.float32(1e-4)
_FP4_KV_FLOOR = np.float32(6 * 2.0**-9)
_FP4_INDEX_FLOOR = np.float32(6 * 2.0**-126)


def _bits(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.uint32)


def _float(bits: Array) -> Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def ceil_pow2(x: Array) -> Array:
    """Smallest power of two that is not below `x`, read off the bits (T10: a float log2 is off by one).

    x: float32, >= 0. Positive subnormals give 2^-126, zero gives zero, NaN and values above 2^127 infinity.
    """
    rounded_up = jnp.minimum(_bits(x) + _MANTISSA, _EXPONENT)  # the minimum sends NaN to infinity
    return _float(rounded_up & _EXPONENT)


def decode_e4m3(codes: Array) -> Array:
    """e4m3 codes, uint8 or float8_e4m3fn -> float32 values, same shape."""
    return lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)


def encode_e4m3(x: Array) -> Array:
    """float values -> uint8 e4m3 codes, same shape: ties to even, magnitudes above 448 become 448."""
    clamped = jnp.clip(x.astype(jnp.float32), -_E4M3_MAX, _E4M3_MAX)  # the bare cast overflows to NaN
    return lax.bitcast_convert_type(clamped.astype(jnp.float8_e4m3fn), jnp.uint8)


def decode_e8m0(codes: Array) -> Array:
    """uint8 e8m0 codes b -> float32 2^(b - 127), same shape; 255 -> NaN.

    Code 0 gives the subnormal 2^-127, which XLA's CPU arithmetic reads as zero.
    """
    bits = codes.astype(jnp.uint32) << 23
    bits = jnp.where(codes == 0, np.uint32(1 << 22), bits)
    return _float(jnp.where(codes == 255, np.uint32(0x7FC00000), bits))


def encode_e8m0(powers: Array) -> Array:
    """float32 powers of two from 2^-127 to 2^127 -> uint8 e8m0 codes, same shape; infinity -> 255 (NaN)."""
    return (_bits(powers) >> 23).astype(jnp.uint8)


def unpack_e2m1(codes: Array, dtype: DTypeLike = jnp.float32) -> Array:
    """uint8 [..., K/2] -> values [..., K] of `dtype`."""
    nibbles = jnp.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1).astype(jnp.int32)
    # Nibble i of the constant is twice the magnitude of code i: C 8 6 4 3 2 1 0.
    doubled = (jnp.int32(0xC8643210 - 2**32) >> ((nibbles & 7) * 4)) & 15
    signed = jnp.where(nibbles < 8, doubled, -doubled)
    return (signed.astype(jnp.float32) * np.float32(0.5)).astype(dtype)


def pack_e2m1(x: Array) -> Array:
    """float values [..., K], K even -> uint8 codes [..., K/2]: nearest, ties to even, clamped to +-6."""
    if x.shape[-1] % 2:
        raise ValueError(f"e2m1 packs two values per byte: the last axis of {x.shape} is odd")
    values = _round_e2m1(x.astype(jnp.float32))
    magnitude = jnp.abs(values)
    # From 1 upwards the code is the last exponent bit pair and the first mantissa bit, counted from 1.0 = 2.
    upper = (_bits(magnitude) >> 22).astype(jnp.int32) - ((127 << 1) - 2)
    code = jnp.where(magnitude < 1, (magnitude * 2).astype(jnp.int32), upper)
    nibbles = (code | ((_bits(values) >> 28) & 8).astype(jnp.int32)).astype(jnp.uint8)
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


def _round_to_grid(v: Array, mantissa_bits: int, min_exponent: int) -> Array:
    """Round float32 to a float grid, ties to even; one addition and one subtraction do it.

    In the binade 2^e the grid step is 2^(e - mantissa_bits), which is the last bit of 1.5 * 2^(e + 23 -
    mantissa_bits): adding that constant rounds, subtracting it restores. Below 2^min_exponent the step stays.
    """
    binade = _float(jnp.maximum(_bits(v) & _EXPONENT, np.uint32((min_exponent + 127) << 23)))
    magic = binade * np.float32(1.5 * 2.0 ** (23 - mantissa_bits))
    return (v + magic) - magic


def _round_e4m3(v: Array) -> Array:
    return _round_to_grid(jnp.clip(v, -_E4M3_MAX, _E4M3_MAX), mantissa_bits=3, min_exponent=-6)


def _round_e2m1(v: Array) -> Array:
    return _round_to_grid(jnp.clip(v, -_E2M1_MAX, _E2M1_MAX), mantissa_bits=1, min_exponent=0)


def _divide(x: Array, divisor: Array) -> Array:
    """Correctly rounded float32 x / divisor for divisors of at most four significant bits (6, any e4m3).

    XLA rewrites `x / divisor` to a product with the reciprocal when the divisor is broadcast, and its GPU
    division is not IEEE; either loses exact ties (T8). Here the leading 20 bits q of the quotient are taken
    first: q * divisor and the remainder are exact then, so one correction gives the rounded quotient.
    """
    inverse = 1 / divisor
    q = _float(_bits(x * inverse) & np.uint32(0xFFFFFFF0))
    return q + (x - q * divisor) * inverse


def _reciprocal_pow2(s: Array) -> Array:
    """Exact 1 / s for powers of two from 2^-126 to 2^126."""
    return _float(np.uint32(254 << 23) - _bits(s))


def _groups(x: Array, size: int) -> Array:
    """[..., D] -> float32 [..., D/size, size]."""
    if x.shape[-1] % size:
        raise ValueError(f"the last axis of {x.shape} is quantised in groups of {size}, not a multiple of it")
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size).astype(jnp.float32)


def _quantise_fp8(groups: Array) -> tuple[Array, Array]:
    """float32 [..., G, 32] -> (values / scale [..., G, 32], not yet rounded; scale [..., G, 1])."""
    amax = jnp.maximum(jnp.max(jnp.abs(groups), axis=-1, keepdims=True), _FP8_FLOOR)
    scale = ceil_pow2(amax * _INVERSE_448)
    return groups * _reciprocal_pow2(scale), scale


def _quantise_fp4_kv(groups: Array) -> tuple[Array, Array]:
    """float32 [..., G, 16] -> (values / scale [..., G, 16], not yet rounded; e4m3 scale [..., G, 1])."""
    amax = jnp.maximum(jnp.max(jnp.abs(groups), axis=-1, keepdims=True), _FP4_KV_FLOOR)
    scale = _round_e4m3(_divide(amax, jnp.float32(6)))
    return _divide(groups, scale), scale


def _quantise_fp4_index(groups: Array) -> tuple[Array, Array]:
    """float32 [..., G, 32] -> (values / scale [..., G, 32], not yet rounded; scale [..., G, 1])."""
    amax = jnp.maximum(jnp.max(jnp.abs(groups), axis=-1, keepdims=True), _FP4_INDEX_FLOOR)
    scale = ceil_pow2(amax * _INVERSE_6)
    return groups * _reciprocal_pow2(scale), scale


def _straight_through(quantiser: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Give a fake quantiser the derivative of the identity."""
    wrapped = jax.custom_jvp(quantiser)
    wrapped.defjvp(lambda primals, tangents: (quantiser(*primals), tangents[0]))
    return wrapped


@_straight_through
def fake_quant_fp8(x: Array) -> Array:
    """Round to e4m3 with one e8m0 scale per 32 channels: activations and window KV (model.md §2.3, §2.4).

    x: float [..., D], D a multiple of 32 (else ValueError) -> same shape, dtype. Straight-through gradient.
    """
    v, scale = _quantise_fp8(_groups(x, FP8_GROUP))
    return (_round_e4m3(v) * scale).astype(x.dtype).reshape(x.shape)


@_straight_through
def fake_quant_fp4_kv(x: Array) -> Array:
    """Round to e2m1 with one e4m3 scale per 16 channels: compressed KV (model.md §2.4, T7, T8).

    x: float [..., D], D a multiple of 16 (else ValueError) -> same shape, dtype. Straight-through gradient.
    """
    v, scale = _quantise_fp4_kv(_groups(x, FP4_KV_GROUP))
    return (_round_e2m1(v) * scale).astype(x.dtype).reshape(x.shape)


@_straight_through
def fake_quant_fp4_index(x: Array) -> Array:
    """Round to e2m1 with one e8m0 scale per 32 channels: index queries and keys (model.md §2.4).

    x: float [..., D], D a multiple of 32 (else ValueError) -> same shape, dtype. Straight-through gradient.
    """
    v, scale = _quantise_fp4_index(_groups(x, FP4_INDEX_GROUP))
    return (_round_e2m1(v) * scale).astype(x.dtype).reshape(x.shape)


def pack_fp8(x: Array) -> tuple[Array, Array]:
    """Window rows [..., D] -> (e4m3 codes uint8 [..., D], e8m0 scales uint8 [..., D/32])."""
    v, scale = _quantise_fp8(_groups(x, FP8_GROUP))
    return encode_e4m3(v).reshape(x.shape), encode_e8m0(scale[..., 0])


def unpack_fp8(codes: Array, scales: Array, dtype: DTypeLike = jnp.float32) -> Array:
    """Inverse of `pack_fp8`: [..., D] of `dtype`, exactly `fake_quant_fp8` of what was packed."""
    values = _groups(decode_e4m3(codes), FP8_GROUP) * decode_e8m0(scales)[..., None]
    return values.astype(dtype).reshape(codes.shape)


def pack_fp4_kv(x: Array) -> tuple[Array, Array]:
    """Compressed-KV entries [..., D] -> (e2m1 codes uint8 [..., D/2], e4m3 scales uint8 [..., D/16])."""
    v, scale = _quantise_fp4_kv(_groups(x, FP4_KV_GROUP))
    return pack_e2m1(v.reshape(x.shape)), encode_e4m3(scale[..., 0])


def unpack_fp4_kv(codes: Array, scales: Array, dtype: DTypeLike = jnp.float32) -> Array:
    """Inverse of `pack_fp4_kv`: [..., D] of `dtype`, exactly `fake_quant_fp4_kv` of what was packed."""
    values = unpack_e2m1(codes)
    scaled = _groups(values, FP4_KV_GROUP) * decode_e4m3(scales)[..., None]
    return scaled.astype(dtype).reshape(values.shape)


def pack_fp4_index(x: Array) -> tuple[Array, Array]:
    """Index keys [..., D] -> (e2m1 codes uint8 [..., D/2], e8m0 scales uint8 [..., D/32])."""
    v, scale = _quantise_fp4_index(_groups(x, FP4_INDEX_GROUP))
    return pack_e2m1(v.reshape(x.shape)), encode_e8m0(scale[..., 0])


def unpack_fp4_index(codes: Array, scales: Array, dtype: DTypeLike = jnp.float32) -> Array:
    """Inverse of `pack_fp4_index`: [..., D] of `dtype`, exactly `fake_quant_fp4_index` of what was packed."""
    values = unpack_e2m1(codes)
    scaled = _groups(values, FP4_INDEX_GROUP) * decode_e8m0(scales)[..., None]
    return scaled.astype(dtype).reshape(values.shape)
