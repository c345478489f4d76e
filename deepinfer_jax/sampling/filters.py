"""Temperature, min-p, top-p and top-k."""

import jax
import jax.numpy as jnp
from jax import Array

from deepinfer_jax.sampling.mass import UNIT_MASS, integer_mass
from deepinfer_jax.sampling.options import NO_OPTIONS, SamplerOptions
from deepinfer_jax.sampling.rows import SamplingRows


def processed_logprobs(logits: Array, rows: SamplingRows, options: SamplerOptions = NO_OPTIONS) -> Array:
    """Log-probabilities after temperature, min-p, top-p and top-k, renormalised; -inf outside (DB §7.3).

    All filters look at the full softmax of logits / temperature, sorted in descending order with the lowest id first on
    ties: top-k keeps ranks below k, top-p keeps a rank iff the mass strictly before it is at most top_p, min-p keeps
    what has at least min_p times the largest probability; with several, what all keep. With `options.force_top_k` the
    other logits do not exist (DB §7.9).

    logits float32 [rows, vocab] -> float32 [rows, vocab].
    """
    vocab = logits.shape[-1]
    # The maximum goes first: at temperature 1e-5 the quotient alone would overflow.
    scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / rows.temperature[:, None]
    if 0 < options.force_top_k < vocab:
        everything = jnp.ones_like(rows.top_p)
        kept = _kept(scaled, everything, jnp.full_like(rows.top_k, options.force_top_k))
        scaled = jnp.where(kept, scaled, -jnp.inf)
    ranked = jnp.any((rows.top_p < 1.0) | ((rows.top_k >= 0) & (rows.top_k < vocab)))

    def within_filters() -> Array:
        likely = scaled >= jnp.log(rows.min_p)[:, None]
        kept = jax.lax.cond(ranked, lambda: likely & _kept(scaled, rows.top_p, rows.top_k), lambda: likely)
        return jnp.where(kept, scaled, -jnp.inf)

    scaled = jax.lax.cond(ranked | jnp.any(rows.min_p > 0), within_filters, lambda: scaled)
    return scaled - jnp.log(jnp.sum(jnp.exp(scaled), axis=-1, keepdims=True))


def _kept(scaled: Array, top_p: Array, top_k: Array) -> Array:
    """bool [rows, vocab]: what top-p and top-k both keep, found without sorting.

    The ranks of the tokens of one logit value are consecutive. So all values above some threshold
    are kept whole, the threshold's own tokens as far as the budgets reach, nothing below. The
    threshold is the smallest key whose first token is kept: 32 halvings over order-preserving
    integer keys.
    """
    vocab = scaled.shape[-1]
    key = _ordered_key(scaled)
    mass = integer_mass(jax.nn.softmax(scaled, axis=-1))
    max_count = jnp.where(top_k >= 0, top_k, vocab)[:, None]
    max_mass = jnp.where(top_p < 1.0, jnp.round(top_p * UNIT_MASS), 2.0**32 - 256.0)[:, None]
    max_mass = max_mass.astype(jnp.uint32)

    def above(threshold: Array) -> tuple[Array, Array]:
        higher = key > threshold
        count = jnp.sum(higher, axis=-1, keepdims=True, dtype=jnp.int32)
        return count, jnp.sum(jnp.where(higher, mass, 0), axis=-1, keepdims=True, dtype=jnp.uint32)

    def halve(bit: Array, threshold: Array) -> Array:
        # Greedily clears bits from the top: `threshold` always has a kept first token.
        lower = threshold - (jnp.uint32(1) << (31 - bit).astype(jnp.uint32))
        count, before = above(lower)
        return jnp.where((count < max_count) & (before <= max_mass), lower, threshold)

    highest = jnp.full((scaled.shape[0], 1), 2**32 - 1, jnp.uint32)
    threshold = jax.lax.fori_loop(0, 32, halve, highest)

    count, before = above(threshold)
    tied = key == threshold
    tie_rank = jnp.cumsum(tied, axis=-1, dtype=jnp.int32) - 1
    tie_mass = before + tie_rank.astype(jnp.uint32) * mass  # where tied at most the row's sum: no overflow
    fits = (count + tie_rank < max_count) & (tie_mass <= max_mass)
    return (key > threshold) | (tied & fits)


def _ordered_key(values: Array) -> Array:
    """uint32 keys with the order of float32 `values`; +0 and -0 get the same key."""
    bits = jax.lax.bitcast_convert_type(jnp.where(values == 0, 0.0, values), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))
