"""The one planner of expert work: (token, expert) pairs sorted into tiles of one expert each (design.md §7)."""

import dataclasses

import jax
import jax.numpy as jnp

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TilePlan:
    """Where every (token, expert) pair is computed.

    Attributes:
        expert: expert of each tile; 0 for unused tiles. int32 [tiles].
        row: token of each place of each tile; `tokens` (out of range) for an empty place. int32 [tiles, tile].
        place: flat place of each pair in the tiles. int32 [tokens, k].
    """

    expert: Array
    row: Array
    place: Array


def plan_tiles(expert_ids: Array, experts: int, tile: int) -> TilePlan:
    """Sorts pairs by expert and pads each expert's run to whole tiles; nothing is ever dropped.

    Args:
        expert_ids: int32 [tokens, k]; an id equal to `experts` marks a pair that is not to be computed here.
        experts: number of experts.
        tile: rows per tile.

    Worked example: experts 3, tile 2, expert_ids [[2, 0], [2, 0], [2, 1]] ->
    runs 0: tokens 0 1 | 1: token 2 | 2: tokens 0 1 2, so expert [0, 1, 2, 2, …] and row [[0, 1], [2, -], [0, 1],
    [2, -], …].
    """
    tokens, k = expert_ids.shape
    pairs = tokens * k
    tiles = pairs // tile + min(experts, pairs)  # each expert leaves at most one tile unfilled
    flat = expert_ids.reshape(pairs)
    order = jnp.argsort(flat, stable=True)
    counts = jnp.zeros(experts + 1, jnp.int32).at[flat].add(1)[:experts]
    expert_tiles = -(-counts // tile)
    last_tile = jnp.cumsum(expert_tiles)
    first_place = (last_tile - expert_tiles) * tile
    first_pair = jnp.cumsum(counts) - counts
    sorted_experts = flat[order]
    safe = jnp.minimum(sorted_experts, experts - 1)
    sorted_place = first_place[safe] + jnp.arange(pairs, dtype=jnp.int32) - first_pair[safe]
    sorted_place = jnp.where(sorted_experts < experts, sorted_place, tiles * tile)
    place = jnp.zeros(pairs, jnp.int32).at[order].set(sorted_place).reshape(tokens, k)
    row = jnp.full(tiles * tile, tokens, jnp.int32).at[sorted_place].set(order.astype(jnp.int32) // k, mode="drop")
    expert = jnp.searchsorted(last_tile, jnp.arange(tiles, dtype=jnp.int32), side="right")
    expert = jnp.where(expert < experts, expert, 0).astype(jnp.int32)
    return TilePlan(expert=expert, row=row.reshape(tiles, tile), place=place)
