"""Reports on a distribution: log-probabilities of tokens, lists of the likeliest, sums."""

import jax
import jax.numpy as jnp
from jax import Array

from deepinfer_jax.sampling.filters import processed_logprobs
from deepinfer_jax.sampling.options import NO_OPTIONS, SamplerOptions
from deepinfer_jax.sampling.rows import SamplingRows

MIN_LOGPROB = -9999.0


def token_logprobs(logprobs: Array, tokens: Array) -> Array:
    """The entries of logprobs [rows, vocab] at tokens [rows], at least MIN_LOGPROB."""
    values = jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
    return jnp.maximum(values, MIN_LOGPROB)


def reported_logprobs(logits: Array, processed: Array, rows: SamplingRows) -> Array:
    """The log-probabilities float32 [rows, vocab] that are reported: those that are sampled from, or the model's."""
    return jax.lax.cond(
        jnp.any(rows.raw_logprobs),
        lambda: jnp.where(rows.raw_logprobs[:, None], jax.nn.log_softmax(logits), processed),
        lambda: processed,
    )


def prompt_logprobs(logits: Array, rows: SamplingRows, tokens: Array, options: SamplerOptions = NO_OPTIONS) -> Array:
    """float32 [rows], of the prompt's tokens [rows] behind logits [rows, vocab] (DB §7.7), at least MIN_LOGPROB.

    Under temperature and filters, or the model's; bans, biases, penalties and masks are for what is generated.
    """
    reported = reported_logprobs(logits, processed_logprobs(logits, rows, options), rows)
    return jnp.where(tokens < logits.shape[1], token_logprobs(reported, tokens), MIN_LOGPROB)


def likeliest(logprobs: Array, count: int) -> tuple[Array, Array]:
    """int32 and float32 [rows, count], in descending order, lowest id first on ties."""
    values, tokens = jax.lax.top_k(logprobs, count)
    return tokens.astype(jnp.int32), jnp.maximum(values, MIN_LOGPROB)


def sum_smaller(logprobs: Array, tokens: Array) -> Array:
    """float32 [rows]: the probability of all that is less likely than tokens [rows], or equally likely with an id up
    to theirs (DB §7.8)."""
    own = jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)
    up_to = jnp.arange(logprobs.shape[-1]) <= tokens[:, None]
    smaller = (logprobs < own) | ((logprobs == own) & up_to)
    return jnp.sum(jnp.where(smaller, jnp.exp(logprobs), 0), axis=-1)
