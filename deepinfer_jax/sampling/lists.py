"""Log-probabilities of tokens, and lists of the likeliest."""

import jax
import jax.numpy as jnp
from jax import Array

MIN_LOGPROB = -9999.0


def token_logprobs(logprobs: Array, tokens: Array) -> Array:
    """The entries of logprobs [rows, vocab] at tokens [rows], at least MIN_LOGPROB."""
    values = jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
    return jnp.maximum(values, MIN_LOGPROB)


def likeliest(logprobs: Array, count: int) -> tuple[Array, Array]:
    """int32 and float32 [rows, count], in descending order, lowest id first on ties."""
    values, tokens = jax.lax.top_k(logprobs, count)
    return tokens.astype(jnp.int32), jnp.maximum(values, MIN_LOGPROB)
