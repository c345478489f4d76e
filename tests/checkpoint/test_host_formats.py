"""checkpoint/host_formats.py against the definitions of model.md §2.2, element by element."""

import ml_dtypes
import numpy as np
import pytest

from deepinfer_jax.checkpoint.host_formats import decode, encode
from deepinfer_jax.weights.layout import Format, ParamSpec

pytestmark = pytest.mark.pure

MAGNITUDES = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def abstract_tree(kind: Format, rows: int, columns: int) -> ParamSpec:
    return ParamSpec(("w.weight",), (rows, columns), kind, (None, None))


def element(spec: ParamSpec, weight: np.ndarray, scale: np.ndarray, n: int, k: int) -> float:
    """One element, by the formula, in float64."""
    exponent = int(scale.view(np.uint8)[n // 32 if spec.format == "FP8" else n, k // 32]) - 127
    if spec.format != "FP4":
        return float(weight[n, k].astype(np.float64)) * 2.0**exponent
    byte = int(weight.view(np.uint8)[n, k // 2])
    nibble = byte >> 4 if k % 2 else byte & 15
    return (-1 if nibble & 8 else 1) * MAGNITUDES[nibble & 7] * 2.0**exponent


# 300 rows cross a band of 256; 70 x 40 leaves both the last row block and the last column block incomplete.
@pytest.mark.parametrize(
    ("kind", "rows", "columns"), [("FP8", 300, 64), ("FP8", 70, 40), ("FP4", 300, 64), ("FP8_ROWS", 300, 64)]
)
def test_decoding_is_the_formula_at_every_code_and_scale(kind: Format, rows: int, columns: int) -> None:
    spec = abstract_tree(kind, rows, columns)
    assert spec.scale_shape is not None
    rng = np.random.default_rng(0)
    codes = rng.permutation(np.resize(np.arange(256, dtype=np.uint8), int(np.prod(spec.stored_shape))))
    codes[(codes & 0x7F == 0x7F) & (kind != "FP4")] = 0  # e4m3 NaN
    weight = codes.view(np.int8 if kind == "FP4" else ml_dtypes.float8_e4m3fn).reshape(spec.stored_shape)
    # 0 … 245: with byte 0 NumPy must keep the subnormals; above 245 e4m3's 448 overflows float32.
    scale = rng.integers(0, 246, spec.scale_shape, np.uint8).view(ml_dtypes.float8_e8m0fnu)
    scale[0, 0] = np.uint8(0).view(ml_dtypes.float8_e8m0fnu)
    expected = np.array([[element(spec, weight, scale, n, k) for k in range(columns)] for n in range(rows)])
    decoded = decode(spec, weight, scale)
    assert decoded.dtype == np.float32
    np.testing.assert_array_equal(decoded, expected.astype(np.float32))


@pytest.mark.parametrize("kind", ["FP8", "FP4", "FP8_ROWS"])
def test_encoding_is_exact_on_its_own_values_and_uses_the_smallest_scale(kind: Format) -> None:
    spec = abstract_tree(kind, 300, 64)
    values = np.random.default_rng(1).standard_normal(spec.shape, np.float32)
    values[0] *= 2.0**-100
    values[32:64] = 0
    weight, scale = encode(spec, values)
    assert scale is not None
    assert (weight.shape, scale.shape) == (spec.stored_shape, spec.scale_shape)
    once = decode(spec, weight, scale)
    # half a grid step: 1/16 of e4m3's binade; 1 of e2m1's largest value 6, so 1/3 of a value that was rounded to it
    tolerance = {"FP8": 1 / 16, "FP8_ROWS": 1 / 16, "FP4": 1 / 3}[kind]
    group = np.abs(values).reshape(300, 2, 32).max(-1, keepdims=True)
    if kind == "FP8":
        group = np.repeat(np.maximum.reduceat(group, np.arange(0, 300, 32), axis=0), 32, axis=0)[:300]
    assert (np.abs(once - values).reshape(300, 2, 32) <= tolerance * group).all()
    limit = 6 if kind == "FP4" else 448
    fits = np.abs(values).reshape(300, 2, 32) <= limit * (once_scale(spec, scale))
    assert fits.all()
    largest = group > limit / 2 * once_scale(spec, scale)
    assert largest[group > 0].all()  # a scale half as large would clip
    assert (scale.view(np.uint8)[1] == 0).all() if kind == "FP8" else (scale.view(np.uint8)[32:64] == 0).all()
    np.testing.assert_array_equal(decode(spec, *encode(spec, once)), once)


def once_scale(spec: ParamSpec, scale: np.ndarray) -> np.ndarray:
    """Scales as float64 [rows, groups, 1]."""
    values = np.exp2(scale.view(np.uint8).astype(np.float64) - 127)
    if spec.format == "FP8":
        values = np.repeat(values, 32, axis=0)[: spec.shape[0]]
    return values[..., None]


def test_unquantised_tensors_are_only_cast() -> None:
    values = np.random.default_rng(2).standard_normal((3, 5)).astype(np.float32)
    bf16, scale = encode(abstract_tree("BF16", 3, 5), values)
    assert scale is None
    np.testing.assert_array_equal(bf16, values.astype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(decode(abstract_tree("BF16", 3, 5), bf16, None), bf16.astype(np.float32))
    np.testing.assert_array_equal(encode(abstract_tree("F32", 3, 5), values)[0], values)
