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
from deepinfer_jax.kernels.rowwise import batch_invariant, rowwise
from deepinfer_jax.runtime.allocation import allocate, verification_rates
from deepinfer_jax.runtime.packed_rows import pack_rows
from deepinfer_jax.runtime.paged_model import Drafted, StepBatch, StepModel
from deepinfer_jax.runtime.slot_drafts import draft_rows, with_drafts
from deepinfer_jax.runtime.slot_sampling import count_tokens, flat_tables, sampling_rows, with_sampling
from deepinfer_jax.runtime.slot_table import SlotTable, grow_blocks
from deepinfer_jax.runtime.step_input import DECODE_COLUMNS, PREFILL_COLUMNS, unpack
from deepinfer_jax.sampling import DraftRows, Sampled, SamplerOptions, SamplingRows, draw_draft, prompt_logprobs, sample
from deepinfer_jax.scheduler import Bucket, blocks_for, blocks_per_decode

# Longest list of likeliest tokens; SamplingParams allows no longer one (DB §1.5).
MAX_TOP = 1000


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


def decode_step(
    model: StepModel,
    shape: CacheShape,
    bucket: Bucket,
    options: SamplerOptions,
    params: Any,
    state: StepState,
    packed: Array,
) -> tuple[StepOutput, StepState]:
    """The next tokens of each row's sequence, on `step_input.pack_decode`."""
    cache, table = state
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
    packing = pack_rows(verified, bucket.packed) if bucket.packed else None
    if packing is not None:
        batch = packing.batch(batch, shape.slots)
        rows, drafts = packing.take((rows, drafts), bucket.time)
    hidden, _, cache = model.advance(params, cache, batch)
    logits = model.logits(params, hidden)
    sampled = _sample(model, options, table, logits.reshape(-1, logits.shape[2]), rows, drafts, column["wants_top"])
    if packing is not None:
        sampled = packing.spread(sampled, bucket.time)
    else:
        sampled = jax.tree.map(lambda array: array.reshape(slots.size, bucket.time, *array.shape[1:]), sampled)

    accepted = jnp.sum(jnp.cumprod(sampled.accepted.astype(jnp.int32), axis=1), axis=1)  # the last row has no draft
    counts = jnp.minimum(accepted + 1, verified.reshape(-1))
    last = jnp.take_along_axis(sampled.tokens, accepted[:, None], axis=1).reshape(slots.shape)
    finite = jnp.all(sampled.finite | (jnp.arange(bucket.time) > accepted[:, None]), axis=1)
    computed = counts.reshape(slots.shape)
    counted = count_tokens(table.adjustments, slots, tokens, computed)
    written = jnp.where(computed > 0, slots, shape.slots)
    table = _advanced(dataclasses.replace(table, adjustments=counted), blocks, written, starts + computed, last)
    table, drafted = next_drafts(model, options, params, cache, table, written)
    judged = None if confidences is None else confidences.reshape(slots.size, -1)
    output = StepOutput(sampled, verified.reshape(-1), counts, finite, drafted, judged, None)
    return output, StepState(cache, table)


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

    With `features` [n, hidden], which are left as they are, `packed` holds the places that name them too.
    """
    cache, table = state
    column, new_blocks, tokens = unpack(packed, PREFILL_COLUMNS, blocks_for(bucket.time, shape.tokens_per_block))
    places = None
    if features is not None:
        tokens, places = jnp.split(tokens, 2, axis=2)
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
        places=places,
        features=features,
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
    sampled = _sample(model, options, table, logits, rows, None, column["wants_top"])
    table = _advanced(table, blocks, slots, ends, sampled.tokens.reshape(slots.shape))
    unjudged = lengths.reshape(-1) == 0  # bounded replay: no token of the chunk has a final state
    completing = jnp.where(column["completes"] > 0, slots, shape.slots)
    table, drafted = next_drafts(model, options, params, cache, table, completing)
    output = StepOutput(
        sampled=jax.tree.map(lambda array: array[:, None], sampled),
        verified=jnp.ones(slots.size, jnp.int32),
        counts=jnp.ones(slots.size, jnp.int32),
        finite=sampled.finite | unjudged,
        drafts=drafted,
        confidences=None,
        prompt_logprobs=of_prompt,
    )
    return output, StepState(cache, table)


def _advanced(table: SlotTable, blocks: Array, slots: Array, ends: Array, tokens: Array) -> SlotTable:
    """The slot table after a step: block tables, and the rows' new lengths and last tokens."""
    return dataclasses.replace(
        table,
        blocks=blocks,
        lengths=write_pool(table.lengths, (slots,), ends),
        last_token=write_pool(table.last_token, (slots,), tokens),
    )


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
                return rowwise(of_rows, logits, rows, lead=1)

        with jax.named_scope("draft"):
            return model.draft(params, cache, slots, lengths, given, count, pick)

    nothing = jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), jax.eval_shape(draw))
    drafted = jax.lax.cond(jnp.any(wanted), draw, lambda: nothing)
    return dataclasses.replace(table, drafts=with_drafts(kept, slots, drafted)), drafted.tokens


def _sample(
    model: StepModel,
    options: SamplerOptions,
    table: SlotTable,
    logits: Array,
    rows: SamplingRows,
    drafts: DraftRows | None,
    wants_top: Array,
) -> Sampled:
    any_top, tables = jnp.any(wants_top > 0), flat_tables(table.adjustments)

    def of_rows(logits: Array, rows: SamplingRows, drafts: DraftRows | None) -> Sampled:
        return sample(logits, rows, options=options, tables=tables, drafts=drafts, num_top=MAX_TOP, wants_top=any_top)

    with batch_invariant(model.batch_invariant):
        return rowwise(of_rows, logits, rows, drafts, lead=1)


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
