"""Routed experts (model.md §6): all on all tokens, pair by pair, in tiles: one result, that of a brute force."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from deepinfer_jax.kernels.experts import ascending, ordered_sum, reference
from deepinfer_jax.kernels.formats import fake_quant_fp8
from deepinfer_jax.kernels.quantized_linear import dequantize
from deepinfer_jax.kernels.weights import Fp4Weight
from tests.support.marks import slow

pytestmark = pytest.mark.real

Array = npt.NDArray[Any]

HIDDEN, INNER, LIMIT = 64, 96, 10.0
# tokens, experts per token, experts, share of pairs that belong to nobody here
CASES = [
    (33, 2, 11, 0.2),
    slow((5, 1, 1, 0.0)),
    *(
        pytest.param(case, marks=pytest.mark.slow)
        for case in [(1, 2, 8, 0.0), (7, 3, 8, 0.3), (120, 5, 5, 0.0), (90, 1, 3, 0.5)]
    ),
]


def problem(case: tuple[int, int, int, float]) -> tuple[jax.Array, tuple[Fp4Weight, ...], jax.Array, jax.Array]:
    """Inputs, FP4 weights w1 w3 w2, ids and weights; the first row is zero, a third of the gates exceed the clamp."""
    tokens, k, experts, skipped = case
    rng = np.random.default_rng(0)

    def fp4(out: int, inputs: int) -> Fp4Weight:
        codes = rng.integers(0, 256, (experts, out, inputs // 2))
        scales = rng.integers(123, 126, (experts, out, inputs // 32))
        return Fp4Weight(codes=jnp.asarray(codes, jnp.uint8), scales=jnp.asarray(scales, jnp.uint8))

    matrices = (fp4(INNER, HIDDEN), fp4(INNER, HIDDEN), fp4(HIDDEN, INNER))
    x = jnp.asarray(rng.standard_normal((tokens, HIDDEN)), jnp.bfloat16).at[0].set(0)
    ids = np.stack([rng.permutation(experts)[:k] for _ in range(tokens)])
    ids = np.where(rng.random(ids.shape) < skipped, experts, ids)
    return x, matrices, *ascending(jnp.asarray(ids, jnp.int32), jnp.asarray(rng.random((tokens, k)), jnp.float32))


def bf16(x: Array) -> Array:
    return np.asarray(jnp.asarray(x, jnp.float32).astype(jnp.bfloat16), np.float64)


def fp8(x: Array) -> Array:
    return np.asarray(fake_quant_fp8(jnp.asarray(x, jnp.float32)), np.float64)


def brute_force(
    x: jax.Array, matrices: tuple[Fp4Weight, ...], ids: jax.Array, weights: jax.Array, quantize: bool
) -> Array:
    """Each pair by itself, sums in float64, rounded where model.md §6 rounds. float64 [tokens, k, hidden]."""
    w1, w3, w2 = (np.asarray(dequantize(w, jnp.float32), np.float64) for w in matrices)
    quantizer = fp8 if quantize else np.asarray
    rows = quantizer(np.asarray(x, np.float64))
    out = np.zeros((*ids.shape, HIDDEN))
    for token, place in np.ndindex(*ids.shape):
        expert = int(ids[token, place])
        if expert == len(w1):
            continue
        gate = np.minimum(bf16(w1[expert] @ rows[token]), LIMIT)
        up = np.clip(bf16(w3[expert] @ rows[token]), -LIMIT, LIMIT)
        z = bf16(float(weights[token, place]) * gate / (1 + np.exp(-gate)) * up)
        out[token, place] = bf16(w2[expert] @ quantizer(z))
    return out


def by_path(
    x: jax.Array, matrices: tuple[Fp4Weight, ...], ids: jax.Array, weights: jax.Array, quantize: bool
) -> dict[str, Array]:
    """The sum over each token's experts on every path, tiles of 16 and 64 rows. float32 [tokens, hidden]."""
    rows = fake_quant_fp8(x) if quantize else x

    def run(path: Any, rows: jax.Array) -> jax.Array:
        out = jax.jit(lambda *arrays: path(*arrays, LIMIT, quantize))(rows, *matrices, ids, weights)
        return out if out.ndim == 2 else ordered_sum(out)

    results = {"dense": run(reference._dense, x), "pair by pair": run(reference._pair_by_pair, rows)}
    for tile in (16, 64):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reference, "_tile_rows", lambda pairs, experts, tile=tile: tile)
            results[f"tiles of {tile}"] = run(reference._tiled, rows)
    return {name: np.asarray(value) for name, value in results.items()}


@pytest.mark.parametrize("case", CASES)
def test_every_path_is_bit_equal_to_the_brute_force_under_fp8_activations(case: tuple[int, int, int, float]) -> None:
    """Products of e4m3 and e2m1 values in one power-of-two grid: float32 sums of 96 of them are nearly exact, so
    that all orders of summation round to the same bfloat16."""
    arguments = problem(case)
    parts = brute_force(*arguments, quantize=True)
    wanted = np.asarray(ordered_sum(jnp.asarray(parts, jnp.float32)))
    for name, found in by_path(*arguments, quantize=True).items():
        assert np.array_equal(found, wanted), name


def test_without_quantisers_paths_differ_by_isolated_roundings_only() -> None:
    arguments = problem((120, 5, 5, 0.0))
    parts = brute_force(*arguments, quantize=False)
    wanted = parts.sum(axis=1)
    for name, found in by_path(*arguments, quantize=False).items():
        wrong = np.abs(found - wanted) > 1e-5 * np.abs(parts).max()
        assert wrong.mean() < 2e-3, name  # the order of fp32 sums flips a rounding here and there
        # One flip is half a unit in the last place of z (8 bits) times a column of w2, or of one output.
        assert np.abs(found - wanted).max() < 2**-7 * np.abs(parts).max(), name


def test_the_tiled_path_has_the_gradients_of_the_dense_one() -> None:
    """Tiles are recomputed in the backward pass and skipped when empty; neither may lose a contribution."""
    x, packed, ids, weights = problem((33, 2, 11, 0.2))
    matrices = tuple(dequantize(w, jnp.float32) for w in packed)
    target = jnp.asarray(np.random.default_rng(1).standard_normal((33, HIDDEN)), jnp.float32)

    def loss(path: Any, x: jax.Array, matrices: tuple[jax.Array, ...], weights: jax.Array) -> jax.Array:
        out = path(x, *matrices, ids, weights, LIMIT, False)
        return jnp.sum((out if out.ndim == 2 else ordered_sum(out)) * target)

    arguments = (x.astype(jnp.float32), matrices, weights)
    tiled, dense = (
        jax.jit(jax.grad(functools.partial(loss, path), argnums=(0, 1, 2)))(*arguments)
        for path in (reference._tiled, reference._dense)
    )
    for found, wanted in zip(jax.tree.leaves(tiled), jax.tree.leaves(dense), strict=True):
        assert np.abs(wanted).max() > 0
        np.testing.assert_allclose(found, wanted, atol=1e-5 * float(np.abs(wanted).max()))  # another order of sums
