"""A token from a distribution."""

import jax.numpy as jnp
from jax import Array

from deepinfer_jax.sampling.mass import integer_mass
from deepinfer_jax.sampling.randomness import FRESH_SAMPLE, random_words, uniform_below
from deepinfer_jax.sampling.rows import SamplingRows


def draw(logprobs: Array, rows: SamplingRows) -> Array:
    """int32 [rows]: token t with probability exp(logprobs[t]), by inversion in order of ids."""
    mass = integer_mass(jnp.exp(logprobs))
    cumulative = jnp.cumsum(mass, axis=-1)
    target = uniform_below(cumulative[:, -1], random_words(rows.seed, rows.position, FRESH_SAMPLE))
    return jnp.argmax(cumulative > target[:, None], axis=-1).astype(jnp.int32)
