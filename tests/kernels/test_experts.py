"""Routed experts: every implementation against model.md §6 in float64, on the shared shapes."""

import functools
import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from deepinfer_jax.kernels.choice import KernelChoice
from deepinfer_jax.kernels.experts import decode, routed_experts, triton
from deepinfer_jax.kernels.experts.plan import plan_tiles
from deepinfer_jax.kernels.experts.shapes import RELEASED, Shape
from deepinfer_jax.kernels.weights import Fp4Weight
from tests.support.experts_oracle import MAGNITUDES, brute_force

pytestmark = pytest.mark.toy

CHOICES = {"reference": KernelChoice(), "triton": KernelChoice(experts="triton", interpret=True)}

GOLDEN_A = Shape("golden A", 6, 3, 8, 64, 32)
# No block divides hidden or inner; some experts get nothing.
ODD = Shape("odd", 20, 2, 12, 160, 96)
# Both widths beyond one block of columns and one round of channels, as the released ones are.
CUT_DOWN = Shape("released, cut down", 3, 6, 24, 320, 288)
ONE_ROW = Shape("one row", 1, 2, 10, 160, 96)
# Tiles of 32 rows; an expert fills several.
MANY = Shape("many", 70, 1, 4, 64, 64)
SHAPES = [GOLDEN_A, ODD, CUT_DOWN, ONE_ROW, MANY]


@functools.cache
def compiled(implementation: str, quantize: bool) -> Any:
    options = ODD.options | {"quantize_input": quantize}
    return jax.jit(functools.partial(routed_experts, **options, choice=CHOICES[implementation]))


def run(arguments: tuple[Any, ...], implementation: str, quantize: bool = True) -> np.ndarray:
    result = compiled(implementation, quantize)(*arguments)
    assert result.dtype == jnp.float32
    return np.asarray(result)


def check(arguments: tuple[Any, ...], implementation: str, quantize: bool = True) -> None:
    expected, bound = brute_force(arguments, **ODD.options | {"quantize_input": quantize})
    error = np.abs(run(arguments, implementation, quantize) - expected)
    assert (error <= bound).all(), f"largest error {error.max()}, bound exceeded by {(error - bound).max()}"


def changed(arguments: tuple[Any, ...], **changes: Any) -> tuple[Any, ...]:
    names = ("x", "w1", "w3", "w2", "expert_ids", "weights")
    given = dict(zip(names, arguments, strict=True)) | changes
    return tuple(given[name] for name in names)


def with_scales(weight: Fp4Weight, at: Any, scale: int) -> Fp4Weight:
    return replace(weight, scales=weight.scales.at[at].set(scale))


@pytest.fixture(params=CHOICES)
def implementation(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class TestEveryImplementation:
    @pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
    def test_equals_the_brute_force(self, implementation: str, shape: Shape) -> None:
        check(shape.random_arguments(), implementation)

    def test_equals_the_brute_force_without_the_quantiser(self, implementation: str) -> None:
        check(ODD.random_arguments(), implementation, quantize=False)

    @pytest.mark.parametrize("expert", [0, 11])
    def test_all_rows_may_go_to_one_expert(self, implementation: str, expert: int) -> None:
        arguments = ODD.random_arguments()
        ids = jnp.full_like(arguments[4], 12).at[:, 1].set(expert)
        check(changed(arguments, expert_ids=ids), implementation)

    def test_an_id_equal_to_the_number_of_experts_adds_nothing(self, implementation: str) -> None:
        arguments = ODD.random_arguments()
        ids = arguments[4].at[::3].set(12).at[1, 0].set(12)
        arguments = changed(arguments, expert_ids=ids)
        check(arguments, implementation)
        assert (run(arguments, implementation)[::3] == 0).all()

    def test_a_call_that_computes_no_pair_is_zero(self, implementation: str) -> None:
        arguments = ODD.random_arguments()
        assert (run(changed(arguments, expert_ids=jnp.full_like(arguments[4], 12)), implementation) == 0).all()

    def test_the_order_of_a_rows_experts_does_not_matter(self, implementation: str) -> None:
        arguments = ODD.random_arguments()
        reversed_pairs = changed(arguments, expert_ids=arguments[4][:, ::-1], weights=arguments[5][:, ::-1])
        np.testing.assert_array_equal(run(arguments, implementation), run(reversed_pairs, implementation))

    def test_zero_and_outlier_rows(self, implementation: str) -> None:
        arguments = ODD.random_arguments()
        x = arguments[0].at[2].set(0).at[3].multiply(3e3).at[4].multiply(1e-6).at[5, 7].set(1e4)
        check(changed(arguments, x=x), implementation)
        assert (run(changed(arguments, x=x), implementation)[2] == 0).all()

    def test_large_and_small_scales(self, implementation: str) -> None:
        arguments = ODD.random_arguments()
        rng = np.random.default_rng(1)
        w1, w3 = (
            replace(w, scales=jnp.asarray(rng.integers(60, 130, w.scales.shape), jnp.uint8)) for w in arguments[1:3]
        )
        w2 = replace(arguments[3], scales=jnp.asarray(rng.integers(40, 200, arguments[3].scales.shape), jnp.uint8))
        check(changed(arguments, w1=w1, w3=w3, w2=w2), implementation)

    def test_extreme_scales_reach_their_own_output_channel(self, implementation: str) -> None:
        arguments = ODD.random_arguments()
        w2 = arguments[3]
        w2 = with_scales(
            with_scales(with_scales(w2, (slice(None), 3), 0), (slice(None), 4), 254), (slice(None), 5), 255
        )
        got = run(changed(arguments, w2=w2), implementation)
        rest = np.delete(np.arange(160), [3, 4, 5])
        np.testing.assert_array_equal(got[:, rest], run(arguments, implementation)[:, rest])
        assert (np.abs(got[:, 3]) < 1e-30).all()  # scale 0 is 2^-127
        assert (np.abs(got[:, 4]) > 1e30).all() or not np.isfinite(got[:, 4]).all()  # 2^127
        assert np.isnan(got[:, 5]).all()

    def test_a_broken_expert_that_nobody_asks_for_does_no_harm(self, implementation: str) -> None:
        arguments = ODD.random_arguments()
        ids = jnp.where(arguments[4] == 5, 12, arguments[4])
        arguments = changed(arguments, expert_ids=ids)
        broken = {name: with_scales(w, 5, 255) for name, w in zip(("w1", "w3", "w2"), arguments[1:4], strict=True)}
        np.testing.assert_array_equal(run(changed(arguments, **broken), implementation), run(arguments, implementation))

    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_a_broken_row_stays_alone(self, implementation: str, value: float) -> None:
        arguments = ODD.random_arguments()
        got = run(changed(arguments, x=arguments[0].at[7, 33].set(value)), implementation)
        assert not np.isfinite(got[7]).any()
        others = np.arange(20) != 7
        np.testing.assert_array_equal(got[others], run(arguments, implementation)[others])

    def test_a_row_has_the_same_bits_whoever_its_neighbours_are(self, implementation: str) -> None:
        arguments = ODD.random_arguments()
        alone = changed(arguments, expert_ids=arguments[4].at[1:].set(12))
        crowded = changed(arguments, expert_ids=jnp.broadcast_to(arguments[4][:1], arguments[4].shape))
        moved = jax.tree.map(lambda a: jnp.roll(a, 11, axis=0), (arguments[0], *arguments[4:]))
        moved = changed(arguments, **dict(zip(("x", "expert_ids", "weights"), moved, strict=True)))
        expected = run(arguments, implementation)[0]
        for other, row in ((alone, 0), (crowded, 0), (moved, 11)):
            np.testing.assert_array_equal(run(other, implementation)[row], expected)


class TestPlan:
    @pytest.mark.parametrize("seed", range(3))
    @pytest.mark.parametrize(
        ("tokens", "k", "experts", "tile"), [(1, 1, 1, 4), (7, 3, 5, 2), (40, 2, 3, 16), (9, 4, 90, 8)]
    )
    def test_every_pair_has_a_place_in_a_tile_of_its_expert(
        self, tokens: int, k: int, experts: int, tile: int, seed: int
    ) -> None:
        rng = np.random.default_rng(seed)
        ids = rng.integers(0, experts + 1, (tokens, k)) if seed else np.zeros((tokens, k), int)
        plan = jax.tree.map(
            np.asarray, jax.jit(plan_tiles, static_argnums=(1, 2))(jnp.asarray(ids, jnp.int32), experts, tile)
        )
        flat, pair = ids.ravel(), plan.pair.ravel()
        assert sorted(pair[pair < flat.size]) == np.flatnonzero(flat < experts).tolist()
        for place in np.flatnonzero(pair < flat.size):
            assert flat[pair[place]] == plan.expert[place // tile]
            assert plan.place.ravel()[pair[place]] == place
        assert (plan.place.ravel()[flat == experts] == pair.size).all()
        used = (plan.pair < flat.size).any(axis=1)
        assert (np.diff(used.astype(int)) <= 0).all() and (plan.expert[~used] == 0).all()
        assert (np.diff((plan.pair < flat.size).astype(int), axis=1) <= 0).all(), "a tile is filled from the left"
        least = sum(-(-count // tile) for count in np.bincount(flat, minlength=experts + 1)[:experts])
        assert used.sum() == least


def emulate(ptx: str, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """Runs the few PTX instructions that `decode` uses on uint32 arrays; returns $0 (and $1 if it is written)."""
    outputs = 2 if "add.u32 $1" in ptx or "fma.rn.bf16x2 $1" in ptx else 1
    registers: dict[str, Any] = {f"${outputs + i}": value for i, value in enumerate(inputs)}

    def value(name: str) -> Any:
        return registers[name] if name in registers else np.uint32(int(name, 0))

    def halves(name: str) -> np.ndarray:
        word = np.atleast_1d(value(name)).astype(np.uint32)
        return word.view(np.uint16).view(ml_dtypes.bfloat16).reshape(-1, 2).astype(np.float64)

    def packed(pair: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore", invalid="ignore"):
            return np.ascontiguousarray(pair).astype(ml_dtypes.bfloat16).view(np.uint16).view(np.uint32).ravel()

    for statement in re.sub(r"\.reg [^;]*;|[{}]", "", ptx).split(";"):
        if not statement.strip():
            continue
        operation, arguments = statement.strip().split(" ", 1)
        result, *names = (name.strip() for name in arguments.split(","))
        match operation:
            case "mov.b32":
                registers[result] = value(names[0])
            case "and.b32":
                registers[result] = value(names[0]) & value(names[1])
            case "or.b32":
                registers[result] = value(names[0]) | value(names[1])
            case "shr.u32":
                registers[result] = value(names[0]) >> value(names[1])
            case "shl.b32":
                registers[result] = value(names[0]) << value(names[1])
            case "add.u32":
                registers[result] = value(names[0]) + value(names[1])
            case "mul.lo.u32":
                registers[result] = value(names[0]) * value(names[1])
            case "prmt.b32":
                both = value(names[0]).astype(np.uint64) | np.uint64(int(value(names[1])) << 32)
                picks = [int(value(names[2])) >> (4 * i) & 15 for i in range(4)]
                assert max(picks) < 8
                registers[result] = sum(
                    ((both >> np.uint64(8 * pick)) & np.uint64(255)).astype(np.uint32) << np.uint32(8 * i)
                    for i, pick in enumerate(picks)
                )
            case "max.bf16x2":
                registers[result] = packed(np.maximum(halves(names[0]), halves(names[1])))
            case "fma.rn.bf16x2":
                with np.errstate(invalid="ignore"):
                    registers[result] = packed(halves(names[0]) * halves(names[1]) + halves(names[2]))
            case _:
                raise AssertionError(f"{operation} is not emulated")
    return [registers[f"${i}"] for i in range(outputs)]


class TestDecode:
    """The PTX of `decode`, which no interpreter runs, over every code and scale."""

    CODES = np.arange(2**16, dtype=np.uint32)

    @pytest.mark.parametrize(("wide", "scales"), [(False, range(129)), (True, range(256))])
    def test_equals_the_formats_over_all_codes_and_scales(self, wide: bool, scales: range) -> None:
        padded = np.resize(np.array(scales, np.uint8), (64, 4))
        factors = np.stack(emulate(decode.scales_ptx(wide), [padded.view(np.uint32).ravel()]), axis=-1)
        factors = factors.view(np.uint16).ravel()  # four halves in the order of the bytes
        words = self.CODES | (self.CODES[::-1] << np.uint32(16))
        for nibble in range(decode.CODES_PER_WORD):
            values = emulate(decode.codes_ptx(nibble, wide), [words])[0]
            codes = np.stack([words >> (4 * nibble), words >> (16 + 4 * nibble)], axis=-1) & 15
            seen, first = np.unique(codes[:, 0], return_index=True)
            assert seen.tolist() == list(range(16))
            # The word's other nibbles change nothing, and both halves decode alike.
            one = values.view(np.uint16).reshape(-1, 2)
            table = one[first, 0]
            np.testing.assert_array_equal(one, table[codes])
            for scale, factor in zip(padded.ravel(), factors, strict=True):
                pairs = table.astype(np.uint32) | (table.astype(np.uint32) << np.uint32(16))
                product = emulate(decode.TIMES, [pairs, np.uint32(int(factor) * 0x10001)])[0]
                got = product.view(np.uint16).view(ml_dtypes.bfloat16)[::2].astype(np.float64)
                signed = np.where(seen < 8, 1, -1) * MAGNITUDES[seen & 7]
                with np.errstate(over="ignore"):
                    exact = (signed * (np.nan if scale == 255 else 2.0 ** (int(scale) - 127))).astype(
                        ml_dtypes.bfloat16
                    )
                np.testing.assert_array_equal(got, exact.astype(np.float64))

    def test_the_interpreters_decoding_is_the_same(self) -> None:
        words = jnp.asarray(self.CODES, jnp.uint16)
        ones = decode.scale_factors(jnp.full(words.shape, 127, jnp.uint8), wide=False, interpret=True)
        for nibble in range(decode.CODES_PER_WORD):
            code = self.CODES >> (4 * nibble) & 15
            got = decode.decoded(words, ones, nibble, wide=False, interpret=True)
            np.testing.assert_array_equal(np.asarray(got, np.float64), np.where(code < 8, 1, -1) * MAGNITUDES[code & 7])


class TestTriton:
    def test_the_gradient_is_that_of_the_reference(self) -> None:
        arguments = ONE_ROW.random_arguments()
        direction = np.random.default_rng(1).standard_normal((1, 160))

        def gradients(implementation: str) -> Any:
            def loss(x: jax.Array, weights: jax.Array) -> jax.Array:
                inputs = changed(arguments, x=x, weights=weights)
                return (routed_experts(*inputs, **ODD.options, choice=CHOICES[implementation]) * direction).sum()

            return jax.jit(jax.grad(loss, argnums=(0, 1)))(arguments[0], arguments[5])

        for got, expected in zip(gradients("triton"), gradients("reference"), strict=True):
            np.testing.assert_array_equal(got, expected)
            assert np.abs(np.asarray(expected, np.float32)).max() > 0

    def test_forward_mode_is_refused(self) -> None:
        x, *rest = ONE_ROW.random_arguments()
        program = functools.partial(routed_experts, **ODD.options, choice=CHOICES["triton"])
        tangent = jax.jit(lambda x: jax.jvp(lambda x: program(x, *rest), (x,), (x,)))
        with pytest.raises(TypeError, match="forward-mode"):
            tangent.lower(x)

    @pytest.mark.parametrize("shape", RELEASED, ids=lambda shape: shape.name)
    def test_released_shapes_have_programs_for_every_core_and_place_for_every_pair(self, shape: Shape) -> None:
        pairs = shape.tokens * shape.k
        sizes = triton.tile_sizes(pairs, shape.experts)
        tiles = min(pairs, shape.experts)  # of as many experts as can be
        for program, columns in ((sizes.gate_up, shape.inner), (sizes.down, shape.hidden)):
            assert tiles * -(-columns // program.columns) >= 132
            assert program.columns % 32 == 0

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"x": jnp.zeros((20, 160))}, "activations are float32, not bfloat16"),
            ({"x": jnp.zeros((0, 160), jnp.bfloat16)}, "there are no tokens"),
            ({"w1": jnp.zeros((12, 96, 160), jnp.bfloat16)}, "weights are bfloat16, not packed FP4"),
            (
                {"w2": Fp4Weight(jnp.zeros((12, 160, 40), jnp.uint8), jnp.zeros((12, 160, 3), jnp.uint8))},
                "80 inputs are not whole groups of 32",
            ),
            (
                {"w1": Fp4Weight(*(jax.ShapeDtypeStruct((2**16, 2**10, n), jnp.uint8) for n in (528, 33)))},
                "offsets into 2214592512 bytes of scales would wrap in 32 bits",
            ),
        ],
    )
    def test_what_the_kernels_do_not_take_is_refused_with_the_reason(
        self, changes: dict[str, Any], reason: str
    ) -> None:
        arguments = ODD.random_arguments()
        assert triton.refusal(*arguments[:4]) is None
        assert triton.refusal(*changed(arguments, **changes)[:4]) == reason


class TestDispatch:
    def program(self, arguments: tuple[Any, ...], choice: KernelChoice) -> str:
        return str(jax.make_jaxpr(functools.partial(routed_experts, **ODD.options, choice=choice))(*arguments))

    def test_the_choice_decides_and_the_default_is_the_reference(self) -> None:
        arguments = ODD.abstract_arguments()
        program = self.program(arguments, KernelChoice(experts="triton"))
        assert program.count("pallas_call[") == 2
        assert "pallas_call" not in self.program(arguments, KernelChoice())

    def test_float32_and_batch_invariance_run_the_reference(self) -> None:
        arguments = ODD.abstract_arguments()
        invariant = KernelChoice(experts="triton", batch_invariant=True)
        assert "pallas_call" not in self.program(arguments, invariant)
        wide = changed(arguments, x=jax.ShapeDtypeStruct((20, 160), jnp.float32))
        assert "pallas_call" not in self.program(wide, KernelChoice(experts="triton"))
