"""`sample`: the whole sampler, from logits to one token per row and what is reported of it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from deepinfer_jax.sampling.adjust import Adjustments, adjusted_logits
from deepinfer_jax.sampling.drafts import DraftRows, judge
from deepinfer_jax.sampling.draw import draw
from deepinfer_jax.sampling.filters import processed_logprobs
from deepinfer_jax.sampling.lists import likeliest, reported_logprobs, sum_smaller, token_logprobs
from deepinfer_jax.sampling.mass import integer_mass
from deepinfer_jax.sampling.options import NO_OPTIONS, SamplerOptions
from deepinfer_jax.sampling.randomness import FRESH_SAMPLE
from deepinfer_jax.sampling.rows import SamplingRows


class Sampled(NamedTuple):
    """The tokens of a step.

    Attributes:
        tokens: int32 [rows].
        accepted: bool [rows]: the token is the row's draft, as the rule of verification wants it; false without one.
        logprobs: float32 [rows], of the target's distribution, at least MIN_LOGPROB; see `SamplingRows.raw_logprobs`.
        finite: bool [rows], false where the logits are no distribution: they held NaN or +inf, or were all -inf (also
            by bans and masks), or all zero, as only a final state or a head of zeros makes them (memory that nobody
            wrote).
        top_tokens, top_logprobs: int32 and float32 [rows, num_top], descending, lowest id on ties.
        sum_smaller_probs: float32 [rows], see `sum_smaller`; None unless the options ask for it.
        draft_logprobs: float32 [rows], of the row's draft in the distribution that it was drawn from, at least
            MIN_LOGPROB, meaningless without one; None unless the options ask for it, and without drafts.
    """

    tokens: Array
    accepted: Array
    logprobs: Array
    finite: Array
    top_tokens: Array
    top_logprobs: Array
    sum_smaller_probs: Array | None
    draft_logprobs: Array | None


def sample(
    logits: Array,
    rows: SamplingRows,
    *,
    options: SamplerOptions = NO_OPTIONS,
    tables: Adjustments | None = None,
    drafts: DraftRows | None = None,
    num_top: int = 0,
    wants_top: Array | None = None,
) -> Sampled:
    """One token per row from `logits` float32 [rows, vocab].

    A row with a draft gives the draft or, having rejected it, another token, so that the token has the row's
    distribution in either case; a greedy row accepts its argmax only. Of the rows of one sequence only those up to the
    first that accepts no draft mean anything.

    A greedy step costs few passes over the logits; filters, draws and `tables` cost only if some row needs them, and
    with `wants_top`, bool [], the lists of the `num_top` likeliest tokens only where it holds (zeros otherwise).
    """
    with jax.named_scope("sample"):
        best, all_zero = jnp.max(logits, axis=-1), jnp.all(logits == 0, axis=-1)
        sound = jnp.isfinite(best) & ~all_zero  # a maximum carries NaN along
        target = logits
        if options.blacklist:
            target = jnp.where(_members(options.blacklist, logits.shape[-1]), -jnp.inf, target)
        if tables is not None:
            target = adjusted_logits(target, rows, tables)
        finite = sound & jnp.isfinite(jnp.max(target, axis=-1))

        logprobs = processed_logprobs(target, rows, options)
        tokens, accepted = _chosen(target, logprobs, rows, drafts)

        reported = reported_logprobs(logits, logprobs, rows)
        count = min(num_top, logits.shape[-1])
        if wants_top is None or count == 0:
            top_tokens, top_logprobs = likeliest(reported, count)
        else:
            nothing = jnp.zeros((logits.shape[0], count), jnp.int32)
            top_tokens, top_logprobs = jax.lax.cond(
                wants_top, lambda: likeliest(reported, count), lambda: (nothing, nothing.astype(jnp.float32))
            )
        sums = draft_logprobs = None
        if options.sum_smaller_probs:
            sums = sum_smaller(logprobs, tokens)
            if drafts is not None:
                draft_logprobs = token_logprobs(drafts.logprobs, jnp.maximum(drafts.tokens, 0))
        return Sampled(
            tokens=tokens,
            accepted=accepted & finite,  # the first row without a distribution is a sequence's last
            logprobs=token_logprobs(reported, tokens),
            finite=finite,
            top_tokens=top_tokens,
            top_logprobs=top_logprobs,
            sum_smaller_probs=sums,
            draft_logprobs=draft_logprobs,
        )


def _members(ids: tuple[int, ...], vocab: int) -> np.ndarray:
    """bool [vocab]."""
    members = np.zeros(vocab, np.bool_)
    members[list(ids)] = True
    return members


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
