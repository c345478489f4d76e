"""Routed experts in plain XLA: the definition, and the path of every backend (model.md §6).

Three ways of moving the same data, chosen from static shapes alone: every expert on every token when there are few
experts for each pick, pair by pair when there are few pairs, tiles of one expert otherwise
(`lax.ragged_dot` is dense on CPU and CUDA, jax.md §0.4). All give the sum in ascending expert order, in fp32.
Under batch invariance the number of tokens chooses neither the way nor the tile.
"""

import jax
import jax.numpy as jnp
from jax import lax

from deepinfer_jax.kernels.dot import batched_matmul, matmul
from deepinfer_jax.kernels.experts.plan import plan_tiles
from deepinfer_jax.kernels.formats import fake_quant_fp8
from deepinfer_jax.kernels.quantized_linear import dequantize, product
from deepinfer_jax.kernels.rounding import round_to
from deepinfer_jax.kernels.rowwise import TILE_ROWS, is_batch_invariant, isolated, rowwise
from deepinfer_jax.kernels.weights import Weight

Array = jax.Array

_DENSE_WASTE = 4  # experts computed for each one picked, up to which the dense products win on CPU
_FEW_PAIRS = 64  # pairs up to which one product after the other beats tiles with empty places
_SMALLEST_TILE, LARGEST_TILE = 16, 64


def swiglu(gate: Array, up: Array, weight: Array | None, limit: float) -> Array:
    """w·silu(min(a, limit))·clamp(u, ±limit), fp32, rounded to the dtype of `gate` (T17, T18).

    gate, up: [..., intermediate]; weight: float32, broadcast over the last axis, or None.
    """
    return round_to(gated(gate, up, weight, limit), gate.dtype)


def gated(gate: Array, up: Array, weight: Array | None, limit: float) -> Array:
    """`swiglu` before it is rounded, float32."""
    a = jnp.minimum(gate.astype(jnp.float32), limit)
    u = jnp.clip(up.astype(jnp.float32), -limit, limit)
    return jax.nn.silu(a) * u if weight is None else weight[..., None] * jax.nn.silu(a) * u


def routed_experts_reference(
    x: Array,
    w1: Weight,
    w3: Weight,
    w2: Weight,
    expert_ids: Array,
    weights: Array,
    *,
    limit: float,
    quantize_input: bool,
) -> Array:
    """`routed_experts` (see the package); differentiable in x, weights and weights that are plain arrays."""
    if jax.tree.leaves(w1)[0].shape[0] <= _DENSE_WASTE * expert_ids.shape[1]:

        def dense(x: Array, expert_ids: Array, weights: Array) -> Array:
            return _dense(x, w1, w3, w2, expert_ids, weights, limit, quantize_input)

        return rowwise(dense, lead=1)(x, expert_ids, weights)
    expert_ids, weights = ascending(expert_ids, weights)
    return ordered_sum(expert_outputs(x, w1, w3, w2, expert_ids, weights, limit=limit, quantize_input=quantize_input))


def ascending(expert_ids: Array, weights: Array) -> tuple[Array, Array]:
    """The same pairs with each row's experts in ascending order, the order of the sum."""
    k = expert_ids.shape[1]
    key = expert_ids * k + jnp.arange(k)  # distinct, also where ids are not
    before = jnp.sum(key[:, None, :] < key[:, :, None], axis=-1)
    chosen = before[:, None, :] == jnp.arange(k)[:, None]  # [tokens, k, k]: the one pick that comes to each place
    expert_ids = jnp.sum(jnp.where(chosen, expert_ids[:, None, :], 0), axis=-1)
    return expert_ids, jnp.sum(jnp.where(chosen, weights[:, None, :], 0), axis=-1)


def expert_outputs(
    x: Array,
    w1: Weight,
    w3: Weight,
    w2: Weight,
    expert_ids: Array,
    weights: Array,
    *,
    limit: float,
    quantize_input: bool,
) -> Array:
    """Output of every (token, expert) pair, in the order given.

    Arguments as for `routed_experts`.

    Returns:
        [tokens, k, hidden] in the dtype of `x`; zeros for an id equal to the number of experts.
    """
    if quantize_input:
        x = fake_quant_fp8(x)  # once per row, for both projections and all experts
    method = _pair_by_pair if expert_ids.size <= _FEW_PAIRS and not is_batch_invariant() else _tiled
    return method(x, w1, w3, w2, expert_ids, weights, limit, quantize_input)


def ordered_sum(parts: Array) -> Array:
    """fp32 sum over axis 1, one term after the other. [tokens, terms, hidden] -> float32 [tokens, hidden]."""
    total = parts[:, 0].astype(jnp.float32)
    for term in range(1, parts.shape[1]):
        total = total + parts[:, term].astype(jnp.float32)
    return total


def _dense(
    x: Array, w1: Weight, w3: Weight, w2: Weight, ids: Array, weights: Array, limit: float, quantize_input: bool
) -> Array:
    if quantize_input:
        x = fake_quant_fp8(x)
    m1, m3, m2 = (dequantize(w, x.dtype) for w in (w1, w3, w2))
    experts, inner, hidden = m1.shape
    gate = round_to(matmul(x, m1.reshape(experts * inner, hidden)), x.dtype).reshape(-1, experts, inner)
    up = round_to(matmul(x, m3.reshape(experts * inner, hidden)), x.dtype).reshape(-1, experts, inner)
    picked = ids[:, :, None] == jnp.arange(experts)  # [tokens, k, experts]
    weight = jnp.sum(jnp.where(picked, weights[:, :, None], 0.0), axis=1)  # [tokens, experts]
    served = jnp.any(picked, axis=1)[..., None]  # [tokens, experts, 1]
    z = jnp.where(served, swiglu(gate, up, weight, limit), 0)
    if quantize_input:
        z = fake_quant_fp8(z)
    out = round_to(batched_matmul(jnp.swapaxes(z, 0, 1), m2), x.dtype)  # [experts, tokens, hidden]
    # Zero times a NaN in the matrix of an expert would be NaN in tokens that never asked for it.
    return ordered_sum(jnp.where(served, jnp.swapaxes(out, 0, 1), 0))


def _pair_by_pair(
    x: Array, w1: Weight, w3: Weight, w2: Weight, ids: Array, weights: Array, limit: float, quantize_input: bool
) -> Array:
    tokens, k = ids.shape
    experts = jax.tree.leaves(w1)[0].shape[0]

    def one_pair(pair: tuple[Array, Array, Array]) -> Array:
        expert, token, weight = pair
        row = lax.dynamic_slice_in_dim(x, token, 1)  # [1, hidden]
        return _expert(row, w1, w3, w2, expert, weight[None], limit, quantize_input)[0]

    flat = jnp.minimum(ids.reshape(-1), experts - 1)
    out = lax.map(one_pair, (flat, jnp.repeat(jnp.arange(tokens), k), weights.reshape(-1)))
    return jnp.where((ids < experts)[..., None], out.reshape(tokens, k, -1), 0)


def _tiled(
    x: Array, w1: Weight, w3: Weight, w2: Weight, ids: Array, weights: Array, limit: float, quantize_input: bool
) -> Array:
    tokens, k = ids.shape
    experts = jax.tree.leaves(w1)[0].shape[0]
    tile = TILE_ROWS if is_batch_invariant() else _tile_rows(ids.size, experts)
    plan = plan_tiles(ids, experts, tile)
    tiles = plan.expert.shape[0]
    pair_weight = jnp.zeros(tiles * tile, jnp.float32).at[plan.place].set(weights, mode="drop").reshape(tiles, tile)

    def on_tile(rows: Array, expert: Array, weight: Array) -> Array:
        return _expert(rows, w1, w3, w2, expert, weight, limit, quantize_input)

    def one_tile(work: tuple[Array, Array, Array]) -> Array:
        expert, row, weight = work

        def compute() -> Array:
            rows = jnp.take(x, row, axis=0, mode="fill", fill_value=0)  # [tile, hidden]
            return isolated(on_tile, rows, expert, weight)

        # The plan has room for the worst case; places are filled from the left, so a tile that is used has a first.
        return lax.cond(row[0] < tokens, compute, lambda: jnp.zeros((tile, x.shape[-1]), x.dtype))

    # checkpoint: a backward pass takes each tile's matrices again instead of keeping a copy per tile.
    work = (plan.expert, plan.pair // k, pair_weight)
    out = lax.map(jax.checkpoint(one_tile, prevent_cse=False), work).reshape(tiles * tile, -1)
    return jnp.take(out, plan.place, axis=0, mode="fill", fill_value=0)


def _tile_rows(pairs: int, experts: int) -> int:
    """Rows per tile: about what an expert gets, between what a product needs to be efficient and what padding costs."""
    average = max(pairs // experts, 1)
    return min(max(1 << (average.bit_length() - 1), _SMALLEST_TILE), LARGEST_TILE)


def _expert(
    x: Array, w1: Weight, w3: Weight, w2: Weight, expert: Array, weight: Array, limit: float, quantize_input: bool
) -> Array:
    """One expert on some rows. x: [rows, hidden], expert: int32 scalar, weight: float32 [rows]."""

    def matrix(stacked: Weight) -> Weight:
        return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, expert, keepdims=False), stacked)

    gate, up = round_to(product(x, matrix(w1)), x.dtype), round_to(product(x, matrix(w3)), x.dtype)
    z = swiglu(gate, up, weight, limit)
    if quantize_input:
        z = fake_quant_fp8(z)
    return round_to(product(z, matrix(w2)), x.dtype)
