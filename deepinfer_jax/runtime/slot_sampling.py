"""What the device remembers of how each running sequence samples: sent once, when it starts."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from deepinfer_jax.kernels.pools import read_pool, write_pool
from deepinfer_jax.sampling import MAX_EDITS, Adjustments, SamplingRows

FLOAT_COLUMNS = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")
_FLAGS = ("greedy", "raw_logprobs", "edited", "penalised")
SAMPLING_COLUMNS = (*FLOAT_COLUMNS, *_FLAGS, "top_k", "seed_low", "seed_high")
"""The columns of `step_input` that say so; those of `FLOAT_COLUMNS` are floats."""


@struct.dataclass
class SlotSampling:
    """Sampling parameters, one row per slot of each dp rank; see `SamplingRows`.

    Attributes:
        temperature, top_p, min_p, presence, frequency, repetition: float32 [data, slots].
        top_k: int32 [data, slots].
        greedy, raw_logprobs: bool [data, slots].
        edited, penalised: bool [data, slots], whether the slot's edits and counts in `Adjustments` are its sequence's.
        seed: uint32 [data, slots, 2], low and high word of `seq_seed`.
    """

    temperature: Array
    top_p: Array
    min_p: Array
    presence: Array
    frequency: Array
    repetition: Array
    greedy: Array
    raw_logprobs: Array
    edited: Array
    penalised: Array
    top_k: Array
    seed: Array


def init_slot_sampling(filled: Callable[..., Array]) -> SlotSampling:
    """Of empty slots. filled: (value, dtype, *more axes) -> array [data, slots, *more]."""
    floats = {name: filled(1, jnp.float32) for name in FLOAT_COLUMNS}
    flags = {name: filled(name == "greedy", jnp.bool_) for name in _FLAGS}
    return SlotSampling(**floats, **flags, top_k=filled(-1, jnp.int32), seed=filled(0, jnp.uint32, 2))


def init_adjustments(filled: Callable[..., Array], vocab_size: int, time: int) -> Adjustments:
    """The tables of `Adjustments`, a row for each slot, of the masks one for each of the `time` rows of a decode step.

    Arrays [data, slots, ...] here. filled: as of `init_slot_sampling`.
    """
    return Adjustments(
        edit_ids=filled(-1, jnp.int32, MAX_EDITS),
        edit_values=filled(0, jnp.float32, MAX_EDITS),
        edit_until=filled(0, jnp.int32, MAX_EDITS),
        counts=filled(0, jnp.int32, vocab_size),
        masks=filled(0, jnp.uint32, time, -(-vocab_size // 32)),
    )


def with_sampling(kept: SlotSampling, slots: Array, column: dict[str, Array]) -> SlotSampling:
    """With the parameters of the rows in slots int32 [data, rows]; column: `SAMPLING_COLUMNS`, [data, rows]."""
    values = {name: column[name] for name in (*FLOAT_COLUMNS, "top_k")} | {name: column[name] != 0 for name in _FLAGS}
    values["seed"] = jnp.stack([column["seed_low"], column["seed_high"]], axis=-1)
    return dataclasses.replace(
        kept, **{name: write_pool(getattr(kept, name), (slots,), value) for name, value in values.items()}
    )


def with_adjustments(kept: Adjustments, packed: Array, counts: Array) -> Adjustments:
    """With the edits and counts of rows: packed int32 [data, rows, 1 + 3 · MAX_EDITS], of `pack_edits` behind the slot
    (out of range: no row); counts int32 [data, rows, vocab]."""
    slots, edits = (packed[..., 0],), packed[..., 1:]
    ids, values, until = (edits[..., i * MAX_EDITS : (i + 1) * MAX_EDITS] for i in range(3))
    return kept._replace(
        edit_ids=write_pool(kept.edit_ids, slots, ids),
        edit_values=write_pool(kept.edit_values, slots, jax.lax.bitcast_convert_type(values, jnp.float32)),
        edit_until=write_pool(kept.edit_until, slots, until),
        counts=write_pool(kept.counts, slots, counts),
    )


def pack_edits(edits: list[tuple[int, float, int]]) -> np.ndarray:
    """int32 [3 · MAX_EDITS]: ids, values as their bits, and until which position, of at most MAX_EDITS entries."""
    packed = np.zeros((3, MAX_EDITS), np.int32)
    packed[0] = -1
    if edits:
        ids, values, until = zip(*edits, strict=True)
        packed[:, : len(edits)] = ids, np.asarray(values, np.float32).view(np.int32), until
    return packed.reshape(-1)


def count_tokens(kept: Adjustments, slots: Array, tokens: Array, numbers: Array) -> Adjustments:
    """With one more of each of the first `numbers` [data, rows] output tokens int32 [data, rows, k] of the rows."""
    first = jnp.arange(tokens.shape[-1]) < numbers[..., None]
    tokens = jnp.where(first, tokens, kept.counts.shape[-1])  # out of range and dropped

    def counted(own: Array, slot: Array, token: Array) -> Array:
        return own.at[slot[:, None], token].add(2, mode="drop")

    return kept._replace(counts=jax.vmap(counted)(kept.counts, slots, tokens))


def sampling_rows(
    kept: SlotSampling,
    tables: Adjustments,
    slots: Array,
    position: Array,
    *,
    forced: Array,
    uncounted: Array,
    masked: Array | None = None,
) -> SamplingRows:
    """What the rows sample by, in one row axis [data · rows · time].

    Args:
        tables: of `init_adjustments`; the rows refer to those of `flat_tables`.
        slots: int32 [data, rows].
        position: of the first of the `time` tokens that a row is to produce, one after the other. int32 [data, rows].
        forced: int32 [data, rows, time].
        uncounted: the tokens of which the first j + 1 stand before token j and are output that is not counted yet;
            negative: none. int32 [data, rows, time].
        masked: bit j says whether the slot's mask j is that of token j. int32 [data, rows]; None: no row has a mask.
    """
    data, rows, time = forced.shape
    num_slots = kept.greedy.shape[1]
    step = jnp.arange(time)

    def spread(array: Array) -> Array:
        """[data, rows, ...], the same for all tokens of a row."""
        return jnp.repeat(array.reshape(data * rows, *array.shape[2:]), time, axis=0)

    def of(array: Array) -> Array:
        return spread(read_pool(array, slots))

    idle = slots >= num_slots
    holder = jnp.where(idle, -1, slots + num_slots * jnp.arange(data)[:, None])  # in the flat tables
    residents = spread(holder)
    before = jnp.where(step <= step[:, None], uncounted[:, :, None], -1).reshape(data * rows * time, time)
    if masked is None:
        mask = jnp.full_like(residents, -1)
    else:
        own = holder[..., None]
        has_mask = (masked[..., None] >> step & 1 > 0) & (own >= 0)
        mask = jnp.where(has_mask, own * tables.masks.shape[2] + step, -1).reshape(-1)
    return SamplingRows(
        temperature=of(kept.temperature),
        greedy=of(kept.greedy) | (residents < 0),  # an idle row draws nothing
        top_p=of(kept.top_p),
        top_k=of(kept.top_k),
        min_p=of(kept.min_p),
        raw_logprobs=of(kept.raw_logprobs),
        presence=of(kept.presence),
        frequency=of(kept.frequency),
        repetition=of(kept.repetition),
        seed=of(kept.seed),
        position=(position[..., None] + step).reshape(-1),
        forced=forced.reshape(-1),
        edits=jnp.where(of(kept.edited), residents, -1),
        counts=jnp.where(of(kept.penalised), residents, -1),
        mask=mask,
        uncounted=before,
    )


def flat_tables(kept: Adjustments) -> Adjustments:
    """The tables as `sample` reads them: [data · slots, ...], of the masks [data · slots · time, words]."""
    edit_ids, edit_values, edit_until, counts, masks = (x.reshape(-1, *x.shape[2:]) for x in kept)
    return Adjustments(edit_ids, edit_values, edit_until, counts, masks.reshape(-1, masks.shape[-1]))
