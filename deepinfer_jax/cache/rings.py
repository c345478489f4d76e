"""Positions in a ring: where the keys of a sequence's last tokens lie, and in which order they are read.

The key of position p lies at place p % length, in the dense cache and in the slots of the paged one.
"""

import jax
import jax.numpy as jnp


def ring_positions(end: jax.Array, window: int) -> jax.Array:
    """Position of the newest token in each place of a ring that holds positions below `end`, −1 if there is none.

    end: int32 [batch] -> int32 [batch, window]. Example: end 5, window 4 -> [4, 1, 2, 3].
    """
    last = end[:, None] - 1
    newest = last - (last - jnp.arange(window, dtype=jnp.int32)) % window
    return jnp.maximum(newest, -1)


def positions_before(start: jax.Array, count: int) -> jax.Array:
    """The positions start − count … start − 1, negative ones included. int32 [batch] -> int32 [batch, count]."""
    return start[:, None] - count + jnp.arange(count, dtype=jnp.int32)
