"""Logits to tokens and log-probabilities, on the device (DB §7).

Randomness is counter-based: a draw depends on the row's seed, position and purpose and on the row's
distribution, and on nothing else; never on neighbours, slot, bucket or chunking.

Probability mass is counted in integers, units of 2^-31 (as DB §7.3 and §7.5): sums of integers do
not depend on the order of summation. Tokens below half a unit are therefore never drawn.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.random import threefry_2x32

MIN_LOGPROB = -9999.0
GREEDY_TEMPERATURE = 1e-5

# The purposes of a draw: the second word of its counter.
FRESH_SAMPLE = 0

_UNIT_MASS = float(2**31)


class SamplingRows(NamedTuple):
    """What each row of a step asks for. All arrays are `[rows]` unless said otherwise.

    Attributes:
        temperature: float32, > 0; greedy rows hold GREEDY_TEMPERATURE.
        greedy: bool, exact argmax, lowest id on ties.
        top_p: float32; >= 1 disables.
        top_k: int32; negative disables.
        seed: uint32 [rows, 2], low and high word of the request's `seq_seed`.
        position: int32, index of the token to be produced in its sequence.
        banned: int32, an id that must not be produced; negative for none.
        forced: int32, the id that must be produced; negative for none. It bypasses the filters and
            the ban (DB §7.6).
    """

    temperature: Array
    greedy: Array
    top_p: Array
    top_k: Array
    seed: Array
    position: Array
    banned: Array
    forced: Array


class Sampled(NamedTuple):
    """The tokens of a step.

    Attributes:
        tokens: int32 [rows].
        logprobs: float32 [rows], of the distribution sampled from, at least MIN_LOGPROB.
        finite: bool [rows], false where the logits held NaN or +inf or were all -inf.
        top_tokens, top_logprobs: int32 and float32 [rows, num_top], descending, lowest id on ties.
    """

    tokens: Array
    logprobs: Array
    finite: Array
    top_tokens: Array
    top_logprobs: Array


def sample(logits: Array, rows: SamplingRows, *, num_top: int = 0, wants_top: Array | None = None) -> Sampled:
    """One token per row from `logits` float32 [rows, vocab].

    A greedy step costs one pass over the logits; filters and draws run only if some row needs them, and with
    `wants_top`, bool [], the lists of the `num_top` likeliest tokens only where it holds (zeros otherwise).
    """
    with jax.named_scope("sample"):
        best = jnp.max(logits, axis=-1)
        vocab = logits.shape[-1]
        banned = jnp.where(rows.banned >= 0, rows.banned, vocab)  # a negative index would wrap (A19)
        logits = logits.at[jnp.arange(logits.shape[0]), banned].set(-jnp.inf, mode="drop")
        logprobs = processed_logprobs(logits, rows.temperature, rows.top_p, rows.top_k)

        tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)  # the first maximum: lowest id
        drawn = jax.lax.cond(jnp.all(rows.greedy), lambda: tokens, lambda: draw(logprobs, rows))
        tokens = jnp.where(rows.greedy, tokens, drawn)
        tokens = jnp.where(rows.forced >= 0, rows.forced, tokens)

        count = min(num_top, vocab)
        if wants_top is None or count == 0:
            top_tokens, top_logprobs = _likeliest(logprobs, count)
        else:
            nothing = jnp.zeros((logits.shape[0], count), jnp.int32)
            top_tokens, top_logprobs = jax.lax.cond(
                wants_top, lambda: _likeliest(logprobs, count), lambda: (nothing, nothing.astype(jnp.float32))
            )
        return Sampled(
            tokens=tokens,
            logprobs=token_logprobs(logprobs, tokens),
            finite=jnp.isfinite(best),  # a maximum carries NaN along
            top_tokens=top_tokens,
            top_logprobs=top_logprobs,
        )


def _likeliest(logprobs: Array, count: int) -> tuple[Array, Array]:
    """int32 and float32 [rows, count], in descending order, lowest id first on ties."""
    values, tokens = jax.lax.top_k(logprobs, count)
    return tokens.astype(jnp.int32), jnp.maximum(values, MIN_LOGPROB)


def processed_logprobs(logits: Array, temperature: Array, top_p: Array, top_k: Array) -> Array:
    """Log-probabilities after temperature, top-p and top-k, renormalised; -inf outside (DB §7.3).

    Both filters look at the full softmax of logits / temperature, sorted in descending order with
    the lowest id first on ties: top-k keeps ranks below k, top-p keeps a rank iff the mass strictly
    before it is at most top_p; with both, what both keep.

    Arguments: logits float32 [rows, vocab]; temperature, top_p float32 [rows]; top_k int32 [rows].
    Returns float32 [rows, vocab].
    """
    # The maximum goes first: at temperature 1e-5 the quotient alone would overflow.
    scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature[:, None]
    filtered = (top_p < 1.0) | ((top_k >= 0) & (top_k < logits.shape[-1]))
    scaled = jax.lax.cond(
        jnp.any(filtered),
        lambda: jnp.where(_kept(scaled, top_p, top_k), scaled, -jnp.inf),
        lambda: scaled,
    )
    return scaled - jnp.log(jnp.sum(jnp.exp(scaled), axis=-1, keepdims=True))


def token_logprobs(logprobs: Array, tokens: Array) -> Array:
    """The entries of logprobs [rows, vocab] at tokens [rows], at least MIN_LOGPROB."""
    values = jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
    return jnp.maximum(values, MIN_LOGPROB)


def draw(logprobs: Array, rows: SamplingRows) -> Array:
    """int32 [rows]: token t with probability exp(logprobs[t]), by inversion in order of ids."""
    mass = _integer_mass(jnp.exp(logprobs))
    cumulative = jnp.cumsum(mass, axis=-1)
    target = _uniform_below(cumulative[:, -1], random_words(rows.seed, rows.position, FRESH_SAMPLE))
    return jnp.argmax(cumulative > target[:, None], axis=-1).astype(jnp.int32)


def random_words(seed: Array, position: Array, purpose: int) -> Array:
    """uint32 [rows, 2]: Threefry-2x32 of counter (position, purpose) under key seed [rows, 2]."""
    counter = jnp.stack([position.astype(jnp.uint32), jnp.full(position.shape, purpose, jnp.uint32)], axis=-1)
    return jax.vmap(threefry_2x32)(seed, counter)


def _kept(scaled: Array, top_p: Array, top_k: Array) -> Array:
    """bool [rows, vocab]: what both filters keep, found without sorting.

    The ranks of the tokens of one logit value are consecutive. So all values above some threshold
    are kept whole, the threshold's own tokens as far as the budgets reach, nothing below. The
    threshold is the smallest key whose first token is kept: 32 halvings over order-preserving
    integer keys.
    """
    vocab = scaled.shape[-1]
    key = _ordered_key(scaled)
    mass = _integer_mass(jax.nn.softmax(scaled, axis=-1))
    max_count = jnp.where(top_k >= 0, top_k, vocab)[:, None]
    max_mass = jnp.where(top_p < 1.0, jnp.round(top_p * _UNIT_MASS), 2.0**32 - 256.0)[:, None]
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


def _integer_mass(probabilities: Array) -> Array:
    """uint32 [rows, vocab], units of 2^-31; a row's sum stays below 2^32."""
    return jnp.round(probabilities * _UNIT_MASS).astype(jnp.uint32)


def _uniform_below(total: Array, words: Array) -> Array:
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
