"""A toy language model whose every distribution depends on the whole history, exactly, and its plain twin.

Its state after a token is an integer hash of all tokens so far; the logits are a row of a random table. So a token
that comes out right proves that cache rows, resets, chunks and padding are right.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from deepinfer_jax.engine.args import EngineArgs
from deepinfer_jax.engine.loading import EngineParts
from deepinfer_jax.runtime.runner import Runner

VOCAB = 64
EOS = 1
IMAGE = 3
NUM_STATES = 1009
# The one-token prompt POISON leads to a state of its own, whose logits are NaN: no sampled text gets there by chance.
POISON = 60


def next_state(state: Any, token: Any) -> Any:
    poisoned = (state == 0) * (token == POISON)
    return poisoned * NUM_STATES + (1 - poisoned) * ((state * 31 + token + 7) % NUM_STATES)


def make_table(seed: int = 0) -> np.ndarray:
    table = np.random.default_rng(seed).normal(size=(NUM_STATES + 1, VOCAB)).astype(np.float32) * 2
    table[:, EOS] = -4  # ends are rare unless asked for
    table[NUM_STATES] = np.nan
    return table


@dataclass(frozen=True)
class ToyModel:
    """A `StepModel`."""

    def init_cache(self, rows: int) -> dict[str, Array]:
        return {"state": jnp.zeros(rows, jnp.int32)}

    def advance(
        self, params: Array, cache: dict[str, Array], tokens: Array, lengths: Array, resets: Array
    ) -> tuple[Array, dict[str, Array]]:
        def one(state: Array, operand: tuple[Array, Array]) -> tuple[Array, Array]:
            token, valid = operand
            state = jnp.where(valid, next_state(state, token), state)
            return state, state

        valid = jnp.arange(tokens.shape[1])[:, None] < lengths
        state, states = jax.lax.scan(one, jnp.where(resets, 0, cache["state"]), (tokens.T, valid))
        return states.T[:, :, None].astype(jnp.float32), {"state": state}

    def logits(self, params: Array, hidden: Array) -> Array:
        return params[hidden[:, :, 0].astype(jnp.int32)]


class ToyTokenizer:
    """One letter per id, from chr(ord("0")) on; the text of EOS is "1"."""

    eos_token_id = EOS

    def encode(self, text: str) -> list[int]:
        if "!" in text:
            raise ValueError("'!' is not in this alphabet")
        return [ord(letter) - 48 for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(48 + token) for token in ids)


def history_logits(table: np.ndarray, history: list[int]) -> np.ndarray:
    state = 0
    for token in history:
        state = next_state(state, token)
    return table[state]


def greedy_twin(table: np.ndarray, prompt: list[int], count: int) -> list[int]:
    history = list(prompt)
    for _ in range(count):
        history.append(int(np.argmax(history_logits(table, history))))
    return history[len(prompt) :]


def toy_parts(args: EngineArgs) -> EngineParts:
    """Stands in for `load_parts`."""
    limits = args.limits(max_position_embeddings=40)
    short_chunks = tuple((rows, min(chunk, 8)) for rows, chunk in limits.buckets)
    limits = dataclasses.replace(limits, buckets=short_chunks)
    return EngineParts(ToyTokenizer(), VOCAB, IMAGE, limits, Runner(ToyModel(), jnp.asarray(make_table())))
