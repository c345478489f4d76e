"""What each row of a step asks for."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from deepinfer_jax.sampling.fields import SlotField, SlotFields, notes

GREEDY_TEMPERATURE = 1e-5


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class SamplingRows(SlotFields):
    """Parameters of the rows: those of `SlotFields`, and what only this step says. All arrays are `[rows]` unless said
    otherwise.

    Attributes:
        position: int32, index of the token to be produced in its sequence.
        forced: int32, the id that must be produced; negative for none. It bypasses the filters and whatever changes
            the logits (DB §7.6).
        edits, counts, mask: int32, the row's place in these parts of `Adjustments`; negative: none. Penalties act where
            `counts` is not.
        uncounted: int32 [rows, k], output tokens before the row that `Adjustments.counts` does not count yet;
            negative: none.
    """

    position: Array
    forced: Array
    edits: Array
    counts: Array
    mask: Array
    uncounted: Array


ROW_FIELDS = notes(SamplingRows, SlotField)
"""The fields of `SamplingRows` that the slot table keeps, in their order."""


def plain_rows(count: int) -> SamplingRows:
    """Rows that draw from softmax(logits), of seed 0 and position 0; to be changed by `replace`."""
    none = jnp.full(count, -1, jnp.int32)
    off: dict[str, Any] = {
        name: jnp.full((count, *field.axes), field.off, field.dtype) for name, field in ROW_FIELDS.items()
    }
    return SamplingRows(
        **off,
        position=jnp.zeros(count, jnp.int32),
        forced=none,
        edits=none,
        counts=none,
        mask=none,
        uncounted=none[:, None],
    )
