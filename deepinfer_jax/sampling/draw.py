"""A token from a distribution."""

import jax.numpy as jnp
from jax import Array

from deepinfer_jax.sampling.randomness import random_words, uniform_below
from deepinfer_jax.sampling.rows import SamplingRows


def draw(mass: Array, rows: SamplingRows, purpose: int | Array) -> Array:
    """int32 [rows]: token t with probability mass[t] / sum(mass), by inversion in order of ids.

    mass: uint32 [rows, vocab], of `integer_mass`; purpose: one for all rows, or one for each.
    """
    cumulative = jnp.cumsum(mass, axis=-1)
    target = uniform_below(cumulative[:, -1], random_words(rows.seed, rows.position, purpose))
    return jnp.argmax(cumulative > target[:, None], axis=-1).astype(jnp.int32)
