"""One sequence at a time through a model on paged caches, one step after another, beside an idle row."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.cache.pools import (
    CacheShape,
    init_pools,
    poison,
    read_blocks,
    read_slots,
    write_blocks,
    write_slots,
)
from deepinfer_jax.runtime.paged_model import StepBatch, StepModel

WIDTH = 8


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def advance(model: StepModel, params: Any, cache: Any, batch: StepBatch) -> tuple[jax.Array, Any]:
    hidden, _, cache = model.advance(params, cache, batch)
    return hidden, cache


_move = functools.partial(jax.jit, static_argnames=("function", "model", "tokens_per_block"))


@_move
def moved(function: Any, model: StepModel, tokens_per_block: int, cache: Any, *arguments: jax.Array) -> Any:
    return function(model.state(tokens_per_block), cache, *arguments)


class Stepping:
    """A cache, full of poison where no sequence wrote (or, if `clean`, of zeros), and steps on it."""

    def __init__(self, model: StepModel, params: Any, shape: CacheShape, *, clean: bool = False) -> None:
        self.model, self.params, self.shape = model, params, shape
        self.cache = init_pools(model.state(shape.tokens_per_block), shape)
        if not clean:
            self.poison(list(range(shape.slots)), list(range(shape.blocks)))

    def step(self, slot: int, blocks: list[int], start: int, tokens: np.ndarray, time: int) -> np.ndarray:
        """Hidden states of the new tokens, [tokens, hidden], of a step that has room for `time`."""
        padded = np.zeros((1, 2, time), np.int32)
        padded[0, 1, : len(tokens)] = tokens
        tables = np.full((1, 2, WIDTH), self.shape.blocks, np.int32)
        tables[0, 1, : len(blocks)] = blocks
        batch = StepBatch(
            tokens=padded,  # type: ignore[arg-type]  # NumPy in place of device arrays
            lengths=np.array([[0, len(tokens)]], np.int32),  # type: ignore[arg-type]
            starts=np.array([[0, start]], np.int32),  # type: ignore[arg-type]
            slots=np.array([[self.shape.slots, slot]], np.int32),  # type: ignore[arg-type]
            tables=tables,  # type: ignore[arg-type]
        )
        return self.run(batch)[1, : len(tokens)]

    def run(self, batch: StepBatch) -> np.ndarray:
        """One step of any rows; their hidden states."""
        hidden, self.cache = advance(self.model, self.params, self.cache, batch)
        return np.asarray(hidden)

    def feed(self, slot: int, blocks: list[int], start: int, tokens: np.ndarray, time: int) -> np.ndarray:
        """Tokens in steps of `time`; hidden states of all."""
        chunks = [tokens[first : first + time] for first in range(0, len(tokens), time)]
        return np.concatenate(
            [self.step(slot, blocks, start + i * time, chunk, time) for i, chunk in enumerate(chunks)]
        )

    def state(self, slot: int, length: int) -> np.ndarray:
        return np.asarray(self._moved(read_slots, _index(slot), _index(length)))[0, 0]

    def put_state(self, slot: int, length: int, state: np.ndarray) -> None:
        self.cache = self._moved(write_slots, _index(slot), _index(length), jnp.asarray(state)[None, None])

    def block(self, number: int) -> np.ndarray:
        return np.asarray(self._moved(read_blocks, _index(number)))[0, 0]

    def put_block(self, number: int, content: np.ndarray) -> None:
        self.cache = self._moved(write_blocks, _index(number), jnp.asarray(content)[None, None])

    def poison(self, slots: list[int], blocks: list[int]) -> None:
        self.cache = self._moved(poison, jnp.asarray([blocks], jnp.int32), jnp.asarray([slots], jnp.int32))

    def _moved(self, function: Any, *arguments: jax.Array) -> Any:
        return moved(function, self.model, self.shape.tokens_per_block, self.cache, *arguments)


def _index(number: int) -> jax.Array:
    return jnp.asarray([[number]], jnp.int32)
