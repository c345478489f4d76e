"""The time axis in tiles, for `lax.map` over rows that would need too much memory at once."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def pad_time(array: jax.Array, amount: int, value: float) -> jax.Array:
    """`array` [batch, time, ...] with `amount` more places filled with `value` at the end of the time axis."""
    width = [(0, 0), (0, amount)] + [(0, 0)] * (array.ndim - 2)
    return jnp.pad(array, width, constant_values=value)


def split_time(array: jax.Array, size: int, padding: float) -> jax.Array:
    """[batch, time, ...] -> [tiles, batch, size, ...]; the last tile is filled up with `padding`."""
    batch, time = array.shape[:2]
    tiles = -(-time // size)
    array = pad_time(array, tiles * size - time, padding)
    return jnp.moveaxis(array.reshape(batch, tiles, size, *array.shape[2:]), 1, 0)


def join_time(tiled: jax.Array, time: int) -> jax.Array:
    """Inverse of `split_time`: [tiles, batch, size, ...] -> [batch, time, ...]."""
    tiles, batch, size = tiled.shape[:3]
    return jnp.moveaxis(tiled, 0, 1).reshape(batch, tiles * size, *tiled.shape[3:])[:, :time]


def map_time[T](function: Callable[..., T], *rows: Any, size: int) -> T:
    """`function(*rows)`, where `function` treats every row by itself, in tiles of at most `size` ≥ 1 rows of time.

    Args:
        function: from trees of arrays [batch, time, ...] to a tree of such arrays.
        rows: trees of arrays with the same leading axes; `function` sees the last tile filled up with zeros.
    """
    time = jax.tree.leaves(rows)[0].shape[1]
    if size >= time:
        return function(*rows)
    tiled = jax.lax.map(lambda tile: function(*tile), jax.tree.map(lambda array: split_time(array, size, 0), rows))
    result: T = jax.tree.map(lambda array: join_time(array, time), tiled)
    return result
