"""The time axis in tiles, for `lax.map` over rows that would need too much memory at once."""

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
