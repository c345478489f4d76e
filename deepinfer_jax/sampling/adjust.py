"""What changes the logits of single requests before anything is drawn: biases and bans, penalties, grammar masks."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from deepinfer_jax.sampling.rows import SamplingRows

MAX_EDITS = 320
"""Entries of a request: 300 biases, and bans of ids that would stop it."""


class Adjustments(NamedTuple):
    """Tables that rows of a step refer to by number, so that only what some row uses is read.

    Attributes:
        edit_ids: int32 [n, MAX_EDITS], negative: none.
        edit_values: float32 [n, MAX_EDITS], added to the logit of the id, -inf bans it;
        edit_until: int32 [n, MAX_EDITS], where the position of the token to be produced is below this.
        counts: int32 [n, vocab], twice how often the output holds each id, plus 1 if the prompt does.
        masks: uint32 [m, ceil(vocab / 32)], bit i % 32 of word i // 32 is set if id i is allowed.
    """

    edit_ids: Array
    edit_values: Array
    edit_until: Array
    counts: Array
    masks: Array


def adjusted_logits(logits: Array, rows: SamplingRows, tables: Adjustments) -> Array:
    """Logits float32 [rows, vocab] with each row's edits, then penalties, then mask; without cost where no row has any.

    Of penalties (of an id that prompt or output hold): the logit is divided by `repetition` if it is positive, else
    multiplied; of one that the output holds c times, then c · `frequency` and `presence` are subtracted.
    """

    def adjusted() -> Array:
        edited = _edited(logits, rows, tables)
        penalised = jax.lax.cond(jnp.any(rows.counts >= 0), lambda: _penalised(edited, rows, tables), lambda: edited)
        return jax.lax.cond(jnp.any(rows.mask >= 0), lambda: _masked(penalised, rows, tables), lambda: penalised)

    any_wanted = jnp.any((rows.edits >= 0) | (rows.counts >= 0) | (rows.mask >= 0))
    return jax.lax.cond(any_wanted, adjusted, lambda: logits)


def _edited(logits: Array, rows: SamplingRows, tables: Adjustments) -> Array:
    ids, values, until = (table.at[rows.edits].get(mode="clip") for table in tables[:3])
    act = (rows.edits >= 0)[:, None] & (rows.position[:, None] < until)
    return _add(logits, jnp.where(act, ids, -1), values)


def _penalised(logits: Array, rows: SamplingRows, tables: Adjustments) -> Array:
    counts = _add(tables.counts.at[rows.counts].get(mode="clip"), rows.uncounted, 2)
    presence, frequency, repetition = (p[:, None] for p in (rows.presence, rows.frequency, rows.repetition))
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    output_count = counts >> 1
    less = frequency * output_count + jnp.where(output_count > 0, presence, 0)
    return jnp.where((rows.counts >= 0)[:, None] & (counts > 0), repeated - less, logits)


def _masked(logits: Array, rows: SamplingRows, tables: Adjustments) -> Array:
    words = tables.masks.at[rows.mask].get(mode="clip")
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    allowed = bits.reshape(len(words), -1)[:, : logits.shape[1]] == 1
    return jnp.where(allowed | (rows.mask < 0)[:, None], logits, -jnp.inf)


def _add(array: Array, ids: Array, values: Array | int) -> Array:
    """array [rows, vocab] with values at ids [rows, k]; a negative id would wrap, and is dropped (A19)."""
    places = jnp.where(ids >= 0, ids, array.shape[1])
    return array.at[jnp.arange(len(array))[:, None], places].add(values, mode="drop")
