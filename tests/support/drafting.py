"""Speculative decoding of one sequence in plain Python, without engine, cache or batch."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.engine.environ import rearm
from deepinfer_jax.engine.requests.sampling_params import SamplingParams
from deepinfer_jax.sampling import DraftRows, SamplingRows, draw_draft, plain_rows, sample
from tests.support.toy import draft_confidence, drafted_state, next_state

_NAME = "DEEPINFER_USE_NEXTN_DECODE"


@contextlib.contextmanager
def drafts(count: int | None) -> Iterator[None]:
    """Engines that are made within draft so many tokens; None: as many as they do unless asked for otherwise."""
    with mock.patch.dict(os.environ):
        if count is None:
            os.environ.pop(_NAME, None)
        else:
            os.environ[_NAME] = str(count)
        rearm(_NAME)
        yield
    rearm(_NAME)


@dataclass
class Drafted:
    """What a request gives: tokens and their log-probabilities; of each step the rows verified and the tokens given,
    the prompt's first, and of each step behind it the confidences of the drafts verified."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    steps: list[tuple[int, int]] = field(default_factory=list)
    confidences: list[list[float]] = field(default_factory=list)


def draft_twin(
    table: np.ndarray,
    prompt: list[int],
    params: SamplingParams,
    num_drafts: int,
    max_model_len: int,
    *,
    always_accept: bool = False,
) -> Drafted:
    """The toy model's answer with drafts."""
    found, text = Drafted(), list(prompt)
    limit = min(params.max_tokens, max_model_len + 1 - len(prompt))

    def give(draft: int, distribution: np.ndarray | None) -> bool:
        logits = table[_state(text)]
        drafts = None
        if distribution is not None:
            drafts = DraftRows(jnp.asarray([draft]), jnp.asarray(distribution)[None])
        sampled = _sample(jnp.asarray(logits)[None], _rows(params, len(text)), drafts)
        forced = always_accept and distribution is not None
        found.tokens.append(draft if forced else int(sampled.tokens[0]))
        found.logprobs.append(float(sampled.logprobs[0]))
        text.append(found.tokens[-1])
        return forced or bool(sampled.accepted[0])

    give(-1, None)
    found.steps.append((1, 1))
    while len(found.tokens) < limit:
        drafted, distributions, confidences = _block(table, text, params, num_drafts)
        # The last possible token is given out, never computed on.
        verified = min(1 + num_drafts, len(prompt) + limit - len(text))
        given = 1
        while given < verified and give(drafted[given - 1], distributions[given - 1]):
            given += 1
        if given == verified:
            give(-1, None)
        found.steps.append((verified, given))
        found.confidences.append([float(1 / (1 + np.exp(-c))) for c in confidences[: verified - 1]])
    return found


def _block(
    table: np.ndarray, text: list[int], params: SamplingParams, count: int
) -> tuple[list[int], list[np.ndarray], list[float]]:
    state, drafted, distributions, confidences = _state(text), [], [], []
    for i in range(count):
        token, logprobs = _draw(jnp.asarray(table[drafted_state(state)])[None], _rows(params, len(text) + i), i)
        drafted.append(int(token[0]))
        distributions.append(np.asarray(logprobs[0]))
        confidences.append(float(draft_confidence(jnp.asarray(state))))
        state = next_state(state, drafted[-1])
    return drafted, distributions, confidences


def _state(text: list[int]) -> int:
    state = 0
    for token in text:
        state = next_state(state, token)
    return state


def _rows(params: SamplingParams, position: int) -> SamplingRows:
    assert params.seq_seed is not None or params.greedy
    seed = params.seq_seed or 0
    return plain_rows(1).replace(
        temperature=jnp.asarray([params.temperature], jnp.float32),
        greedy=jnp.asarray([params.greedy]),
        top_p=jnp.asarray([params.top_p], jnp.float32),
        top_k=jnp.asarray([params.top_k], jnp.int32),
        seed=jnp.asarray([[seed & 0xFFFFFFFF, seed >> 32]], jnp.uint32),
        position=jnp.asarray([position], jnp.int32),
    )


_sample = jax.jit(lambda logits, rows, drafts: sample(logits, rows, drafts=drafts))
_draw = jax.jit(draw_draft)
