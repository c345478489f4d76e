"""Sampling as a function of plain arrays, to be used, changed or replaced in research (`generate_tokens`)."""

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from deepinfer_jax.sampling.adjust import Adjustments
from deepinfer_jax.sampling.fields import SamplerScalars, sampler_scalars
from deepinfer_jax.sampling.rows import GREEDY_TEMPERATURE, ROW_FIELDS, plain_rows
from deepinfer_jax.sampling.sample import sample


class SampleFn(Protocol):
    """What chooses the next token of one sequence; pure, so that it can be under `jax.jit` and `jax.vmap`."""

    def __hash__(self) -> int: ...

    def __call__(self, logits: Array, state: Any, key: Array, history: Array) -> tuple[Array, Any]:
        """The token, int32 [], and the state that comes with the next call.

        Args:
            logits: float32 [vocab].
            state: any pytree; what it means is the function's.
            key: of `jax.random`, another one in each call.
            history: the sequence so far, int32 [length]; negative where nothing stands yet.
        """


def _with_all_scalars[State](cls: type[State]) -> type[State]:
    """The class with a field, last and off, for each scalar of the table that it does not spell out."""
    for name in sampler_scalars():
        if name not in cls.__annotations__:
            cls.__annotations__[name] = Any
            setattr(cls, name, getattr(SamplerScalars, name))
    return cls


@struct.dataclass
@_with_all_scalars
class SamplerState:
    """The state of `sample_fn`: the scalars of `SamplingParams` as numbers, each a float or an array [].

    Attributes:
        temperature: below 1e-5 it is the argmax.
        top_p, top_k, min_p: 1, -1 and 0 switch them off.
        presence_penalty, frequency_penalty, repetition_penalty: 0, 0 and 1 switch them off.
        prompt_len: so many tokens of the history are the prompt, of which the first two penalties know nothing.
    """

    # Spelled out for type checkers, and for the places of arguments.
    temperature: Any = SamplerScalars.temperature
    top_p: Any = SamplerScalars.top_p
    top_k: Any = SamplerScalars.top_k
    min_p: Any = SamplerScalars.min_p
    presence_penalty: Any = SamplerScalars.presence_penalty
    frequency_penalty: Any = SamplerScalars.frequency_penalty
    repetition_penalty: Any = SamplerScalars.repetition_penalty
    prompt_len: Any = 0


def sample_fn(logits: Array, state: SamplerState, key: Array, history: Array) -> tuple[Array, SamplerState]:
    """The engine's sampler as a `SampleFn`; the state stays as it is.

    A row's token depends on these arguments alone; the random numbers are not those that an engine draws for a request.
    """

    def row(value: Any, dtype: Any) -> Array:
        return jnp.asarray(value, dtype)[None]

    vocab, held = logits.shape[0], jnp.arange(history.shape[0]) < state.prompt_len
    prompt = jnp.where(held & (history >= 0), history, vocab)  # out of range and dropped
    nothing = jnp.zeros((1, 1), jnp.int32)
    tables = Adjustments(
        edit_ids=nothing - 1,
        edit_values=nothing.astype(jnp.float32),
        edit_until=nothing,
        counts=jnp.zeros((1, vocab), jnp.int32).at[0, prompt].set(1, mode="drop"),
        masks=jnp.zeros((1, -(-vocab // 32)), jnp.uint32),
    )
    scalars = {
        name: row(getattr(state, field.source), field.dtype)
        for name, field in ROW_FIELDS.items()
        if field.source in sampler_scalars()
    }
    greedy = scalars["temperature"] < GREEDY_TEMPERATURE
    scalars["temperature"] = jnp.where(greedy, GREEDY_TEMPERATURE, scalars["temperature"])
    rows = plain_rows(1).replace(
        **scalars,
        greedy=greedy,
        seed=jax.random.bits(key, (1, 2), jnp.uint32),
        counts=jnp.zeros(1, jnp.int32),
        uncounted=jnp.where(held, -1, history)[None],
    )
    return sample(logits[None], rows, tables=tables).tokens[0], state
