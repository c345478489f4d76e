"""Decodes stored tensors to float32 and encodes them, in NumPy, on the host (model.md §2.2).

NumPy keeps subnormals, so every scale byte is exact here, 2^-127 included. Work goes by bands of rows: the
temporaries stay small beside the tensor.
"""

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from deepinfer_jax.weights.layout import ParamSpec

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]

_BLOCK = 32
_BAND = 8 * _BLOCK  # rows decoded or encoded at a time

_BYTES = np.arange(256, dtype=np.uint8)
_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1 = np.concatenate([_MAGNITUDES, -_MAGNITUDES])
_E4M3_VALUES = _BYTES.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_E8M0_VALUES = np.append(np.exp2(np.arange(-127, 128, dtype=np.float64)), np.nan).astype(np.float32)
_E2M1_PAIRS = np.stack([_E2M1[_BYTES & 15], _E2M1[_BYTES >> 4]], axis=-1)  # the even element in the low nibble


def decode(spec: ParamSpec, weight: Array, scale: Array | None) -> Floats:
    """Exact values of one stored tensor of `spec`: float32 `spec.shape`.

    Args:
        weight: `spec.stored_shape`, NumPy type of `spec.dtype`.
        scale: `spec.scale_shape` in e8m0; None for an unquantised format.
    """
    if scale is None:
        return weight.astype(np.float32)
    out = np.empty(spec.shape, np.float32)
    for rows, scale_rows in _bands(spec):
        codes = weight[rows].view(np.uint8)
        values = _E2M1_PAIRS[codes].reshape(len(codes), -1) if spec.format == "FP4" else _E4M3_VALUES[codes]
        np.multiply(values, _expand(spec, _E8M0_VALUES[scale[scale_rows].view(np.uint8)], values.shape), out[rows])
    return out


def encode(spec: ParamSpec, values: Floats) -> tuple[Array, Array | None]:
    """Nearest stored tensor to `values`: (weight `spec.stored_shape`, scale `spec.scale_shape` or None).

    Scales are the smallest powers of two that keep every element in range; a group of zeros has scale byte 0.
    """
    if spec.scale_shape is None:
        return values.astype(ml_dtypes.bfloat16 if spec.format == "BF16" else np.float32), None
    weight = np.empty(spec.stored_shape, np.int8 if spec.format == "FP4" else ml_dtypes.float8_e4m3fn)
    scale = np.empty(spec.scale_shape, np.uint8)
    largest = 6.0 if spec.format == "FP4" else 448.0
    for rows, scale_rows in _bands(spec):
        band = values[rows]
        exponents = _ceil_log2(_group_amax(spec, band) / np.float32(largest))
        scale[scale_rows] = np.clip(exponents + 127, 0, 254)
        scaled = band / _expand(spec, _E8M0_VALUES[scale[scale_rows]], band.shape)
        if spec.format == "FP4":
            codes = scaled.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
            weight[rows] = (codes[:, 0::2] | (codes[:, 1::2] << 4)).view(np.int8)
        else:
            weight[rows] = scaled.astype(ml_dtypes.float8_e4m3fn)
    return weight, scale.view(ml_dtypes.float8_e8m0fnu)


def _bands(spec: ParamSpec) -> Iterator[tuple[slice, slice]]:
    """Bands of rows of a matrix, with the rows of their scales."""
    for begin in range(0, spec.shape[0], _BAND):
        rows = slice(begin, min(begin + _BAND, spec.shape[0]))
        yield rows, slice(begin // _BLOCK, -(-rows.stop // _BLOCK)) if spec.format == "FP8" else rows


def _expand(spec: ParamSpec, scales: Floats, shape: tuple[int, ...]) -> Floats:
    """Scales of a band, repeated over the elements that share them."""
    if spec.format == "FP8":
        scales = np.repeat(scales, _BLOCK, axis=0)[: shape[0]]
    return np.repeat(scales, _BLOCK, axis=1)[:, : shape[1]]


def _group_amax(spec: ParamSpec, band: Floats) -> Floats:
    """Largest magnitude of every group of a band that shares a scale."""
    magnitude = np.abs(band)
    columns = np.maximum.reduceat(magnitude, np.arange(0, band.shape[1], _BLOCK), axis=1)
    if spec.format != "FP8":
        return columns
    return np.maximum.reduceat(columns, np.arange(0, band.shape[0], _BLOCK), axis=0)


def _ceil_log2(x: Floats) -> npt.NDArray[np.int32]:
    """Exact ceil(log2(x)) for x > 0; below -127 for zero."""
    mantissa, exponent = np.frexp(x)
    return np.where(x > 0, np.where(mantissa == 0.5, exponent - 1, exponent), -128).astype(np.int32)
