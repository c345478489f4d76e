"""The jitted step program: new tokens of every row in, one sampled token per row out."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from deepinfer_jax.runtime.step_input import StepInput, unpack
from deepinfer_jax.runtime.text_model import StepModel
from deepinfer_jax.sampling import Sampled, processed_logprobs, sample, token_logprobs


class StepShape(NamedTuple):
    """The static shape of a step program; one program is compiled per shape.

    Attributes:
        rows: rows of the cache.
        time: most new tokens of a row.
        num_top: length of the lists of likeliest tokens, 0 for none.
        prompt_logprobs: whether the log-probabilities of the new tokens themselves are computed.
    """

    rows: int
    time: int
    num_top: int = 0
    prompt_logprobs: bool = False


class StepOutput(NamedTuple):
    """What a step returns to the host.

    Attributes:
        sampled: the token after each row's last new token; meaningless in idle rows.
        prompt_logprobs: float32 [rows, time]: entry j belongs to the token after new token j, under the row's
            processed distribution there (DB §7.7); None unless the shape asks.
    """

    sampled: Sampled
    prompt_logprobs: Array | None


def run_step(model: StepModel, shape: StepShape, params: Any, cache: Any, packed: Array) -> tuple[StepOutput, Any]:
    """One step on packed int32 [rows, NUM_COLUMNS + time] (`step_input.pack`). Returns outputs and the new cache.

    Rows differ in their number of new tokens: prompts up to `time`, running sequences 1, idle rows 0.
    """
    step = unpack(packed)
    hidden, cache = model.advance(params, cache, step.tokens, step.num_new_tokens, step.resets)
    last = jnp.maximum(step.num_new_tokens - 1, 0)[:, None, None]
    logits = model.logits(params, jnp.take_along_axis(hidden, last, axis=1))[:, 0]
    output = StepOutput(
        sampled=sample(logits, step.sampling, num_top=shape.num_top),
        prompt_logprobs=_prompt_logprobs(model, params, hidden, step) if shape.prompt_logprobs else None,
    )
    return output, cache


def _prompt_logprobs(model: StepModel, params: Any, hidden: Array, step: StepInput) -> Array:
    """float32 [rows, time], one position at a time so that never [rows, time, vocab] exists."""
    rows = step.sampling

    def at_position(operand: tuple[Array, Array]) -> Array:
        hidden_here, target = operand
        logits = model.logits(params, hidden_here[:, None])[:, 0]
        logprobs = processed_logprobs(logits, rows.temperature, rows.top_p, rows.top_k)
        return token_logprobs(logprobs, target)

    is_last = jnp.arange(step.tokens.shape[1]) == step.num_new_tokens[:, None] - 1
    targets = jnp.where(is_last, step.next_token[:, None], jnp.roll(step.tokens, -1, axis=1))
    return jax.lax.map(at_position, (hidden.swapaxes(0, 1), targets.T)).T
