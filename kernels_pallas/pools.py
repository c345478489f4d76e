"""Reads and writes of arrays that lie in pools, one pool for each part of a leading data axis.

Each part reads and writes its own pool only, so that nothing moves when the axis is spread over devices.
"""

import jax


def read_pool(pool: jax.Array, *index: jax.Array) -> jax.Array:
    """pool [data, n, ...] at `index`, one int32 [data, ...] for each indexed axis -> [data, ..., ...].

    Numbers out of range read anything.
    """
    return jax.vmap(lambda own, *numbers: own.at[numbers].get(mode="clip"))(pool, *index)


def write_pool(pool: jax.Array, index: tuple[jax.Array, ...], values: jax.Array) -> jax.Array:
    """pool [data, n, ...] with `values` [data, ..., ...] at `index`, one int32 [data, ...] for each indexed axis.

    What is out of range is dropped; a negative number would wrap (A19).
    """

    def write(own: jax.Array, number: tuple[jax.Array, ...], value: jax.Array) -> jax.Array:
        return own.at[number].set(value, mode="drop")

    return jax.vmap(write)(pool, index, values)
