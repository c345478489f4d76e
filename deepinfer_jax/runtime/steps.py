"""The two step programs: a chunk of prompts, and the next tokens of running sequences.

A decode step computes the last token and the drafts of each sequence (in a packed program the most promising of all
drafts), accepts drafts as far as they hold, samples one token more, and drafts the next block. What it computed of
rejected drafts needs no undoing: it lies behind the new length, where nothing reads it before it is written again
(`cache/pools.py`).

Each takes the state of the device (cache and slot table, both donated) and one packed array of the host, and gives
small outputs and the next state. Nothing of a step depends on results that the host would have to read first.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from deepinfer_jax.cache.pools import CacheShape
from deepinfer_jax.kernels.pools import read_pool, write_pool
from deepinfer_jax.runtime.allocation import allocate, verification_rates
from deepinfer_jax.runtime.packed_rows import pack_rows
from deepinfer_jax.runtime.paged_model import StepBatch, StepModel
from deepinfer_jax.runtime.slot_drafts import draft_rows
from deepinfer_jax.runtime.slot_sampling import count_tokens, sampling_rows, with_sampling
from deepinfer_jax.runtime.slot_table import SlotTable, grow_blocks
from deepinfer_jax.runtime.step_input import DECODE_COLUMNS, PREFILL_COLUMNS, unpack
from deepinfer_jax.runtime.step_sampling import next_drafts, prompt_logprobs_of, sample_rows
from deepinfer_jax.sampling import DraftRows, Sampled, SamplerOptions, SamplingRows
from deepinfer_jax.scheduler import Bucket, blocks_for, blocks_per_decode


class StepState(NamedTuple):
    """What stays on the device between steps."""

    cache: Any
    table: SlotTable


class StepOutput(NamedTuple):
    """What a step returns to the host, of [data · bucket.rows] sequences. It means nothing of idle ones and of
    unfinished prompts.

    Attributes:
        sampled: [sequences, rows, ...]: of a prefill step one row, the token after the last new one; of a decode step
            the tokens after the last token and after each draft, of which the first `counts` count. The top lists
            are zeros unless some row wants one.
        verified: rows that were computed of each sequence. int32 [sequences].
        counts: int32 [sequences].
        finite: bool [sequences], of the rows that count.
        drafts: the next ones. int32 [sequences, drafts]; None without.
        confidences: raw, of the drafts that might have been verified. float32 [sequences, drafts]; None of a prefill
            step, or without drafts.
        prompt_logprobs: float32 [rows, time]: entry j belongs to the token after new token j, under the row's
            processed distribution there (DB §7.7); zeros unless some row wants them; None of a decode step, and where
            the model gives the hidden states of a prompt's end only (`Advanced`).
    """

    sampled: Sampled
    verified: Array
    counts: Array
    finite: Array
    drafts: Array | None
    confidences: Array | None
    prompt_logprobs: Array | None


class _DecodeInput(NamedTuple):
    """What a decode step is to compute.

    Attributes:
        batch: of each sequence the last token and its drafts; `lengths` says how many of them are verified.
        rows: what they sample by, [data · rows · time].
        drafts: what they judge, [data · rows · time]; None without drafts.
        confidences: of the drafts. float32 [data, rows, drafts]; None without drafts.
        wants_top: int32 [data, rows].
    """

    batch: StepBatch
    rows: SamplingRows
    drafts: DraftRows | None
    confidences: Array | None
    wants_top: Array


def decode_step(
    model: StepModel,
    shape: CacheShape,
    bucket: Bucket,
    options: SamplerOptions,
    params: Any,
    state: StepState,
    packed: Array,
) -> tuple[StepOutput, StepState]:
    """The next tokens of each row's sequence, on `step_input.pack_decode`.

    Reads what to compute, packs it if there is not room for all, computes, samples, accepts, writes back, drafts.
    """
    cache, table = state
    given, table = _read_decode(shape, bucket, options, table, packed)
    batch, rows, drafts = given.batch, given.rows, given.drafts
    slots, starts, verified = batch.slots, batch.starts, batch.lengths

    packing = pack_rows(verified, bucket.packed) if bucket.packed else None
    if packing is not None:
        batch = packing.batch(batch, shape.slots)
        rows, drafts = packing.take((rows, drafts), bucket.time)
    hidden, _, cache = model.advance(params, cache, batch)
    logits = model.logits(params, hidden)
    logits = logits.reshape(-1, logits.shape[2])
    sampled = sample_rows(model, options, table.adjustments, logits, rows, drafts, given.wants_top)
    if packing is not None:
        sampled = packing.spread(sampled, bucket.time)
    else:
        sampled = jax.tree.map(lambda array: array.reshape(slots.size, bucket.time, *array.shape[1:]), sampled)
    counts, last, finite = _accept(sampled, verified)

    computed = counts.reshape(slots.shape)
    counted = count_tokens(table.adjustments, slots, given.batch.tokens, computed)
    written = jnp.where(computed > 0, slots, shape.slots)
    table = _advanced(dataclasses.replace(table, adjustments=counted), written, starts + computed, last)
    table, drafted = next_drafts(model, options, params, cache, table, written)
    judged = None if given.confidences is None else given.confidences.reshape(slots.size, -1)
    output = StepOutput(sampled, verified.reshape(-1), counts, finite, drafted, judged, None)
    return output, StepState(cache, table)


def _read_decode(
    shape: CacheShape, bucket: Bucket, options: SamplerOptions, table: SlotTable, packed: Array
) -> tuple[_DecodeInput, SlotTable]:
    """What the step is to compute, from the host's array and the slot table; and the table with the new blocks."""
    column, new_blocks, forced = unpack(
        packed, DECODE_COLUMNS, blocks_per_decode(shape.tokens_per_block, shape.num_drafts)
    )
    slots = column["slot"]
    blocks = grow_blocks(table.blocks, slots, column["first_new_block"], new_blocks)
    active = slots < shape.slots
    starts = jnp.where(active, read_pool(table.lengths, slots), 0)
    # A sequence at its limit has ended, which the host does not know yet.
    verified = jnp.where(active, jnp.clip(read_pool(table.limit, slots) - starts, 0, bucket.time), 0)
    tokens, drafts, confidences = read_pool(table.last_token, slots)[..., None], None, None
    if table.drafts is not None:
        tokens = jnp.concatenate([tokens, read_pool(table.drafts.tokens, slots)], axis=2)
        confidences = read_pool(table.drafts.confidences, slots)
        if bucket.packed:
            rates = verification_rates(confidences, options.confidence_temperatures)
            budget = jnp.max(column["budget"], axis=1)  # idle rows have none
            verified = jnp.minimum(verified, 1 + jax.vmap(allocate)(rates, jnp.maximum(verified - 1, 0), budget))
        drafts = draft_rows(table.drafts, slots, verified)
    batch = StepBatch(
        tokens=tokens,
        lengths=verified,
        starts=starts,
        slots=slots,
        tables=read_pool(blocks, slots)[:, :, : bucket.width],
    )
    rows = sampling_rows(
        table.sampling,
        table.adjustments,
        slots,
        starts + 1,
        forced=forced,
        uncounted=tokens,
        masked=column["masked"],
    )
    given = _DecodeInput(batch, rows, drafts, confidences, column["wants_top"])
    return given, dataclasses.replace(table, blocks=blocks)


def _accept(sampled: Sampled, verified: Array) -> tuple[Array, Array, Array]:
    """Of each sequence how many tokens count, the last of them, and whether all came of a distribution.

    sampled: [sequences, time, ...]; verified: rows that were computed, int32 [data, rows].

    Returns int32 [sequences], int32 [data, rows] and bool [sequences].
    """
    accepted = jnp.sum(jnp.cumprod(sampled.accepted.astype(jnp.int32), axis=1), axis=1)  # the last row has no draft
    counts = jnp.minimum(accepted + 1, verified.reshape(-1))
    last = jnp.take_along_axis(sampled.tokens, accepted[:, None], axis=1).reshape(verified.shape)
    finite = jnp.all(sampled.finite | (jnp.arange(sampled.tokens.shape[1]) > accepted[:, None]), axis=1)
    return counts, last, finite


def prefill_step(
    model: StepModel,
    shape: CacheShape,
    bucket: Bucket,
    options: SamplerOptions,
    params: Any,
    state: StepState,
    packed: Array,
    features: Array | None = None,
) -> tuple[StepOutput, StepState]:
    """A chunk of each row's prompt, on `step_input.pack_prefill`; the last chunk samples the first output.

    Reads the chunks, computes, samples behind their ends (and looks up the prompt), writes back, drafts behind prompts
    that are complete.

    With `features` [n, hidden], which are left as they are, `packed` holds the places that name them too.
    """
    cache, table = state
    column, batch, table = _read_prefill(shape, bucket, table, packed, features)

    hidden, lengths, cache = model.advance(params, cache, batch)
    last = jnp.maximum(lengths - 1, 0)[:, None, None]
    logits = model.logits(params, jnp.take_along_axis(hidden, last, axis=1))[:, 0]
    ends = batch.starts + batch.lengths
    rows = _first_outputs(table, column, ends)
    of_prompt = None
    if hidden.shape[1] == bucket.time:
        of_prompt = jax.lax.cond(
            jnp.any(column["wants_prompt_logprobs"] > 0),
            lambda: prompt_logprobs_of(model, options, params, hidden, batch, rows, column["next_token"].reshape(-1)),
            lambda: jnp.zeros(hidden.shape[:2], jnp.float32),
        )
    sampled = sample_rows(model, options, table.adjustments, logits, rows, None, column["wants_top"])

    table = _advanced(table, batch.slots, ends, sampled.tokens.reshape(ends.shape))
    unjudged = lengths.reshape(-1) == 0  # bounded replay: no token of the chunk has a final state
    completing = jnp.where(column["completes"] > 0, batch.slots, shape.slots)
    table, drafted = next_drafts(model, options, params, cache, table, completing)
    output = StepOutput(
        sampled=jax.tree.map(lambda array: array[:, None], sampled),
        verified=jnp.ones(ends.size, jnp.int32),
        counts=jnp.ones(ends.size, jnp.int32),
        finite=sampled.finite | unjudged,
        drafts=drafted,
        confidences=None,
        prompt_logprobs=of_prompt,
    )
    return output, StepState(cache, table)


def _read_prefill(
    shape: CacheShape, bucket: Bucket, table: SlotTable, packed: Array, features: Array | None
) -> tuple[dict[str, Array], StepBatch, SlotTable]:
    """The host's columns and the chunks; and the slot table with the rows' parameters and new blocks."""
    column, new_blocks, tokens = unpack(packed, PREFILL_COLUMNS, blocks_for(bucket.time, shape.tokens_per_block))
    places = None
    if features is not None:
        tokens, places = jnp.split(tokens, 2, axis=2)
    slots = column["slot"]
    table = _with_parameters(table, column, shape.blocks)
    blocks = grow_blocks(table.blocks, slots, column["first_new_block"], new_blocks)
    batch = StepBatch(
        tokens=tokens,
        lengths=jnp.where(slots < shape.slots, column["num_new_tokens"], 0),
        starts=column["start"],
        slots=slots,
        tables=read_pool(blocks, slots)[:, :, : bucket.width],
        kept_from=column["kept_from"],
        places=places,
        features=features,
    )
    return column, batch, dataclasses.replace(table, blocks=blocks)


def _with_parameters(table: SlotTable, column: dict[str, Array], no_block: int) -> SlotTable:
    """The slot table with the rows' limits and sampling parameters, and with empty block tables where a row starts."""
    slots = column["slot"]
    starting = jnp.where(column["start"] == 0, slots, table.lengths.shape[1])
    nothing = jnp.full((*slots.shape, table.blocks.shape[2]), no_block, jnp.int32)
    return dataclasses.replace(
        table,
        limit=write_pool(table.limit, (slots,), column["limit"]),
        blocks=write_pool(table.blocks, (starting,), nothing),
        sampling=with_sampling(table.sampling, slots, column),
    )


def _first_outputs(table: SlotTable, column: dict[str, Array], ends: Array) -> SamplingRows:
    """What the tokens behind the chunks sample by; ends: their positions, int32 [data, rows]."""
    forced = column["forced"][..., None]
    return sampling_rows(
        table.sampling,
        table.adjustments,
        column["slot"],
        ends,
        forced=forced,
        uncounted=jnp.full_like(forced, -1),
        masked=column["masked"],
    )


def _advanced(table: SlotTable, slots: Array, ends: Array, tokens: Array) -> SlotTable:
    """The slot table after a step, with the rows' new lengths and last tokens."""
    return dataclasses.replace(
        table,
        lengths=write_pool(table.lengths, (slots,), ends),
        last_token=write_pool(table.last_token, (slots,), tokens),
    )
