"""One token per row."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from deepinfer_jax.sampling.draw import draw
from deepinfer_jax.sampling.filters import processed_logprobs
from deepinfer_jax.sampling.lists import likeliest, token_logprobs
from deepinfer_jax.sampling.rows import SamplingRows


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
            top_tokens, top_logprobs = likeliest(logprobs, count)
        else:
            nothing = jnp.zeros((logits.shape[0], count), jnp.int32)
            top_tokens, top_logprobs = jax.lax.cond(
                wants_top, lambda: likeliest(logprobs, count), lambda: (nothing, nothing.astype(jnp.float32))
            )
        return Sampled(
            tokens=tokens,
            logprobs=token_logprobs(logprobs, tokens),
            finite=jnp.isfinite(best),  # a maximum carries NaN along
            top_tokens=top_tokens,
            top_logprobs=top_logprobs,
        )
