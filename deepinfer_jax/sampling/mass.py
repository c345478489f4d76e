"""Probability mass in integers."""

import jax.numpy as jnp
from jax import Array

UNIT_MASS = float(2**31)


def integer_mass(probabilities: Array) -> Array:
    """uint32 [rows, vocab], units of 2^-31; a row's sum stays below 2^32."""
    return jnp.round(probabilities * UNIT_MASS).astype(jnp.uint32)
