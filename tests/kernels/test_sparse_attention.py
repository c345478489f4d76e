"""Sparse attention: every implementation against the brute force of model.md §5.3, on the shared shapes."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.kernels import formats
from deepinfer_jax.kernels.choice import KernelChoice
from deepinfer_jax.kernels.sparse_attention import PackedEntries, sparse_attention, triton
from deepinfer_jax.kernels.sparse_attention.shapes import SMALL, Shape
from tests.support.attention_oracle import brute_force
from tests.support.marks import slow

pytestmark = pytest.mark.toy

CHOICES = {"reference": KernelChoice(), "triton": KernelChoice(sparse_attention="triton", interpret=True)}

# Heads, picks, slots and entries that no block divides; a second key block; head dim of the released model.
TINY = Shape("tiny", 2, 3, 6, 32, 5, 8, 9, 4, dtype="float32")
WIDE = Shape("wide", 1, 2, 4, 512, 8, 10, 12, 5)
LONG = Shape("long", 1, 1, 3, 64, 40, 46, 200, 70)
PAGES = replace(TINY, name="pages", page=3)
PAGES_IN_ORDER = replace(TINY, name="pages, no more than k", entries=4, page=2)
SHAPES = [TINY, WIDE, LONG, PAGES, PAGES_IN_ORDER, *SMALL[:3]]

# float32: dots of at most 512 terms and exp of logits of a few units, 1e-7 relative each.
FLOAT32_ERROR = 5e-6
# bfloat16 keeps 8 bits: 2^-8 relative from rounding every probability, 2^-8 from rounding the result.
BFLOAT16_ERROR = 2.0**-7


@functools.cache
def compiled(options: tuple[tuple[str, Any], ...], choice: KernelChoice) -> Any:
    return jax.jit(functools.partial(sparse_attention, **dict(options), choice=choice))


def attend(arguments: tuple[Any, ...], options: dict[str, Any], implementation: str = "reference") -> np.ndarray:
    result = compiled(tuple(options.items()), CHOICES[implementation])(*arguments)
    assert result.dtype == arguments[0].dtype
    return np.asarray(result).astype(np.float64)


def changed(arguments: tuple[Any, ...], **changes: Any) -> tuple[Any, ...]:
    names = ("query", "window", "window_positions", "entries", "picks", "horizon", "sink")
    given_values = dict(zip(names, arguments, strict=True)) | changes
    return tuple(given_values[name] for name in names)


def one_key(logit: float, sink: float, value: float = 3.0) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """One row, one head, one visible key whose scaled logit is `logit` and whose second channel is `value`."""
    query = jnp.zeros((1, 1, 1, 32)).at[..., 0].set(2 * logit)
    window = jnp.zeros((1, 2, 32)).at[0, 0, :2].set(jnp.array([1.0, value])).at[0, 1].set(99.0)
    arguments = (query, window, jnp.array([[7, -1]]), None, None, jnp.array([[7]]), jnp.array([sink]))
    return arguments, {"sliding_window": 4, "scale": 0.5, "round_probabilities": False}


@pytest.fixture(params=CHOICES)
def implementation(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class TestEveryImplementation:
    @pytest.mark.parametrize(("packed", "dtype"), [(True, "bfloat16"), slow(True, "float32"), (False, "float32")])
    @pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
    def test_attention_equals_the_brute_force(
        self, implementation: str, shape: Shape, packed: bool, dtype: str
    ) -> None:
        shape = replace(shape, packed=packed, dtype=dtype)
        arguments = shape.random_arguments()
        expected = brute_force(arguments, **shape.options | {"round_probabilities": False})
        size = brute_force(arguments, **shape.options | {"round_probabilities": False}, absolute=True)
        error = np.abs(attend(arguments, shape.options, implementation) - expected)
        bound = FLOAT32_ERROR * (1 + size) if dtype == "float32" else BFLOAT16_ERROR * size + FLOAT32_ERROR
        assert (error <= bound).all(), f"largest error {error.max()}, bound exceeded by {(error - bound).max()}"

    def test_probabilities_are_rounded_only_before_the_product(self, implementation: str) -> None:
        # One block of keys, so that the running maximum is the final one; float32 keeps all else exact.
        shape = replace(TINY, entries=0, k=0)
        arguments, options = shape.random_arguments(), shape.options | {"round_probabilities": True}
        got, expected = attend(arguments, options, implementation), brute_force(arguments, **options)
        np.testing.assert_allclose(got, expected, atol=FLOAT32_ERROR)
        unrounded = brute_force(arguments, **shape.options)
        assert np.abs(expected - unrounded).max() > 100 * FLOAT32_ERROR

    @pytest.mark.parametrize("sink", [-3.0, 0.0, 2.5])
    @pytest.mark.parametrize("logit", [-2.0, 0.0, 4.0])
    def test_the_sink_is_an_unscaled_logit_without_a_value(
        self, implementation: str, logit: float, sink: float
    ) -> None:
        arguments, options = one_key(logit, sink)
        got = attend(arguments, options, implementation)[0, 0, 0, 1]
        assert got == pytest.approx(3.0 / (1 + np.exp(sink - logit)), rel=1e-6)

    @pytest.mark.parametrize(("logit", "sink", "expected"), [(-300.0, 0.0, 0.0), (300.0, 0.0, 3.0), (0.0, 1e4, 0.0)])
    def test_a_far_larger_sink_leaves_zero_and_a_far_smaller_one_the_key(
        self, implementation: str, logit: float, sink: float, expected: float
    ) -> None:
        arguments, options = one_key(logit, sink)
        assert attend(arguments, options, implementation)[0, 0, 0, 1] == pytest.approx(expected, abs=1e-30)

    def test_large_logits_neither_overflow_nor_lose_the_largest(self, implementation: str) -> None:
        arguments = TINY.random_arguments()
        arguments = changed(arguments, query=arguments[0] * 1e4)
        expected = brute_force(arguments, **TINY.options)
        assert np.isfinite(expected).all()
        # Logits of 1e4 carry absolute errors of 1e-3 in float32, and so do ratios of their exponentials.
        np.testing.assert_allclose(attend(arguments, TINY.options, implementation), expected, atol=5e-3)

    def test_a_row_without_any_key_is_zero(self, implementation: str) -> None:
        arguments = TINY.random_arguments()
        empty = jnp.full_like(arguments[2], -1)
        arguments = changed(arguments, window_positions=empty, picks=jnp.full_like(arguments[4], -1))
        assert (attend(arguments, TINY.options, implementation) == 0).all()

    def test_a_padding_row_is_zero_whatever_it_holds(self, implementation: str) -> None:
        arguments = TINY.random_arguments()
        horizon = arguments[5].at[1, 1].set(-1)
        query = arguments[0].at[1, 1].set(jnp.nan)
        got = attend(changed(arguments, query=query, horizon=horizon), TINY.options, implementation)
        expected = attend(arguments, TINY.options, implementation)
        expected[1, 1] = 0
        np.testing.assert_array_equal(got, expected)

    def test_empty_slots_and_missing_picks_are_ignored(self, implementation: str) -> None:
        arguments = TINY.random_arguments()
        positions = arguments[2].at[:, ::3].set(-1)
        picks = arguments[4].at[:, 1].set(-1).at[0, 0, ::2].set(-1)
        arguments = changed(arguments, window_positions=positions, picks=picks)
        expected = brute_force(arguments, **TINY.options)
        np.testing.assert_allclose(attend(arguments, TINY.options, implementation), expected, atol=2 * FLOAT32_ERROR)

    def test_a_layer_without_entries_equals_one_whose_picks_are_all_missing(self, implementation: str) -> None:
        arguments = TINY.random_arguments()
        none = changed(arguments, entries=None, picks=None)
        missing = changed(arguments, picks=jnp.full_like(arguments[4], -1))
        np.testing.assert_array_equal(
            attend(none, TINY.options, implementation), attend(missing, TINY.options, implementation)
        )

    @pytest.mark.parametrize("entries", [4, 9], ids=["dense", "gather"])
    @pytest.mark.parametrize("packed", [True, False], ids=["packed", "float"])
    def test_nan_in_unseen_slots_and_entries_does_not_leak(
        self, implementation: str, packed: bool, entries: int
    ) -> None:
        shape = replace(TINY, packed=packed, entries=entries)
        arguments = shape.random_arguments()
        picks = arguments[4].at[arguments[4] == 2].set(-1)  # nobody picks entry 2
        arguments = changed(arguments, picks=picks, window_positions=arguments[2].at[:, 3].set(-1))
        window = arguments[1].at[:, 3].set(jnp.nan)
        if packed:
            broken = PackedEntries(arguments[3].codes, arguments[3].scales.at[:, 2].set(0x7F))
        else:
            broken = arguments[3].at[:, 2].set(jnp.nan)
        poisoned = changed(arguments, window=window, entries=broken)
        np.testing.assert_array_equal(
            attend(poisoned, shape.options, implementation), attend(arguments, shape.options, implementation)
        )

    @pytest.mark.parametrize("entries", [4, 9], ids=["dense", "gather"])
    def test_a_broken_key_reaches_exactly_the_rows_that_see_it(self, implementation: str, entries: int) -> None:
        shape = replace(TINY, batch=1, packed=False, entries=entries)
        arguments = shape.random_arguments()
        picks = jnp.array([[[0, 2, -1, -1], [1, 2, -1, -1], [0, 1, -1, -1]]])
        arguments = changed(arguments, picks=picks, entries=arguments[3].at[0, 0, 5].set(jnp.nan))
        got = attend(arguments, shape.options, implementation)
        assert np.isnan(got).all(axis=(2, 3)).tolist() == [[True, False, True]]
        assert np.isnan(got).any(axis=(2, 3)).tolist() == [[True, False, True]]
        newest = int(np.argmax(np.asarray(arguments[2])[0]))  # only the last row may see it
        arguments = changed(arguments, window=arguments[1].at[0, newest, 0].set(jnp.nan), entries=None, picks=None)
        got = attend(arguments, shape.options, implementation)
        assert np.isnan(got).any(axis=(2, 3)).tolist() == [[False, False, True]]

    @settings(max_examples=25)
    @given(seed=st.integers(0, 2**32 - 1))
    def test_any_visibility_equals_the_brute_force(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        arguments = TINY.random_arguments(seed)
        positions = np.stack([rng.permutation(12)[:8] for _ in range(2)]) - (rng.random((2, 8)) < 0.3) * 20
        picks = np.where(rng.random(arguments[4].shape) < 0.4, -1, np.asarray(arguments[4]))
        horizon = rng.integers(-1, 14, arguments[5].shape)
        arguments = changed(
            arguments,
            window_positions=jnp.asarray(np.maximum(positions, -1), jnp.int32),
            picks=jnp.asarray(rng.permuted(picks, axis=-1), jnp.int32),
            horizon=jnp.asarray(horizon, jnp.int32),
        )
        expected = brute_force(arguments, **TINY.options)
        for implementation in CHOICES:
            got = attend(arguments, TINY.options, implementation)
            np.testing.assert_allclose(got, expected, atol=4 * FLOAT32_ERROR)


class TestReference:
    @pytest.mark.parametrize("time", [32, 33, slow(100)])
    @pytest.mark.parametrize("entries", [6, 50], ids=["dense", "gather"])
    def test_a_banded_prefill_equals_the_brute_force_at_every_tile_edge(self, time: int, entries: int) -> None:
        shape = Shape("prefill", 2, time, 2, 32, 7, 7 + time, entries, 6, dtype="float32", banded=True)
        arguments = shape.random_arguments()
        arguments = changed(arguments, horizon=arguments[5].at[1, time - 3 :].set(-1))
        expected = brute_force(arguments, **shape.options)
        got = attend(arguments, shape.options)
        np.testing.assert_allclose(got, expected, atol=2 * FLOAT32_ERROR)
        unbanded = attend(arguments, shape.options | {"banded": False})
        np.testing.assert_allclose(got, unbanded, atol=FLOAT32_ERROR)

    def test_dense_and_gathered_entries_agree(self) -> None:
        shape = replace(TINY, packed=False, entries=4)
        arguments = shape.random_arguments()
        unused = jnp.full((2, 30, 32), jnp.nan)  # more entries than k: gathered
        gathered = changed(arguments, entries=jnp.concatenate([arguments[3], unused], axis=1))
        np.testing.assert_allclose(
            attend(arguments, shape.options), attend(gathered, shape.options), atol=FLOAT32_ERROR
        )

    def test_a_long_prefill_holds_the_picked_entries_of_one_tile_only(self) -> None:
        shape = Shape("prefill", 1, 512, 2, 64, 16, 528, 512, 64, packed=False, dtype="float32", banded=True)
        program = jax.jit(functools.partial(sparse_attention, **shape.options))
        memory = program.lower(*shape.abstract_arguments()).compile().memory_analysis()
        picked = 4 * shape.time * shape.k * shape.dim
        assert memory.temp_size_in_bytes < picked / 4

    @pytest.mark.parametrize("time", [3, 40], ids=["one tile", "two tiles"])
    def test_the_gradient_equals_finite_differences(self, time: int) -> None:
        shape = Shape("gradient", 1, time, 2, 32, 5, 5 + time, 9, 4, packed=False, dtype="float32", banded=True)
        arguments = shape.random_arguments()
        rng = np.random.default_rng(1)
        weight = rng.standard_normal(arguments[0].shape)
        inputs = {"query": 0, "window": 1, "entries": 3, "sink": 6}

        def loss(*values: jax.Array) -> jax.Array:
            result = sparse_attention(*changed(arguments, **dict(zip(inputs, values, strict=True))), **shape.options)
            return (result * weight).sum()

        gradients = jax.jit(jax.grad(loss, argnums=range(4)))(*(arguments[i] for i in inputs.values()))
        step = 1e-5  # central differences in float64: errors of 1e-10
        for (name, i), gradient in zip(inputs.items(), gradients, strict=True):
            direction = rng.standard_normal(arguments[i].shape)
            ends = [
                brute_force(
                    changed(arguments, **{name: np.asarray(arguments[i], np.float64) + sign * direction}),
                    **shape.options,
                )
                for sign in (step, -step)
            ]
            expected = ((ends[0] - ends[1]) * weight).sum() / (2 * step)
            # A sum of some thousand float32 products of order one.
            assert float((gradient * direction).sum()) == pytest.approx(expected, rel=1e-4, abs=1e-4)

    def test_gradients_stay_finite_beside_padding_empty_rows_and_broken_slots(self) -> None:
        shape = replace(TINY, packed=False)
        arguments = shape.random_arguments()
        arguments = changed(
            arguments,
            query=arguments[0].at[0, 0].set(jnp.nan),
            horizon=arguments[5].at[0, 0].set(-1).at[1].set(10_000),  # padding; window left behind
            picks=arguments[4].at[1].set(-1),
            window=arguments[1].at[0, 2].set(jnp.nan),
            window_positions=arguments[2].at[0, 2].set(-1),
        )

        def loss(query: jax.Array, window: jax.Array, entries: jax.Array, sink: jax.Array) -> jax.Array:
            inputs = changed(arguments, query=query, window=window, entries=entries, sink=sink)
            return (sparse_attention(*inputs, **shape.options) ** 2).sum()

        gradients = jax.jit(jax.grad(loss, argnums=range(4)))(arguments[0], arguments[1], arguments[3], arguments[6])
        assert all(np.isfinite(gradient).all() for gradient in gradients)
        assert (np.asarray(gradients[0])[0, 0] == 0).all() and (np.asarray(gradients[0])[1] == 0).all()

    @pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
    def test_attention_lowers_for_every_platform(self, platform: str) -> None:
        shape = replace(TINY, dtype="bfloat16")
        traced = jax.jit(functools.partial(sparse_attention, **shape.options)).trace(*shape.abstract_arguments())
        assert "dot_general" in traced.lower(lowering_platforms=(platform,)).as_text()


class TestTriton:
    def test_integer_decoding_equals_the_formats_over_all_codes(self) -> None:
        codes = jnp.arange(256, dtype=jnp.int32)
        np.testing.assert_array_equal(triton._e4m3(codes), formats.decode_e4m3(codes.astype(jnp.uint8)))
        pairs = formats.unpack_e2m1(codes.astype(jnp.uint8)[:, None])
        np.testing.assert_array_equal(triton._e2m1(codes & 15), pairs[:, 0])
        np.testing.assert_array_equal(triton._e2m1(codes >> 4), pairs[:, 1])

    @pytest.mark.parametrize("dim", [16, 48])
    def test_a_head_dim_that_is_no_block_is_refused(self, dim: int) -> None:
        query = jax.ShapeDtypeStruct((1, 1, 1, dim), jnp.bfloat16)
        assert f"head dim {dim}" in str(triton.refusal(query, None))

    @pytest.mark.parametrize(("entries", "refused"), [(2**23, False), (2**23 + 1, True), (2**24, True), (2**25, False)])
    def test_packed_entries_whose_offsets_would_wrap_are_refused(self, entries: int, refused: bool) -> None:
        query = jax.ShapeDtypeStruct((1, 1, 64, 512), jnp.bfloat16)
        codes = jax.ShapeDtypeStruct((1, entries, 256), jnp.uint8)
        scales = jax.ShapeDtypeStruct((1, entries, 32), jnp.uint8)
        assert bool(triton.refusal(query, PackedEntries(codes, scales))) is refused


class TestDispatch:
    def program(self, shape: Shape, choice: KernelChoice) -> str:
        call = functools.partial(sparse_attention, **shape.options, choice=choice)
        return str(jax.make_jaxpr(call)(*shape.abstract_arguments()))

    def test_the_choice_decides_and_the_default_is_the_reference(self) -> None:
        triton_choice = KernelChoice(sparse_attention="triton")
        assert "pallas_call" in self.program(TINY, triton_choice)
        assert "pallas_call" not in self.program(TINY, KernelChoice())

    def test_a_banded_prefill_and_refused_sizes_run_the_reference(self) -> None:
        triton_choice = KernelChoice(sparse_attention="triton")
        assert "pallas_call" not in self.program(replace(TINY, window_slots=8, banded=True), triton_choice)
        assert "pallas_call" not in self.program(replace(TINY, dim=48), triton_choice)

    @pytest.mark.parametrize(
        ("changes", "sentence"),
        [
            ({"query": jnp.zeros((2, 3, 6, 32), jnp.float16)}, "query must be bfloat16 or float32"),
            ({"window": jnp.zeros((2, 8, 16))}, r"window must be float32 \[2, 8, 32\]"),
            ({"window": jnp.zeros((2, 8, 32), jnp.bfloat16)}, "window must be float32"),
            ({"window_positions": jnp.zeros((2, 7), jnp.int32)}, r"window_positions must be int32 \[2, 8\]"),
            ({"picks": None}, "entries and picks come together"),
            ({"picks": jnp.zeros((2, 2, 4), jnp.int32)}, r"picks must be int32 \[2, 3, 4\]"),
            ({"horizon": jnp.zeros((2, 3))}, "horizon must be int32"),
            ({"sink": jnp.zeros(5)}, r"sink must be float32 \[6\]"),
            ({"entries": jnp.zeros((2, 9, 31))}, r"entries must be float32 \[2, 9, 32\]"),
        ],
    )
    def test_disagreeing_arguments_are_named(self, changes: dict[str, Any], sentence: str) -> None:
        with pytest.raises(ValueError, match=sentence):
            sparse_attention(*changed(TINY.random_arguments(), **changes), **TINY.options)

    def test_a_band_of_another_size_is_refused(self) -> None:
        shape = replace(TINY, window_slots=9, banded=True)
        with pytest.raises(ValueError, match="banded needs sliding_window"):
            sparse_attention(*shape.random_arguments(), **shape.options)
