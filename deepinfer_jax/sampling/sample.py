"""One token per row."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from deepinfer_jax.sampling.drafts import DraftRows, judge
from deepinfer_jax.sampling.draw import draw
from deepinfer_jax.sampling.filters import processed_logprobs
from deepinfer_jax.sampling.lists import likeliest, token_logprobs
from deepinfer_jax.sampling.mass import integer_mass
from deepinfer_jax.sampling.randomness import FRESH_SAMPLE
from deepinfer_jax.sampling.rows import SamplingRows


class Sampled(NamedTuple):
    """The tokens of a step.

    Attributes:
        tokens: int32 [rows].
        accepted: bool [rows]: the token is the row's draft, as the rule of verification wants it; false without one.
        logprobs: float32 [rows], of the target's distribution, at least MIN_LOGPROB.
        finite: bool [rows], false where the logits are no distribution: they held NaN or +inf, or were all -inf, or
            all zero, as only a final state or a head of zeros makes them (memory that nobody wrote).
        top_tokens, top_logprobs: int32 and float32 [rows, num_top], descending, lowest id on ties.
    """

    tokens: Array
    accepted: Array
    logprobs: Array
    finite: Array
    top_tokens: Array
    top_logprobs: Array


def sample(
    logits: Array,
    rows: SamplingRows,
    *,
    drafts: DraftRows | None = None,
    num_top: int = 0,
    wants_top: Array | None = None,
) -> Sampled:
    """One token per row from `logits` float32 [rows, vocab].

    A row with a draft gives the draft or, having rejected it, another token, so that the token has the row's
    distribution in either case; a greedy row accepts its argmax only. Of the rows of one sequence only those up to the
    first that accepts no draft mean anything.

    A greedy step costs one pass over the logits; filters and draws run only if some row needs them, and with
    `wants_top`, bool [], the lists of the `num_top` likeliest tokens only where it holds (zeros otherwise).
    """
    with jax.named_scope("sample"):
        best, all_zero = jnp.max(logits, axis=-1), jnp.all(logits == 0, axis=-1)
        finite = jnp.isfinite(best) & ~all_zero  # a maximum carries NaN along
        vocab = logits.shape[-1]
        banned = jnp.where(rows.banned >= 0, rows.banned, vocab)  # a negative index would wrap (A19)
        logits = logits.at[jnp.arange(logits.shape[0]), banned].set(-jnp.inf, mode="drop")
        logprobs = processed_logprobs(logits, rows.temperature, rows.top_p, rows.top_k)
        tokens, accepted = _chosen(logits, logprobs, rows, drafts)

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
            accepted=accepted & finite,  # the first row without a distribution is a sequence's last
            logprobs=token_logprobs(logprobs, tokens),
            finite=finite,
            top_tokens=top_tokens,
            top_logprobs=top_logprobs,
        )


def _chosen(logits: Array, logprobs: Array, rows: SamplingRows, drafts: DraftRows | None) -> tuple[Array, Array]:
    """The tokens int32 [rows], and which of them are accepted drafts."""
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)  # the first maximum: lowest id
    drafted = jnp.full_like(best, -1) if drafts is None else drafts.tokens

    def drawn() -> tuple[Array, Array]:
        if drafts is None:
            return jnp.zeros(best.shape, jnp.bool_), draw(integer_mass(jnp.exp(logprobs)), rows, FRESH_SAMPLE)
        return judge(logprobs, rows, drafts)

    accepted, tokens = jax.lax.cond(jnp.all(rows.greedy), lambda: (best == drafted, best), drawn)
    accepted = jnp.where(rows.greedy, best == drafted, accepted)
    tokens = jnp.where(rows.greedy, best, tokens)
    is_forced = rows.forced >= 0
    return jnp.where(is_forced, rows.forced, tokens), jnp.where(is_forced, rows.forced == drafted, accepted)
