"""Whole runs with drafts: blocks are drafted, verified and extended over several steps, and the texts have the joint
distribution of a target that nobody drafts for."""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.sampling import Adjustments, DraftRows, SamplingRows, draw_draft, sample
from tests.support.sampling_twin import assert_distributed, brute_force_logprobs, make_rows

pytestmark = [pytest.mark.toy, pytest.mark.unoptimised]

RUNS, VOCAB, TOKENS, DRAFTS = 60_000, 4, 4, 3
START = 1  # the prompt
RNG = np.random.default_rng(7)
# The next logits depend on the last two tokens; the draft model agrees to a part, and knows the last one only.
TARGET = (RNG.normal(size=(VOCAB, VOCAB, VOCAB)) * 1.2).astype(np.float32)
DRAFT = (0.6 * TARGET.mean(0) + 0.6 * RNG.normal(size=(VOCAB, VOCAB))).astype(np.float32)
# A grammar: which tokens may follow which.
FOLLOWERS = {0: [1, 2, 3], 1: [0, 2], 2: [2, 3], 3: [0, 1, 2]}

PARAMETERS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "top-p": {"top_p": 0.75},
    "top-k": {"top_k": 2, "temperature": 1.4},
    "min-p": {"min_p": 0.3},
    "mask": {"masked": True},
    "penalties": {"presence": 0.8, "frequency": 0.5, "repetition": 1.5},
    "all": {
        "temperature": 1.2, "top_p": 0.9, "top_k": 3, "min_p": 0.05, "masked": True,
        "presence": 0.5, "frequency": -0.4, "repetition": 1.3,
    },
}  # fmt: skip


def target_probabilities(history: list[int], parameters: dict[str, Any]) -> np.ndarray:
    """What the token after prompt and output is drawn from, by the formulas."""
    given = parameters.copy()
    logits = TARGET[history[-2] if len(history) > 1 else START, history[-1]].astype(np.float64).copy()
    presence, frequency, repetition = (
        given.pop(n, d) for n, d in (("presence", 0), ("frequency", 0), ("repetition", 1))
    )
    for token in set(history):
        logits[token] *= 1 / repetition if logits[token] > 0 else repetition
        logits[token] -= frequency * history[1:].count(token) + presence * (token in history[1:])
    if given.pop("masked", False):
        logits[[token for token in range(VOCAB) if token not in FOLLOWERS[history[-1]]]] = -np.inf
    return np.exp(brute_force_logprobs(logits.astype(np.float32), **given))


def draft_probabilities(last: int, parameters: dict[str, Any]) -> np.ndarray:
    """Temperature and filters alone."""
    names = ("temperature", "top_p", "top_k", "min_p")
    return np.exp(brute_force_logprobs(DRAFT[last], **{n: v for n, v in parameters.items() if n in names}))


class Runs(NamedTuple):
    """texts int32 [runs, 1 + tokens …]: prompt and output; accepted bool [runs, drafts], of the first step."""

    texts: np.ndarray
    accepted: np.ndarray


def tables() -> Adjustments:
    """The prompt's count, and a mask for each last token."""
    masks = [sum(1 << token for token in FOLLOWERS[last]) for last in range(VOCAB)]
    none = jnp.full((1, 1), -1, jnp.int32)
    counts = jnp.zeros((1, VOCAB), jnp.int32).at[0, START].set(1)
    return Adjustments(none, none.astype(jnp.float32), none, counts, jnp.asarray(masks, jnp.uint32)[:, None])


@functools.partial(jax.jit, static_argnames="masked")
def one_step(
    rows: SamplingRows, texts: jax.Array, lengths: jax.Array, masked: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Drafts a block behind each text, judges it, and adds what is accepted and one token more.

    texts: int32 [runs, most]; lengths: int32 [runs]. Returns both, and what was accepted, bool [runs, drafts].
    """
    run = jnp.arange(len(texts))

    def at(position: jax.Array) -> jax.Array:
        return texts.at[run, position].get(mode="clip")

    block, logprobs = [at(lengths - 1)], []
    for index in range(DRAFTS):
        token, own = draw_draft(jnp.asarray(DRAFT)[block[-1]], rows.replace(position=lengths + index), index)
        block.append(token)
        logprobs.append(own)
    drafts = jnp.stack(block[1:], axis=1)

    # Row j of a text judges draft j behind the drafts before it; the last row has none.
    inputs = jnp.stack([jnp.where(lengths > 1, at(lengths - 2), START), *block], axis=1)
    allowed = (tables().masks[inputs[:, 1:-1], 0] >> drafts.astype(jnp.uint32)) & 1 == 1
    reached = jnp.concatenate([jnp.ones((len(texts), 1), bool), jnp.cumprod(allowed, axis=1) == 1], axis=1)
    places = jnp.arange(1, texts.shape[1])
    output = jnp.where(places < lengths[:, None], texts[:, 1:], -1)
    sampled = []
    for row in range(DRAFTS + 1):
        before = jnp.where(jnp.arange(DRAFTS) < row, drafts, -1)
        last = inputs[:, row + 1]
        own = rows.replace(
            position=lengths + row,
            mask=jnp.where(reached[:, row] & masked, last, -1),
            uncounted=jnp.concatenate([output, before], axis=1),
        )
        judged = (
            DraftRows(drafts[:, row], logprobs[row])
            if row < DRAFTS
            else DraftRows(jnp.full_like(last, -1), jnp.zeros((len(texts), VOCAB)))
        )
        sampled.append(sample(jnp.asarray(TARGET)[inputs[:, row], last], own, tables=tables(), drafts=judged))
    accepted = jnp.stack([row.accepted for row in sampled[:-1]], axis=1)
    count = jnp.sum(jnp.cumprod(accepted, axis=1), axis=1)
    for row, own in enumerate(sampled):
        place = jnp.where(row <= count, lengths + row, texts.shape[1])
        texts = texts.at[run, place].set(own.tokens, mode="drop")
    return texts, lengths + count + 1, accepted


@functools.cache
def runs(name: str) -> Runs:
    fields = PARAMETERS[name].copy()
    masked = fields.pop("masked", False)
    penalised = bool({"presence", "frequency", "repetition"} & set(fields))
    seeds = np.stack([np.arange(RUNS), np.full(RUNS, 9)], axis=1)
    rows = make_rows(RUNS, seed=seeds, counts=0 if penalised else -1, **fields)
    texts = jnp.full((RUNS, TOKENS + DRAFTS + 1), -1, jnp.int32).at[:, 0].set(START)
    lengths, first = jnp.ones(RUNS, jnp.int32), None
    for _ in range(TOKENS):  # each gives at least one
        texts, lengths, accepted = one_step(rows, texts, lengths, masked)
        first = accepted if first is None else first
    assert int(lengths.min()) >= 1 + TOKENS
    return Runs(np.asarray(texts)[:, : 1 + TOKENS], np.asarray(first))


@pytest.mark.parametrize("name", PARAMETERS)
def test_texts_have_the_targets_joint_distribution(name: str) -> None:
    parameters = PARAMETERS[name]
    expected = np.ones((VOCAB,) * TOKENS)
    for text in itertools.product(range(VOCAB), repeat=TOKENS):
        for count in range(TOKENS):
            expected[text] *= target_probabilities([START, *text[:count]], parameters)[text[count]]
    assert expected.sum() == pytest.approx(1, abs=1e-5)
    cells = np.ravel_multi_index(tuple(runs(name).texts[:, 1:].T), expected.shape)
    assert_distributed(cells, expected.ravel())


@pytest.mark.parametrize("name", PARAMETERS)
def test_drafts_are_accepted_as_often_as_the_distributions_overlap(name: str) -> None:
    parameters, accepted = PARAMETERS[name], runs(name).accepted
    # The chance of each accepted beginning is the product of the overlaps along it.
    chances: dict[tuple[int, ...], float] = {(): 1.0}
    for index in range(DRAFTS):
        longer: dict[tuple[int, ...], float] = {}
        for drafts, chance in chances.items():
            history = [START, *drafts]
            p, q = target_probabilities(history, parameters), draft_probabilities(history[-1], parameters)
            longer |= {(*drafts, token): chance * min(p[token], q[token]) for token in range(VOCAB)}
        chances = longer
        rate, found = sum(chances.values()), accepted[:, : index + 1].all(axis=1).mean()
        assert 0.005 < rate < 0.99
        assert abs(found - rate) < 4 * np.sqrt(rate * (1 - rate) / RUNS)  # 4 standard errors
