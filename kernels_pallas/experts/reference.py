"""The meaning of the routed experts in plain XLA (model.md §6).

Three ways of moving the same data, chosen from static shapes alone: every expert on every token when there are few
experts for each pick, the weights of each pair gathered when there are few pairs, tiles of one expert otherwise
(`lax.ragged_dot` is dense on CPU and CUDA, jax.md §0.4). All give the sum in ascending expert order, in fp32.
"""

import jax
import jax.numpy as jnp
from jax import lax

from deepinfer_jax.kernels.dot import batched_matmul, dot, matmul
from deepinfer_jax.kernels.experts.plan import plan_tiles
from deepinfer_jax.kernels.formats import fake_quant_fp8
from deepinfer_jax.kernels.quantized_linear import dequantize
from deepinfer_jax.kernels.weights import Weight

Array = jax.Array

_DENSE_WASTE = 4  # experts computed for each one picked, up to which the dense products win on CPU
_GATHER_PAIRS = 16  # pairs up to which gathering their weights beats planning tiles
_TILE = 16


def swiglu(gate: Array, up: Array, weight: Array | None, limit: float) -> Array:
    """w·silu(min(a, limit))·clamp(u, ±limit), fp32, rounded to the dtype of `gate` (T17, T18).

    gate, up: [..., intermediate]; weight: float32, broadcast over the last axis, or None.
    """
    a = jnp.minimum(gate.astype(jnp.float32), limit)
    u = jnp.clip(up.astype(jnp.float32), -limit, limit)
    z = jax.nn.silu(a) * u if weight is None else weight[..., None] * jax.nn.silu(a) * u
    return z.astype(gate.dtype)


def routed_experts(
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
    """Σ over a token's experts of w2 · swiglu(w1 x, w3 x; weight).

    Args:
        x: [tokens, hidden], bfloat16 or float32.
        w1, w3: [experts, intermediate, hidden].
        w2: [experts, hidden, intermediate].
        expert_ids: int32 [tokens, k], distinct in a row; an id equal to the number of experts contributes nothing.
        weights: float32 [tokens, k].
        limit: clamp of both branches (`swiglu_limit`).
        quantize_input: FP8 activation quantiser in front of each product (model.md §2.3).

    Returns:
        float32 [tokens, hidden]; each expert's output is rounded to the dtype of `x` before the sum.
    """
    experts = jax.tree.leaves(w1)[0].shape[0]
    tokens, k = expert_ids.shape
    order = jnp.argsort(expert_ids, axis=-1)  # the sum runs in ascending expert id
    expert_ids = jnp.take_along_axis(expert_ids, order, axis=-1)
    weights = jnp.take_along_axis(weights, order, axis=-1)
    if quantize_input:
        x = fake_quant_fp8(x)
    method = _dense if experts <= _DENSE_WASTE * k else _gathered if tokens * k <= _GATHER_PAIRS else _tiled
    return method(x, w1, w3, w2, expert_ids, weights, limit, quantize_input)


def _experts_of(weight: Weight, index: Array, dtype: jnp.dtype) -> Array:
    """The matrices of some experts. index int32 [...] -> [..., out, in]."""
    picked = jax.tree.map(lambda leaf: jnp.take(leaf, index, axis=0), weight)
    return dequantize(picked, dtype)


def _dense(
    x: Array, w1: Weight, w3: Weight, w2: Weight, ids: Array, weights: Array, limit: float, quantize_input: bool
) -> Array:
    m1, m3, m2 = (dequantize(w, x.dtype) for w in (w1, w3, w2))
    experts, inner, hidden = m1.shape
    gate = matmul(x, m1.reshape(experts * inner, hidden)).astype(x.dtype).reshape(-1, experts, inner)
    up = matmul(x, m3.reshape(experts * inner, hidden)).astype(x.dtype).reshape(-1, experts, inner)
    picked = ids[:, :, None] == jnp.arange(experts)  # [tokens, k, experts]
    weight = jnp.sum(jnp.where(picked, weights[:, :, None], 0.0), axis=1)  # [tokens, experts]
    z = jnp.where(jnp.any(picked, axis=1)[..., None], swiglu(gate, up, weight, limit), 0)
    if quantize_input:
        z = fake_quant_fp8(z)
    if x.dtype == jnp.float32:
        return dot(z, m2, (((1, 2), (0, 2)), ((), ())))
    out = batched_matmul(jnp.swapaxes(z, 0, 1), m2).astype(x.dtype)  # [experts, tokens, hidden]
    return _ordered_sum(jnp.swapaxes(out, 0, 1))


def _gathered(
    x: Array, w1: Weight, w3: Weight, w2: Weight, ids: Array, weights: Array, limit: float, quantize_input: bool
) -> Array:
    tokens, k = ids.shape
    experts = jax.tree.leaves(w1)[0].shape[0]
    index = jnp.minimum(ids.reshape(-1), experts - 1)
    rows = jnp.repeat(x, k, axis=0)[:, None]  # [tokens·k, 1, hidden]
    gate = batched_matmul(rows, _experts_of(w1, index, x.dtype)).astype(x.dtype)
    up = batched_matmul(rows, _experts_of(w3, index, x.dtype)).astype(x.dtype)
    z = swiglu(gate, up, weights.reshape(-1, 1), limit)
    if quantize_input:
        z = fake_quant_fp8(z)
    out = batched_matmul(z, _experts_of(w2, index, x.dtype)).astype(x.dtype).reshape(tokens, k, -1)
    return _ordered_sum(jnp.where((ids < experts)[..., None], out, 0))


def _tiled(
    x: Array, w1: Weight, w3: Weight, w2: Weight, ids: Array, weights: Array, limit: float, quantize_input: bool
) -> Array:
    tokens, k = ids.shape
    experts = jax.tree.leaves(w1)[0].shape[0]
    plan = plan_tiles(ids, experts, _TILE)
    tiles = plan.expert.shape[0]
    pair_weight = jnp.zeros(tiles * _TILE, jnp.float32).at[plan.place].set(weights, mode="drop").reshape(tiles, _TILE)

    def one_tile(tile: tuple[Array, Array, Array]) -> Array:
        expert, row, weight = tile
        rows = jnp.take(x, row, axis=0, mode="fill", fill_value=0)  # [tile, hidden]
        gate = matmul(rows, _experts_of(w1, expert, x.dtype)).astype(x.dtype)
        up = matmul(rows, _experts_of(w3, expert, x.dtype)).astype(x.dtype)
        z = swiglu(gate, up, weight, limit)
        if quantize_input:
            z = fake_quant_fp8(z)
        return matmul(z, _experts_of(w2, expert, x.dtype)).astype(x.dtype)

    out = lax.map(one_tile, (plan.expert, plan.row, pair_weight)).reshape(tiles * _TILE, -1)
    return _ordered_sum(jnp.take(out, plan.place, axis=0, mode="fill", fill_value=0))


def _ordered_sum(parts: Array) -> Array:
    """fp32 sum over axis 1, one term after the other. [tokens, terms, hidden] -> float32 [tokens, hidden]."""
    total = parts[:, 0].astype(jnp.float32)
    for term in range(1, parts.shape[1]):
        total = total + parts[:, term].astype(jnp.float32)
    return total
