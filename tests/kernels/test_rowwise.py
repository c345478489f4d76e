"""Batch invariance of the pieces: one shape for every row, and the same bits among any neighbours."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from deepinfer_jax.kernels.choice import KernelChoice
from deepinfer_jax.kernels.dot import matmul
from deepinfer_jax.kernels.experts import routed_experts
from deepinfer_jax.kernels.rowwise import TILE_ROWS, batch_invariant, is_batch_invariant, rowwise
from deepinfer_jax.kernels.sparse_attention import sparse_attention
from deepinfer_jax.kernels.weights import Fp4Weight
from tests.support.marks import slow

pytestmark = pytest.mark.toy

Array = npt.NDArray[Any]

RNG = np.random.default_rng(0)
ROWS = RNG.standard_normal((40, 160)).astype(np.float32)
OPTIONS: dict[str, Any] = {"sliding_window": 8, "scale": 0.2, "round_probabilities": False, "banded": True}
MATRIX = RNG.standard_normal((48, 160)).astype(np.float32)


def in_scope(function: Any, *arrays: Any) -> Any:
    def traced(*arrays: Any) -> Any:
        with batch_invariant(True):
            return function(*arrays)

    return jax.tree.map(np.asarray, jax.jit(traced)(*arrays))


def same_bits(found: Array, wanted: Array) -> bool:
    return found.shape == wanted.shape and found.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("leading", [(1,), (16,), (17,), (1, 1), (3, 7), (2, 3, 5)])
def test_every_row_goes_through_one_shape_and_comes_back_to_its_place(leading: tuple[int, ...]) -> None:
    seen: list[tuple[int, ...]] = []

    def double(tree: dict[str, jax.Array], extra: jax.Array | None, number: jax.Array) -> tuple[jax.Array, jax.Array]:
        seen.append(tree["x"].shape)
        assert extra is None and not is_batch_invariant()
        return 2 * tree["x"], number + 1

    count = int(np.prod(leading))
    x = np.arange(3 * count, dtype=np.float32).reshape(*leading, 3)
    number = np.arange(count).reshape(leading)
    doubled, next_number = in_scope(
        lambda x, number: rowwise(double, lead=len(leading))({"x": x}, None, number), x, number
    )
    assert np.array_equal(doubled, 2 * x) and np.array_equal(next_number, number + 1)
    assert set(seen) == {(*[1] * (len(leading) - 1), TILE_ROWS, 3)}


def test_outside_a_scope_the_function_is_called_as_it_is() -> None:
    seen: list[tuple[int, ...]] = []
    rowwise(lambda x: seen.append(x.shape) or x)(jnp.zeros((2, 5, 3)))
    assert seen == [(2, 5, 3)] and not is_batch_invariant()


def test_a_scope_ends_with_an_error_inside_it() -> None:
    with pytest.raises(KeyError), batch_invariant(True):
        raise KeyError
    assert not is_batch_invariant()


@pytest.mark.parametrize("out", [1, 2])
def test_a_product_with_one_column_has_the_same_bits_in_any_batch(out: int) -> None:
    wanted = in_scope(matmul, ROWS, MATRIX[:out])
    assert np.allclose(wanted, ROWS @ MATRIX[:out].T, atol=1e-4)  # 160 terms of size 1 in fp32
    for count in (1, 16, 17):
        assert same_bits(in_scope(matmul, ROWS[:count], MATRIX[:out]), wanted[:count])


@pytest.mark.parametrize("heads", [1, 4])
def test_attention_has_the_same_bits_in_any_batch_and_chunk(heads: int) -> None:
    """Rows of two sequences, 20 each, over windows of 8 and 5 of 12 entries; in one call, and in calls of 1 and 3."""
    rng = np.random.default_rng(2)
    shapes = (2, 20, heads, 32), (2, 28, 32), (2, 12, 32)
    query, keys, entries = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    positions = np.tile(np.maximum(np.arange(-8, 20), -1), (2, 1)).astype(np.int32)
    picks = np.stack([[np.sort(rng.permutation(12)[:5]) for _ in range(20)] for _ in range(2)]).astype(np.int32)
    picks[:, :9, 3:] = -1
    sink = rng.standard_normal(heads).astype(np.float32)

    def attend(rows: slice, times: slice) -> Array:
        slots = slice(times.start, times.stop + 8)
        arrays = (query[rows, times], keys[rows, slots], positions[rows, slots], entries[rows], picks[rows, times])
        call = functools.partial(sparse_attention, **OPTIONS, choice=KernelChoice(batch_invariant=True))
        return np.asarray(jax.jit(call)(*arrays, positions[rows, 8:][:, times], sink))

    wanted = attend(slice(2), slice(0, 20))
    reference = jax.jit(functools.partial(sparse_attention, **OPTIONS))(
        query, keys, positions, entries, picks, positions[:, 8:], sink
    )
    assert np.allclose(wanted, reference, rtol=1e-5, atol=1e-6)  # other orders of sums of 13 terms
    for rows, times in [(slice(1), slice(3, 4)), (slice(1, 2), slice(7, 10)), (slice(2), slice(19, 20))]:
        assert same_bits(attend(rows, times), wanted[rows, times])


@pytest.mark.parametrize("count", [1, 2, 5, 16, 17, 40])
def test_a_product_a_norm_and_a_softmax_have_the_same_bits_in_any_batch(count: int) -> None:
    """XLA:CPU sums 40 rows in another order than one, in the mean of the squares too."""

    def chain(rows: jax.Array) -> jax.Array:
        products = matmul(rows, MATRIX)
        normed = rowwise(lambda x: x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True)), lead=1)(products)
        return rowwise(lambda x: jax.nn.softmax(x * 3 + 1, axis=-1), lead=1)(normed)

    wanted = in_scope(chain, ROWS)
    assert same_bits(in_scope(chain, ROWS[:count]), wanted[:count])
    assert same_bits(in_scope(chain, ROWS[-count:][::-1]), wanted[-count:][::-1])


@pytest.mark.parametrize("dtype", [slow("float32"), "bfloat16"])
@pytest.mark.parametrize(("experts", "k"), [(11, 2), (5, 3)], ids=["tiles of one expert", "all on every token"])
def test_experts_have_the_same_bits_in_any_batch(dtype: str, experts: int, k: int) -> None:
    rng = np.random.default_rng(1)

    def fp4(out: int, inputs: int) -> Fp4Weight:
        codes = rng.integers(0, 256, (experts, out, inputs // 2))
        scales = rng.integers(123, 126, (experts, out, inputs // 32))
        return Fp4Weight(codes=jnp.asarray(codes, jnp.uint8), scales=jnp.asarray(scales, jnp.uint8))

    matrices = fp4(96, 160), fp4(96, 160), fp4(160, 96)
    x = jnp.asarray(ROWS, dtype)
    ids = np.stack([rng.permutation(experts)[:k] for _ in ROWS]).astype(np.int32)
    weights = rng.random(ids.shape).astype(np.float32)

    def run(rows: Array) -> Array:
        def experts_of(x: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
            return routed_experts(x, *matrices, ids, weights, limit=10.0, quantize_input=dtype == "bfloat16")

        found: Array = in_scope(experts_of, x[rows], ids[rows], weights[rows])
        return found

    wanted = run(np.arange(40))
    assert np.abs(wanted).min(axis=-1).max() > 0
    for rows in (np.arange(1), np.arange(3, 8), rng.permutation(40)[:17]):
        assert same_bits(run(rows), wanted[rows])
