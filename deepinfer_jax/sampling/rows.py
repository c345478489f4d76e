"""What each row of a step asks for."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

GREEDY_TEMPERATURE = 1e-5


class SamplingRows(NamedTuple):
    """Parameters of the rows. All arrays are `[rows]` unless said otherwise.

    Attributes:
        temperature: float32, > 0; greedy rows hold GREEDY_TEMPERATURE.
        greedy: bool, exact argmax, lowest id on ties.
        top_p: float32; >= 1 disables.
        top_k: int32; negative disables.
        min_p: float32; 0 disables.
        raw_logprobs: bool, the log-probabilities that come out are those of the model, softmax(logits); else those of
            the distribution sampled from.
        presence, frequency, repetition: float32 penalties, see `adjusted_logits`; used where `counts` >= 0.
        seed: uint32 [rows, 2], low and high word of the request's `seq_seed`.
        position: int32, index of the token to be produced in its sequence.
        forced: int32, the id that must be produced; negative for none. It bypasses the filters and whatever changes
            the logits (DB §7.6).
        edits, counts, mask: int32, the row's place in these parts of `Adjustments`; negative: none.
        uncounted: int32 [rows, k], output tokens before the row that `Adjustments.counts` does not count yet;
            negative: none.
    """

    temperature: Array
    greedy: Array
    top_p: Array
    top_k: Array
    min_p: Array
    raw_logprobs: Array
    presence: Array
    frequency: Array
    repetition: Array
    seed: Array
    position: Array
    forced: Array
    edits: Array
    counts: Array
    mask: Array
    uncounted: Array


def plain_rows(count: int) -> SamplingRows:
    """Rows that draw from softmax(logits), of seed 0 and position 0; to be changed by `_replace`."""
    none = jnp.full(count, -1, jnp.int32)
    off, on = jnp.zeros(count, jnp.bool_), jnp.ones(count, jnp.float32)
    return SamplingRows(
        temperature=on,
        greedy=off,
        top_p=on,
        top_k=none,
        min_p=0 * on,
        raw_logprobs=off,
        presence=0 * on,
        frequency=0 * on,
        repetition=on,
        seed=jnp.zeros((count, 2), jnp.uint32),
        position=jnp.zeros(count, jnp.int32),
        forced=none,
        edits=none,
        counts=none,
        mask=none,
        uncounted=none[:, None],
    )
