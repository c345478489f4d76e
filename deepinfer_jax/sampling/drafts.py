"""Drafts: drawn from the draft model's distribution, and judged by the target's (DB §6.4).

The standard rule. A draft d of the distribution q is accepted with probability min(1, p(d) / q(d)); if it is rejected,
the token comes from max(p - q, 0), normalised. Then the token has the distribution p, whatever q is: it is t with
probability min(p, q)(t) by acceptance, and with max(p - q, 0)(t) by rejection, since q is rejected in
1 - sum(min(p, q)) = sum(max(p - q, 0)) of all cases. All of it is counted in integer mass, in which the residual is
exact and needs no safety margin (DeepInfer's has one, 5e-5).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from deepinfer_jax.sampling.draw import draw
from deepinfer_jax.sampling.filters import processed_logprobs
from deepinfer_jax.sampling.mass import integer_mass
from deepinfer_jax.sampling.options import NO_OPTIONS, SamplerOptions
from deepinfer_jax.sampling.randomness import (
    ACCEPTANCE,
    DRAFT,
    FRESH_SAMPLE,
    RESIDUAL_SAMPLE,
    random_words,
    uniform_below,
)
from deepinfer_jax.sampling.rows import SamplingRows


class DraftRows(NamedTuple):
    """The drafts that the rows judge, each by itself.

    Attributes:
        tokens: int32 [rows]; negative: the row has none, its token is a fresh one.
        logprobs: float32 [rows, vocab], the distribution that the draft was drawn from.
    """

    tokens: Array
    logprobs: Array


def draw_draft(
    logits: Array, rows: SamplingRows, place: int, options: SamplerOptions = NO_OPTIONS
) -> tuple[Array, Array]:
    """Drafts from the draft model's logits float32 [rows, vocab]; `rows.position` is that of the draft.

    A position may be drafted by several blocks, until one gets there. Each draws anew, by the draft's `place` in its
    block, from 0: how many drafts of a block are verified may depend on what earlier blocks drafted (their confidences
    tell), so it would be biased if they drafted the same.

    The request's temperature and filters act, nothing else: no ban, penalty, mask or forced token (DB §6.2).

    Returns the tokens int32 [rows], of a greedy row the argmax, and their distributions, log-probabilities float32
    [rows, vocab]: a row of `DraftRows`.
    """
    logprobs = processed_logprobs(logits, rows, options)
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    drawn = jax.lax.cond(
        jnp.all(rows.greedy), lambda: best, lambda: draw(integer_mass(jnp.exp(logprobs)), rows, DRAFT + place)
    )
    return jnp.where(rows.greedy, best, drawn), logprobs


def judge(logprobs: Array, rows: SamplingRows, drafts: DraftRows) -> tuple[Array, Array]:
    """Whether each row accepts its draft, bool [rows], and its token, int32 [rows]: the draft, or one drawn.

    logprobs: the target's distribution, float32 [rows, vocab].
    """
    drafted = jnp.maximum(drafts.tokens, 0)[:, None]  # -1 would wrap (A19)
    draft_probs = jnp.exp(drafts.logprobs)
    mass, draft_mass = integer_mass(jnp.exp(logprobs)), integer_mass(jnp.where(draft_probs > 0, draft_probs, 0))
    of_target, of_draft = (jnp.take_along_axis(m, drafted, axis=-1)[:, 0] for m in (mass, draft_mass))
    level = uniform_below(of_draft, random_words(rows.seed, rows.position, ACCEPTANCE))
    # A draft that its own distribution excludes (NaN) was not drawn from it: the row's token is a fresh one.
    has_draft = (drafts.tokens >= 0) & (of_draft > 0)
    accepted = has_draft & (level < of_target)

    residual = jnp.where(mass > draft_mass, mass - draft_mass, 0)
    # Nothing is left only where q covers p but for rounding: then both are the same distribution.
    from_residual = has_draft & jnp.any(residual > 0, axis=-1)
    drawn = draw(
        jnp.where(from_residual[:, None], residual, mass), rows, jnp.where(has_draft, RESIDUAL_SAMPLE, FRESH_SAMPLE)
    )
    return accepted, jnp.where(accepted, drafts.tokens, drawn)
