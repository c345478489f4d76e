"""Counter-based random numbers, and uniform integers from them."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.random import threefry_2x32

# The purposes of a draw: the second word of its counter.
FRESH_SAMPLE = 0
RESIDUAL_SAMPLE = 1  # after a draft was rejected
ACCEPTANCE = 2
DRAFT = 3  # and the numbers behind it: of the drafts of a block, from the first on


def random_words(seed: Array, position: Array, purpose: int | Array) -> Array:
    """uint32 [rows, 2]: Threefry-2x32 of counter (position, purpose) under key seed [rows, 2].

    purpose: one for all rows, or one for each.
    """
    purposes = jnp.broadcast_to(jnp.asarray(purpose, jnp.uint32), position.shape)
    counter = jnp.stack([position.astype(jnp.uint32), purposes], axis=-1)
    return jax.vmap(threefry_2x32)(seed, counter)


def uniform_below(total: Array, words: Array) -> Array:
    """uint32 [rows]: floor(total * w / 2^64) of the 64-bit words w = (low, high), uniform in [0, total).

    The bias is below total / 2^64.
    """
    low, high = words[:, 0], words[:, 1]
    carry_from_low = _multiply_high(total, low)
    product_low = total * high
    overflow = (product_low + carry_from_low) < product_low
    return _multiply_high(total, high) + overflow.astype(jnp.uint32)


def _multiply_high(a: Array, b: Array) -> Array:
    """The upper 32 bits of the 64-bit product of uint32 `a` and `b`, in 16-bit pieces (no x64 flag)."""
    a_low, a_high = a & 0xFFFF, a >> 16
    b_low, b_high = b & 0xFFFF, b >> 16
    middle = a_high * b_low + (a_low * b_low >> 16)
    other = a_low * b_high + (middle & 0xFFFF)
    return a_high * b_high + (middle >> 16) + (other >> 16)
