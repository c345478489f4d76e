"""kernels/formats.py against tables, ml_dtypes and exact rational arithmetic."""

from collections.abc import Callable
from fractions import Fraction

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from deepinfer_jax.kernels import formats
from tests.support.marks import slow

pytestmark = pytest.mark.toy

BYTES = np.arange(256, dtype=np.uint8)
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
NIBBLES = np.concatenate([MAGNITUDES, -MAGNITUDES])

# Every non-negative finite bfloat16, as float32: 32,640 values, 127 of them subnormal.
BF16 = (np.arange(0x7F80, dtype=np.uint32) << 16).view(np.float32)
SUBNORMAL = (BF16 > 0) & (BF16 < 2.0**-126)

FAKE_QUANTISERS = {
    "fp8": (formats.fake_quant_fp8, formats.pack_fp8, formats.unpack_fp8, 32),
    "fp4_kv": (formats.fake_quant_fp4_kv, formats.pack_fp4_kv, formats.unpack_fp4_kv, 16),
    "fp4_index": (formats.fake_quant_fp4_index, formats.pack_fp4_index, formats.unpack_fp4_index, 32),
}
each_quantiser = pytest.mark.parametrize("name", FAKE_QUANTISERS)


def e4m3_value(code: int) -> float:
    """Independent definition of e4m3fn: sign, 4 exponent bits of bias 7, 3 mantissa bits, one NaN."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


def exact_ceil_pow2(x: Fraction) -> Fraction:
    power = Fraction(1)
    while power < x:
        power *= 2
    while power / 2 >= x:
        power /= 2
    return power


def numpy_round_e4m3(x: np.ndarray) -> np.ndarray:
    return np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)


def numpy_round_e2m1(x: np.ndarray) -> np.ndarray:
    """The rule of model.md §2.4: round half even with step 0.5 below 2, 1 below 4, 2 above."""
    x = np.clip(x, -6, 6)
    step = np.select([np.abs(x) < 2, np.abs(x) < 4], [np.float32(0.5), np.float32(1)], np.float32(2))
    return np.rint(x / step) * step


def numpy_ceil_pow2(x: np.ndarray) -> np.ndarray:
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.float32(1), np.where(mantissa == 0.5, exponent - 1, exponent)).astype(np.float32)


def numpy_fake_quant(name: str, x: np.ndarray) -> np.ndarray:
    """The table of model.md §2.4 in IEEE float32 (NumPy divides exactly rounded), result in float32."""
    with np.errstate(over="ignore"):  # rounding the largest float32 values up overflows, in both
        return _numpy_fake_quant(name, x)


def _numpy_fake_quant(name: str, x: np.ndarray) -> np.ndarray:
    groups = x.astype(np.float32).reshape(-1, FAKE_QUANTISERS[name][3])
    amax = np.abs(groups).max(-1, keepdims=True)
    if name == "fp8":
        scale = numpy_ceil_pow2(np.maximum(amax, np.float32(1e-4)) * np.float32(1 / 448))
        return (numpy_round_e4m3(groups / scale) * scale).reshape(x.shape)
    if name == "fp4_kv":
        scale = numpy_round_e4m3(np.maximum(amax, np.float32(6 * 2.0**-9)) / np.float32(6))
    else:
        scale = numpy_ceil_pow2(np.maximum(amax, np.float32(6 * 2.0**-126)) * np.float32(1 / 6))
    return (numpy_round_e2m1(groups / scale) * scale).reshape(x.shape)


def quantiser_inputs(group: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    wide = rng.standard_normal((512, group)) * np.exp2(rng.integers(-30, 30, (512, 1)))
    outliers = rng.standard_normal((512, group))
    outliers[:, 3] *= 1e4
    return {"wide": wide.astype(np.float32), "outliers": outliers.astype(np.float32)}


def test_e4m3_codes_decode_to_the_table_and_encode_back() -> None:
    table = np.array([e4m3_value(c) for c in range(256)], np.float32)
    decoded = np.asarray(jax.jit(formats.decode_e4m3)(BYTES))
    np.testing.assert_array_equal(decoded, table)
    np.testing.assert_array_equal(decoded, BYTES.view(ml_dtypes.float8_e4m3fn).astype(np.float32))
    np.testing.assert_array_equal(jax.jit(formats.encode_e4m3)(table)[~np.isnan(table)], BYTES[~np.isnan(table)])


def test_e4m3_encodes_ties_to_even_and_clamps_overflow() -> None:
    finite = np.array([e4m3_value(c) for c in range(0x7F)], np.float32)
    ties = (finite[:-1] + finite[1:]) / 2
    even = np.arange(0x7E) + np.arange(0x7E) % 2
    for sign, bit in ((1, 0), (-1, 0x80)):
        np.testing.assert_array_equal(formats.encode_e4m3(sign * ties), even | bit)
    overflow = np.array([448.1, 464.0, 465.0, 1e30, np.inf], np.float32)
    np.testing.assert_array_equal(formats.encode_e4m3(overflow), 0x7E)
    np.testing.assert_array_equal(formats.encode_e4m3(-overflow), 0xFE)


def test_e8m0_codes_are_powers_of_two_down_to_the_subnormal_one() -> None:
    decoded = np.asarray(jax.jit(formats.decode_e8m0)(BYTES))
    table = np.array([2.0 ** (b - 127) for b in range(255)] + [np.nan], np.float32)
    np.testing.assert_array_equal(decoded.view(np.uint32), table.view(np.uint32))
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(decoded, BYTES.view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
    np.testing.assert_array_equal(jax.jit(formats.encode_e8m0)(table[:255]), BYTES[:255])


def test_e2m1_bytes_hold_the_even_element_in_the_low_nibble() -> None:
    expected = np.stack([NIBBLES[BYTES & 15], NIBBLES[BYTES >> 4]], -1).reshape(-1)
    unpacked = jax.jit(formats.unpack_e2m1)(BYTES)
    np.testing.assert_array_equal(unpacked, expected)
    by_ml_dtypes = np.stack([BYTES & 15, BYTES >> 4], -1).reshape(-1).view(ml_dtypes.float4_e2m1fn)
    np.testing.assert_array_equal(unpacked, by_ml_dtypes.astype(np.float32))
    np.testing.assert_array_equal(formats.unpack_e2m1(jnp.asarray(BYTES), jnp.bfloat16), expected)
    zero_signs = np.where(unpacked == 0, 0, unpacked)  # -0 packs as it may
    np.testing.assert_array_equal(formats.unpack_e2m1(formats.pack_e2m1(unpacked)), zero_signs)


def test_e2m1_ties_go_to_the_even_code() -> None:
    v = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0], np.float32)
    expected = np.array([0, 1, 1, 2, 2, 4, 4, 6], np.float32)  # model.md Appendix B
    np.testing.assert_array_equal(formats.unpack_e2m1(formats.pack_e2m1(v)), expected)
    np.testing.assert_array_equal(formats.unpack_e2m1(formats.pack_e2m1(-v)), -expected)
    nearby = np.concatenate([np.nextafter(v, np.float32(0)), np.nextafter(v, np.float32(9))])
    np.testing.assert_array_equal(formats.unpack_e2m1(formats.pack_e2m1(nearby)), numpy_round_e2m1(nearby))


def test_e2m1_refuses_an_odd_axis() -> None:
    with pytest.raises(ValueError, match="odd"):
        formats.pack_e2m1(jnp.zeros((2, 3)))


def test_ceil_pow2_is_exact_next_to_every_power_of_two() -> None:
    powers = np.exp2(np.arange(-126, 128)).astype(np.float32)
    inside = np.concatenate([powers, np.nextafter(powers, np.float32(np.inf))[:-1]])
    expected = np.concatenate([powers, powers[1:]])
    np.testing.assert_array_equal(jax.jit(formats.ceil_pow2)(inside), expected)
    below = np.nextafter(powers[1:], np.float32(0))
    np.testing.assert_array_equal(jax.jit(formats.ceil_pow2)(below), powers[1:])


def test_ceil_pow2_is_right_at_its_edges() -> None:
    edge = np.array([0.0, 1e-45, 1e-39, 3e38, np.inf, np.nan], np.float32)
    expected = np.array([0.0, 2.0**-126, 2.0**-126, np.inf, np.inf, np.inf], np.float32)
    np.testing.assert_array_equal(jax.jit(formats.ceil_pow2)(edge), expected)


@pytest.mark.parametrize(("amax", "scale"), [(448, 1), (896, 2), (1.0, 2.0**-8), (0, 2.0**-22)])
def test_fp8_scales_are_those_of_appendix_b(amax: float, scale: float) -> None:
    _, code = formats.pack_fp8(jnp.zeros(32).at[5].set(amax))
    assert 2.0 ** (int(code[0]) - 127) == scale


@pytest.mark.parametrize(("amax", "scale"), [(6, 1), (12, 2), (1.0, 0.25), (0, 2.0**-126)])
def test_index_scales_are_those_of_appendix_b(amax: float, scale: float) -> None:
    _, code = formats.pack_fp4_index(jnp.zeros(32).at[5].set(amax))
    assert 2.0 ** (int(code[0]) - 127) == scale


def rows_of_amax(amax: np.ndarray, group: int) -> np.ndarray:
    """One group per amax: the amax itself, and smaller values of both signs."""
    fractions = np.linspace(-1, 1, group, dtype=np.float32)
    return (amax[:, None] * fractions).astype(ml_dtypes.bfloat16).astype(np.float32)


@each_quantiser
def test_every_bf16_amax_gives_the_scale_and_values_of_ieee_arithmetic(name: str) -> None:
    fake, _, _, group = FAKE_QUANTISERS[name]
    x = rows_of_amax(BF16[~SUBNORMAL], group)
    x[np.abs(x) < 2.0**-126] = 0  # subnormals have their own test
    np.testing.assert_array_equal(jax.jit(fake)(x), numpy_fake_quant(name, x))


def test_fp8_scale_equals_exact_arithmetic_for_every_bf16_amax() -> None:
    _, codes = jax.jit(formats.pack_fp8)(np.repeat(BF16[:, None], 32, axis=1))
    floored = np.maximum(BF16, np.float32(1e-4))
    sample = np.concatenate([np.arange(0, len(BF16), 97), np.nonzero(np.diff(np.asarray(codes)[:, 0]))[0]])
    for i in sample:
        exact = exact_ceil_pow2(Fraction(float(floored[i])) / 448)
        assert Fraction(2) ** (int(codes[i, 0]) - 127) == exact, BF16[i]


@each_quantiser
def test_subnormals_and_zero_rows_quantise_to_zero(name: str) -> None:
    fake, _, _, group = FAKE_QUANTISERS[name]
    subnormal = np.repeat(BF16[SUBNORMAL | (BF16 == 0)][:, None], group, axis=1)
    np.testing.assert_array_equal(jax.jit(fake)(subnormal), 0)
    # ... and do not disturb their neighbours.
    mixed = subnormal.copy()
    mixed[:, 0] = 6.0  # on the grid of all three formats
    np.testing.assert_array_equal(jax.jit(fake)(mixed)[:, 0], 6.0)


def test_fp4_kv_divides_rather_than_multiplies_by_the_reciprocal() -> None:
    """Every exact tie x = tie * scale of bf16 x; the two rules differ at some of them (T8)."""
    scales = np.array([e4m3_value(c) for c in range(1, 0x7F)], np.float32)
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    s, tie = (a.ravel() for a in np.meshgrid(scales, ties, indexing="ij"))
    x = s * tie
    differs = numpy_round_e2m1(x / s) != numpy_round_e2m1(x * (np.float32(1) / s))
    assert differs.sum() == 42  # the count of T8
    group = np.zeros((len(x), 16), np.float32)
    group[:, 0] = 6 * s  # fixes the scale
    group[:, 1] = x
    group[:, 2] = -x
    expected = numpy_round_e2m1(x / s) * s
    for function in (formats.fake_quant_fp4_kv, jax.jit(formats.fake_quant_fp4_kv)):
        out = np.asarray(function(group))
        np.testing.assert_array_equal(out[:, 1], expected)
        np.testing.assert_array_equal(out[:, 2], -expected)
    one = jax.jit(formats.fake_quant_fp4_kv)(np.array([6 * 0.46875, 0.5859375] + [0] * 14, np.float32))
    assert float(one[1]) == 0.46875  # T8's own example: 1.0 * scale, not 1.5 * scale


def test_fp4_kv_division_is_ieee_for_every_scale() -> None:
    """Random float32 numerators over every e4m3 divisor, compared bit for bit with NumPy's division."""
    divisors = np.array([e4m3_value(c) for c in range(1, 0x7F)] + [6.0], np.float32)
    x = np.random.default_rng(1).standard_normal((2000, len(divisors))).astype(np.float32) * 1000
    np.testing.assert_array_equal(jax.jit(formats._divide)(x, divisors), x / divisors)


@each_quantiser
@pytest.mark.parametrize("dtype", [jnp.float32, slow(jnp.bfloat16)])
def test_fake_quantiser_equals_ieee_arithmetic_pack_and_unpack_eagerly_and_jitted(name: str, dtype: jnp.dtype) -> None:
    fake, pack, unpack, group = FAKE_QUANTISERS[name]
    round_trip = jax.jit(lambda v: unpack(*pack(v), dtype))
    for x in quantiser_inputs(group).values():
        cast = jnp.asarray(x).astype(dtype)
        expected = numpy_fake_quant(name, np.asarray(cast)).astype(dtype)
        assert fake(cast).dtype == dtype
        np.testing.assert_array_equal(fake(cast), expected)
        np.testing.assert_array_equal(_jitted(fake)(cast), expected)
        np.testing.assert_array_equal(unpack(*pack(cast), dtype), expected)
        np.testing.assert_array_equal(round_trip(cast), expected)


@each_quantiser
@settings(max_examples=25)
@given(data=st.data())
def test_packing_round_trips_and_quantising_twice_changes_nothing(name: str, data: st.DataObject) -> None:
    fake, pack, unpack, group = FAKE_QUANTISERS[name]
    finite = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)
    x = data.draw(arrays(np.float32, (2, 2 * group), elements=finite))
    once = np.asarray(_jitted(fake)(x))
    np.testing.assert_array_equal(once, numpy_fake_quant(name, x))
    np.testing.assert_array_equal(_jitted(unpack)(*_jitted(pack)(x)), once)


_JITTED: dict[Callable[..., object], Callable[..., object]] = {}


def _jitted(function: Callable[..., object]) -> Callable[..., object]:
    return _JITTED.setdefault(function, jax.jit(function))


@each_quantiser
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_value_stays_visible(name: str, bad: float) -> None:
    fake, pack, unpack, group = FAKE_QUANTISERS[name]
    x = np.full((2, group), 6, np.float32)
    x[0, 7] = bad
    for out in (jax.jit(fake)(x), jax.jit(lambda v: unpack(*pack(v)))(x)):
        assert not np.isfinite(out[0]).all()
        np.testing.assert_array_equal(out[1], 6.0)


@each_quantiser
def test_gradient_is_straight_through_and_the_value_is_not(name: str) -> None:
    fake, _, _, group = FAKE_QUANTISERS[name]
    x = jnp.asarray(quantiser_inputs(group)["wide"][:4])
    weight = jnp.arange(x.size, dtype=jnp.float32).reshape(x.shape)
    value, gradient = jax.jit(jax.value_and_grad(lambda v: jnp.vdot(weight, fake(v))))(x)
    np.testing.assert_array_equal(gradient, weight)
    exact = np.vdot(np.asarray(weight, np.float64), numpy_fake_quant(name, np.asarray(x)).astype(np.float64))
    assert float(value) == pytest.approx(exact, rel=1e-5)  # float32 sum of 128 products


@each_quantiser
def test_an_axis_that_is_not_a_multiple_of_the_group_is_refused(name: str) -> None:
    fake, pack, _, group = FAKE_QUANTISERS[name]
    for function in (fake, pack):
        with pytest.raises(ValueError, match=f"groups of {group}"):
            function(jnp.zeros((2, group + 2)))
