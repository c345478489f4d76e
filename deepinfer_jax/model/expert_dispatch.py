"""Routed experts spread over the `expert` axis of a mesh (design.md §9)."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from deepinfer_jax.kernels.experts import ascending, expert_outputs, ordered_sum
from deepinfer_jax.weights.params import Experts, Weight
from deepinfer_jax.weights.sharding import EXPERT, row_axis


def dispatched_experts(
    x: jax.Array,
    params: Experts,
    expert_ids: jax.Array,
    weights: jax.Array,
    mesh: Mesh,
    *,
    limit: float,
    quantize_input: bool,
) -> jax.Array:
    """`routed_experts` with every device computing the pairs of its own experts.

    A pair is computed on exactly one device and zero elsewhere, so the exchange adds zeros only, and the sum over a
    token's experts runs in ascending expert id on every device: neither the number of devices nor the placement of
    experts changes a bit.

    Args:
        x: [tokens, hidden]; tokens lie over `data` where they divide.
        params: stacked experts, spread over `expert`.
        expert_ids: int32 [tokens, k].
        weights: float32 [tokens, k].

    Returns:
        float32 [tokens, hidden].
    """
    rows, stacked = PartitionSpec(row_axis(x.shape[0], mesh)), PartitionSpec(EXPERT)

    def local(x: jax.Array, w1: Weight, w3: Weight, w2: Weight, ids: jax.Array, weights: jax.Array) -> jax.Array:
        experts = jax.tree.leaves(w1)[0].shape[0]
        first = lax.axis_index(EXPERT) * experts
        mine = (ids >= first) & (ids < first + experts)
        ids = jnp.where(mine, ids - first, experts)
        parts = expert_outputs(x, w1, w3, w2, ids, weights, limit=limit, quantize_input=quantize_input)
        return ordered_sum(lax.psum(parts, EXPERT))

    spread = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(rows, stacked, stacked, stacked, rows, rows),
        out_specs=rows,
        check_vma=False,
    )
    return spread(x, params.w1, params.w3, params.w2, *ascending(expert_ids, weights))
