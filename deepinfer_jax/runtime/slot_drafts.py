"""The drafts of each running sequence: drawn at the end of a step, verified by the next one (model.md §9)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from deepinfer_jax.kernels.pools import read_pool, write_pool
from deepinfer_jax.runtime.paged_model import Drafted
from deepinfer_jax.sampling import DraftRows


@struct.dataclass
class SlotDrafts:
    """`Drafted`, one row per slot of each dp rank.

    Attributes:
        tokens: int32 [data, slots, drafts].
        logprobs: float32 [data, slots, drafts, vocab].
        confidences: float32 [data, slots, drafts].
    """

    tokens: Array
    logprobs: Array
    confidences: Array


def init_slot_drafts(filled: Callable[..., Array], count: int, vocab_size: int) -> SlotDrafts:
    """Of empty slots. filled: (value, dtype, *more axes) -> array [data, slots, *more]."""
    return SlotDrafts(
        tokens=filled(0, jnp.int32, count),
        logprobs=filled(0, jnp.float32, count, vocab_size),
        confidences=filled(0, jnp.float32, count),
    )


def with_drafts(kept: SlotDrafts, slots: Array, drafted: Drafted) -> SlotDrafts:
    """With the drafts of data · rows rows in slots int32 [data, rows]."""
    rows = jax.tree.map(lambda array: array.reshape(*slots.shape, *array.shape[1:]), SlotDrafts(*drafted))
    return jax.tree.map(lambda pool, values: write_pool(pool, (slots,), values), kept, rows)


def draft_rows(kept: SlotDrafts, slots: Array, verified: Array) -> DraftRows:
    """The drafts that the rows of a decode step judge: row j of a sequence draft j, the last one none.

    slots: int32 [data, rows]; verified: rows of each sequence that are computed, int32 [data, rows].

    Returns them in one row axis [data · rows · (1 + drafts)].
    """
    tokens, logprobs = read_pool(kept.tokens, slots), read_pool(kept.logprobs, slots)
    tokens = jnp.where(jnp.arange(tokens.shape[2]) < verified[..., None] - 1, tokens, -1)
    tokens = jnp.pad(tokens, [(0, 0), (0, 0), (0, 1)], constant_values=-1)
    logprobs = jnp.pad(logprobs, [(0, 0), (0, 0), (0, 1), (0, 0)])
    return DraftRows(tokens.reshape(-1), logprobs.reshape(-1, logprobs.shape[3]))
