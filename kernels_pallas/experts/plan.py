"""The one planner of expert work: (token, expert) pairs sorted into tiles of one expert each (design.md §7)."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TilePlan:
    """Where every (token, expert) pair is computed.

    Attributes:
        expert: expert of each tile; 0 for unused tiles, which come last. int32 [tiles].
        pair: pair of each place of each tile, token · k + pick; `tokens · k` (out of range) for an empty place. A
            tile is filled from the left. int32 [tiles, tile].
        place: flat place of each pair in the tiles; `tiles · tile` (out of range) for one that is not computed.
            int32 [tokens, k].
    """

    expert: Array
    pair: Array
    place: Array


def plan_tiles(expert_ids: Array, experts: int, tile: int) -> TilePlan:
    """Sorts pairs by expert and pads each expert's run to whole tiles; nothing is ever dropped.

    Counts and running sums are sums of comparisons: on a GPU each is one launch, where `searchsorted` takes 36.

    Args:
        expert_ids: int32 [tokens, k]; an id equal to `experts` marks a pair that is not to be computed here.
        experts: number of experts.
        tile: rows per tile.

    Worked example: experts 3, tile 2, expert_ids [[2, 0], [2, 0], [2, 1]] ->
    runs 0: pairs 1 3 | 1: pair 5 | 2: pairs 0 2 4, so expert [0, 1, 2, 2, …] and pair [[1, 3], [5, -], [0, 2],
    [4, -], …].
    """
    tokens, k = expert_ids.shape
    pairs = tokens * k
    tiles = pairs // tile + min(experts, pairs)  # each expert leaves at most one tile unfilled
    flat = expert_ids.reshape(pairs)
    sorted_experts, order = lax.sort((flat, lax.iota(jnp.int32, pairs)), num_keys=1)
    first_pair = _count_below(flat, lax.iota(jnp.int32, experts + 1))
    counts, first_pair = first_pair[1:] - first_pair[:-1], first_pair[:-1]
    expert_tiles = -(-counts // tile)
    up_to = lax.iota(jnp.int32, experts)
    last_tile = jnp.sum(jnp.where(up_to[:, None] >= up_to, expert_tiles, 0), axis=1)
    first_place = (last_tile - expert_tiles) * tile
    number = lax.iota(jnp.int32, tiles)
    expert = _count_below(last_tile, number + 1)
    expert = jnp.where(expert < experts, expert, 0)
    offset = (number * tile - first_place[expert])[:, None] + lax.iota(jnp.int32, tile)
    filled = (number < last_tile[-1])[:, None] & (offset < counts[expert][:, None])
    pair = jnp.where(filled, order[jnp.where(filled, first_pair[expert][:, None] + offset, 0)], pairs)
    safe = jnp.minimum(sorted_experts, experts - 1)
    sorted_place = first_place[safe] + lax.iota(jnp.int32, pairs) - first_pair[safe]
    sorted_place = jnp.where(sorted_experts < experts, sorted_place, tiles * tile)
    place = jnp.zeros(pairs, jnp.int32).at[order].set(sorted_place).reshape(tokens, k)
    return TilePlan(expert=expert, pair=pair, place=place)


def _count_below(values: Array, limits: Array) -> Array:
    """How many of `values` are below each of `limits`. int32 [n], [m] -> int32 [m]."""
    return jnp.sum(values < limits[:, None], axis=1, dtype=jnp.int32)
