"""The two step programs: a chunk of prompts, and one more token of running sequences.

Each takes the state of the device (cache and slot table, both donated) and one packed array of the host, and gives
small outputs and the next state. Nothing of a step depends on results that the host would have to read first.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from deepinfer_jax.kernels.pools import read_pool, write_pool
from deepinfer_jax.kernels.rowwise import batch_invariant, rowwise
from deepinfer_jax.runtime.slot_sampling import count_tokens, flat_tables, sampling_rows, with_sampling
from deepinfer_jax.runtime.slot_table import SlotTable, grow_blocks
from deepinfer_jax.runtime.step_input import DECODE_COLUMNS, PREFILL_COLUMNS, unpack
from deepinfer_jax.runtime.text_model import StepBatch, StepModel
from deepinfer_jax.sampling import Sampled, SamplerOptions, SamplingRows, prompt_logprobs, sample
from deepinfer_jax.scheduler import Bucket, blocks_for
from deepinfer_jax.state import CacheShape

# Longest list of likeliest tokens; SamplingParams allows no longer one (DB §1.5).
MAX_TOP = 1000


class StepState(NamedTuple):
    """What stays on the device between steps."""

    cache: Any
    table: SlotTable


class StepOutput(NamedTuple):
    """What a step returns to the host; rows are [data · bucket.rows].

    Attributes:
        sampled: the token after each row's last new token; meaningless in idle rows and unfinished prompts. The top
            lists are zeros unless some row wants one.
        prompt_logprobs: float32 [rows, time]: entry j belongs to the token after new token j, under the row's
            processed distribution there (DB §7.7); zeros unless some row wants them; None of a decode step, and where
            the model gives the hidden states of a prompt's end only (`Advanced`).
    """

    sampled: Sampled
    prompt_logprobs: Array | None


def decode_step(
    model: StepModel,
    shape: CacheShape,
    bucket: Bucket,
    options: SamplerOptions,
    params: Any,
    state: StepState,
    packed: Array,
) -> tuple[StepOutput, StepState]:
    """One more token of each row, on `step_input.pack_decode`."""
    cache, table = state
    column, new_blocks, _ = unpack(packed, DECODE_COLUMNS, packed.shape[2] - len(DECODE_COLUMNS))
    slots = column["slot"]
    blocks = grow_blocks(table.blocks, slots, column["first_new_block"], new_blocks)
    active = slots < shape.slots
    starts = jnp.where(active, read_pool(table.lengths, slots), 0)
    batch = StepBatch(
        tokens=read_pool(table.last_token, slots)[..., None],
        lengths=active.astype(jnp.int32),
        starts=starts,
        slots=slots,
        tables=read_pool(blocks, slots)[:, :, : bucket.width],
    )
    hidden, _, cache = model.advance(params, cache, batch)
    logits = model.logits(params, hidden)[:, 0]
    forced = column["forced"][..., None]
    rows = sampling_rows(
        table.sampling,
        table.adjustments,
        slots,
        starts + 1,
        forced=forced,
        uncounted=batch.tokens,
        masked=column["masked"],
    )
    sampled = _sample(model, options, table, logits, rows, column["wants_top"])
    counted = count_tokens(table.adjustments, slots, batch.tokens, batch.lengths)
    table = dataclasses.replace(table, adjustments=counted)
    return StepOutput(sampled, None), StepState(cache, _advanced(table, blocks, slots, starts + 1, sampled.tokens))


def prefill_step(
    model: StepModel,
    shape: CacheShape,
    bucket: Bucket,
    options: SamplerOptions,
    params: Any,
    state: StepState,
    packed: Array,
) -> tuple[StepOutput, StepState]:
    """A chunk of each row's prompt, on `step_input.pack_prefill`; the last chunk samples the first output."""
    cache, table = state
    column, new_blocks, tokens = unpack(packed, PREFILL_COLUMNS, blocks_for(bucket.time, shape.tokens_per_block))
    slots, starts = column["slot"], column["start"]
    table = _with_parameters(table, column, shape.blocks)
    blocks = grow_blocks(table.blocks, slots, column["first_new_block"], new_blocks)
    active = slots < shape.slots
    batch = StepBatch(
        tokens=tokens,
        lengths=jnp.where(active, column["num_new_tokens"], 0),
        starts=starts,
        slots=slots,
        tables=read_pool(blocks, slots)[:, :, : bucket.width],
        kept_from=column["kept_from"],
    )
    hidden, lengths, cache = model.advance(params, cache, batch)
    last = jnp.maximum(lengths - 1, 0)[:, None, None]
    logits = model.logits(params, jnp.take_along_axis(hidden, last, axis=1))[:, 0]
    ends = starts + batch.lengths
    forced = column["forced"][..., None]
    nothing = jnp.full_like(forced, -1)
    rows = sampling_rows(
        table.sampling,
        table.adjustments,
        slots,
        ends,
        forced=forced,
        uncounted=nothing,
        masked=column["masked"],
    )
    of_prompt = None
    if hidden.shape[1] == bucket.time:
        of_prompt = jax.lax.cond(
            jnp.any(column["wants_prompt_logprobs"] > 0),
            lambda: _prompt_logprobs(model, options, params, hidden, batch, rows, column["next_token"].reshape(-1)),
            lambda: jnp.zeros(hidden.shape[:2], jnp.float32),
        )
    output = StepOutput(_sample(model, options, table, logits, rows, column["wants_top"]), of_prompt)
    return output, StepState(cache, _advanced(table, blocks, slots, ends, output.sampled.tokens))


def _advanced(table: SlotTable, blocks: Array, slots: Array, ends: Array, tokens: Array) -> SlotTable:
    """The slot table after a step: block tables, and the rows' new lengths and last tokens."""
    return dataclasses.replace(
        table,
        blocks=blocks,
        lengths=write_pool(table.lengths, (slots,), ends),
        last_token=write_pool(table.last_token, (slots,), tokens.reshape(slots.shape)),
    )


def _sample(
    model: StepModel, options: SamplerOptions, table: SlotTable, logits: Array, rows: SamplingRows, wants_top: Array
) -> Sampled:
    any_top, tables = jnp.any(wants_top > 0), flat_tables(table.adjustments)

    def of_rows(logits: Array, rows: SamplingRows) -> Sampled:
        return sample(logits, rows, options=options, tables=tables, num_top=MAX_TOP, wants_top=any_top)

    with batch_invariant(model.batch_invariant):
        return rowwise(of_rows, logits, rows, lead=1)


def _with_parameters(table: SlotTable, column: dict[str, Array], no_block: int) -> SlotTable:
    """The slot table with the rows' sampling parameters, and with empty block tables where a row starts."""
    slots = column["slot"]
    starting = jnp.where(column["start"] == 0, slots, table.lengths.shape[1])
    nothing = jnp.full((*slots.shape, table.blocks.shape[2]), no_block, jnp.int32)
    return dataclasses.replace(
        table,
        blocks=write_pool(table.blocks, (starting,), nothing),
        sampling=with_sampling(table.sampling, slots, column),
    )


def _prompt_logprobs(
    model: StepModel,
    options: SamplerOptions,
    params: Any,
    hidden: Array,
    batch: StepBatch,
    rows: SamplingRows,
    next_token: Array,
) -> Array:
    """float32 [rows, time], one position at a time so that never [rows, time, vocab] exists."""
    time = hidden.shape[1]
    tokens, lengths = batch.tokens.reshape(-1, time), batch.lengths.reshape(-1)

    def of_rows(logits: Array, rows: SamplingRows, target: Array) -> Array:
        return prompt_logprobs(logits, rows, target, options)

    def at_position(operand: tuple[Array, Array]) -> Array:
        hidden_here, target = operand
        logits = model.logits(params, hidden_here[:, None])[:, 0]
        with batch_invariant(model.batch_invariant):
            return rowwise(of_rows, logits, rows, target, lead=1)

    is_last = jnp.arange(time) == lengths[:, None] - 1
    targets = jnp.where(is_last, next_token[:, None], jnp.roll(tokens, -1, axis=1))
    return jax.lax.map(at_position, (hidden.swapaxes(0, 1), targets.T)).T
