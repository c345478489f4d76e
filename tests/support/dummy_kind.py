"""A toy model with one more kind of state in its slots and one more in its blocks, which nothing but it names.

Its tokens depend on both, so that whoever moves state and forgets a kind gives other tokens.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from deepinfer_jax.cache.pools import StateSpec
from deepinfer_jax.runtime.paged_model import Advanced, Drafted, StepBatch
from tests.support.toy import (
    NUM_STATES,
    TOY,
    VOCAB,
    at_new_tokens,
    extend_history,
    fold,
    fold_rows,
    next_state,
    rows_before,
    write_rows,
)


def next_pair(pair: Any, token: Any) -> Any:
    """The last two of a series, [..., 2], each of which depends on the two before and on its token."""
    return jnp.stack([pair[..., 1], (pair[..., 0] * 29 + pair[..., 1] * 17 + token) % NUM_STATES], axis=-1)


def next_echo(state: Any, value: Any) -> Any:
    return (state * 7 + value) % NUM_STATES


@dataclass(frozen=True)
class DummyKindModel:
    """A `StepModel`: the toy, whose row of the table is moved on by a series and by a hash of other ids.

    More in a slot: the last two of a series in fp32. More in a block: a byte for each token, of another numbering.
    """

    batch_invariant = False
    vocab_size = VOCAB

    def state(self, tokens_per_block: int) -> dict[str, Any]:
        return {
            "series": StateSpec("series", "slot", (), jnp.dtype(jnp.float32), reach=2),
            "toy": TOY.state(tokens_per_block),
            "echo": StateSpec("echo", "block", (tokens_per_block,), jnp.dtype(jnp.uint8)),
        }

    def advance(self, params: Array, cache: dict[str, Any], batch: StepBatch) -> Advanced:
        hidden, lengths, toy = TOY.advance(params, cache["toy"], batch)
        row = hidden[..., 0].astype(jnp.int32)
        echo, bytes_ = extend_history(cache["echo"], batch, echoed(batch.tokens).astype(jnp.uint8))
        echoes = at_new_tokens(fold(next_echo, jnp.zeros(len(bytes_), jnp.int32), bytes_.astype(jnp.int32)), batch)
        before = rows_before(cache["series"], batch.slots, batch.starts, 2).astype(jnp.int32)
        series = fold_rows(next_pair, before, batch.tokens.reshape(row.shape), batch)[..., 1]
        moved = jnp.where(row < NUM_STATES, (row + series + echoes) % NUM_STATES, row)
        series_ring = write_rows(cache["series"], batch, series.astype(jnp.float32))
        cache = {"series": series_ring, "toy": toy, "echo": echo}
        return Advanced(moved[..., None].astype(jnp.float32), lengths, cache)

    def logits(self, params: Array, hidden: Array) -> Array:
        return TOY.logits(params, hidden)

    def draft(self, params: Array, cache: dict[str, Any], *arguments: Any) -> Drafted:
        return TOY.draft(params, cache["toy"], *arguments)


def echoed(token: Any) -> Any:
    return (token * 37 + 11) % 256


def dummy_kind_logits(table: np.ndarray, history: list[int]) -> np.ndarray:
    """What the model says after a history, in plain Python."""
    state, echo, series = 0, 0, [0, 0]
    for token in history:
        state = next_state(state, token)
        echo = next_echo(echo, echoed(token))
        series = [series[1], (series[0] * 29 + series[1] * 17 + token) % NUM_STATES]
    return table[(state + series[1] + echo) % NUM_STATES if state < NUM_STATES else state]


def dummy_kind_twin(table: np.ndarray, prompt: list[int], count: int) -> list[int]:
    """Its greedy tokens, without engine, cache or batch."""
    history = list(prompt)
    for _ in range(count):
        history.append(int(np.argmax(dummy_kind_logits(table, history))))
    return history[len(prompt) :]
