"""What a step makes of logits: tokens, log-probabilities of a prompt, and the next drafts."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from deepinfer_jax.kernels.pools import read_pool
from deepinfer_jax.kernels.rowwise import batch_invariant, rowwise
from deepinfer_jax.runtime.paged_model import Drafted, StepBatch, StepModel
from deepinfer_jax.runtime.slot_drafts import with_drafts
from deepinfer_jax.runtime.slot_sampling import flat_tables, sampling_rows
from deepinfer_jax.runtime.slot_table import SlotTable
from deepinfer_jax.sampling import (
    Adjustments,
    DraftRows,
    Sampled,
    SamplerOptions,
    SamplingRows,
    draw_draft,
    prompt_logprobs,
    sample,
)

# Longest list of likeliest tokens; SamplingParams allows no longer one (DB §1.5).
MAX_TOP = 1000


def sample_rows(
    model: StepModel,
    options: SamplerOptions,
    adjustments: Adjustments,
    logits: Array,
    rows: SamplingRows,
    drafts: DraftRows | None,
    wants_top: Array,
) -> Sampled:
    """A token for each row of logits float32 [rows, vocab], and the likeliest ones if any of `wants_top` does.

    Args:
        adjustments: of the slot table.
        drafts: what the rows judge; None: they have no drafts.
        wants_top: int32 [data, rows of the host].
    """
    any_top, tables = jnp.any(wants_top > 0), flat_tables(adjustments)

    def of_rows(logits: Array, rows: SamplingRows, drafts: DraftRows | None) -> Sampled:
        return sample(logits, rows, options=options, tables=tables, drafts=drafts, num_top=MAX_TOP, wants_top=any_top)

    with batch_invariant(model.batch_invariant):
        return rowwise(of_rows, lead=1)(logits, rows, drafts)


def prompt_logprobs_of(
    model: StepModel,
    options: SamplerOptions,
    params: Any,
    hidden: Array,
    batch: StepBatch,
    rows: SamplingRows,
    next_token: Array,
) -> Array:
    """Log-probabilities of the prompt's tokens behind each new one, float32 [rows, time], from their hidden states.

    One position at a time, so that never [rows, time, vocab] exists. next_token: behind the last new one, int32 [rows].
    """
    time = hidden.shape[1]
    tokens, lengths = batch.tokens.reshape(-1, time), batch.lengths.reshape(-1)

    def of_rows(logits: Array, rows: SamplingRows, target: Array) -> Array:
        return prompt_logprobs(logits, rows, target, options)

    def at_position(operand: tuple[Array, Array]) -> Array:
        hidden_here, target = operand
        logits = model.logits(params, hidden_here[:, None])[:, 0]
        with batch_invariant(model.batch_invariant):
            return rowwise(of_rows, lead=1)(logits, rows, target)

    is_last = jnp.arange(time) == lengths[:, None] - 1
    targets = jnp.where(is_last, next_token[:, None], jnp.roll(tokens, -1, axis=1))
    return jax.lax.map(at_position, (hidden.swapaxes(0, 1), targets.T)).T


def next_drafts(
    model: StepModel, options: SamplerOptions, params: Any, cache: Any, table: SlotTable, slots: Array
) -> tuple[SlotTable, Array | None]:
    """The slot table with drafts behind the last tokens, and the drafts, int32 [data · rows, drafts].

    slots: int32 [data, rows], out of range where nothing is to be drafted. Without drafts nothing happens.
    """
    kept = table.drafts
    if kept is None:
        return table, None
    count, wanted = kept.tokens.shape[2], slots < kept.tokens.shape[1]

    def draw() -> Drafted:
        lengths = jnp.where(wanted, read_pool(table.lengths, slots), 0)
        given = read_pool(table.last_token, slots)

        def pick(number: int, logits: Array) -> tuple[Array, Array]:
            none = jnp.full((*slots.shape, 1), -1, jnp.int32)
            position = lengths + 1 + number
            rows = sampling_rows(table.sampling, table.adjustments, slots, position, forced=none, uncounted=none)

            def of_rows(logits: Array, rows: SamplingRows) -> tuple[Array, Array]:
                return draw_draft(logits, rows, number, options)

            with batch_invariant(model.batch_invariant):
                return rowwise(of_rows, lead=1)(logits, rows)

        return model.draft(params, cache, slots, lengths, given, count, pick)

    nothing = jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), jax.eval_shape(draw))
    drafted = jax.lax.cond(jnp.any(wanted), draw, lambda: nothing)
    return dataclasses.replace(table, drafts=with_drafts(kept, slots, drafted)), drafted.tokens
