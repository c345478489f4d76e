"""What the device remembers of how each running sequence samples: sent once, when it starts."""

import dataclasses
from collections.abc import Callable
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from deepinfer_jax.kernels.pools import read_pool, write_pool
from deepinfer_jax.sampling import MAX_EDITS, Adjustments, SamplingRows
from deepinfer_jax.sampling.fields import SlotField, SlotFields, notes
from deepinfer_jax.sampling.rows import ROW_FIELDS


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotSampling(SlotFields):
    """Sampling parameters, one row per slot of each dp rank: `SlotFields` as arrays [data, slots, ...].

    Attributes:
        edited, penalised: bool [data, slots], whether the slot's edits and counts in `Adjustments` are its sequence's.
    """

    edited: Annotated[Array, SlotField("edited", np.bool_, False)]
    penalised: Annotated[Array, SlotField("penalised", np.bool_, False)]


def _by_dtype(fields: dict[str, SlotField]) -> dict[str, SlotField]:
    order = (np.float32, np.bool_, np.int32, np.uint32)
    return dict(sorted(fields.items(), key=lambda item: order.index(item[1].dtype)))


SAMPLING_FIELDS = _by_dtype(notes(SlotSampling, SlotField))
"""The fields of `SlotSampling` as the programs have them: those of one dtype together."""

COLUMN_DTYPES = {column: field.dtype for name, field in SAMPLING_FIELDS.items() for column in field.words or (name,)}
"""The columns of `step_input` that say so, in their order, and what each holds."""

jax.tree_util.register_dataclass(SlotSampling, data_fields=list(SAMPLING_FIELDS), meta_fields=[])


def init_slot_sampling(filled: Callable[..., Array]) -> SlotSampling:
    """Of empty slots: all is off. filled: (value, dtype, *more axes) -> array [data, slots, *more]."""
    return SlotSampling(
        **{name: filled(field.off, field.dtype, *field.axes) for name, field in SAMPLING_FIELDS.items()}
    )


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
    """With the parameters of the rows in slots int32 [data, rows]; column: of `COLUMN_DTYPES`, [data, rows]."""
    fields = SAMPLING_FIELDS.items()
    numbers = {name: column[name] for name, field in fields if field.dtype in (np.float32, np.int32)}
    flags = {name: column[name] != 0 for name, field in fields if field.dtype is np.bool_}
    pairs = {name: jnp.stack([column[word] for word in field.words], axis=-1) for name, field in fields if field.words}
    values = numbers | flags | pairs
    return kept.replace(**{name: write_pool(getattr(kept, name), (slots,), value) for name, value in values.items()})


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

    def of(name: str) -> Array:
        return spread(read_pool(getattr(kept, name), slots))

    idle = slots >= num_slots
    table_row = jnp.where(idle, -1, slots + num_slots * jnp.arange(data)[:, None])  # in the flat tables
    table_rows = spread(table_row)
    before = jnp.where(step <= step[:, None], uncounted[:, :, None], -1).reshape(data * rows * time, time)
    if masked is None:
        mask = jnp.full_like(table_rows, -1)
    else:
        own = table_row[..., None]
        has_mask = (masked[..., None] >> step & 1 > 0) & (own >= 0)
        mask = jnp.where(has_mask, own * tables.masks.shape[2] + step, -1).reshape(-1)
    own_fields = {
        name: of(name) | (table_rows < 0) if name == "greedy" else of(name)  # an idle row draws nothing
        for name in ROW_FIELDS
    }
    return SamplingRows(
        **own_fields,
        position=(position[..., None] + step).reshape(-1),
        forced=forced.reshape(-1),
        edits=jnp.where(of("edited"), table_rows, -1),
        counts=jnp.where(of("penalised"), table_rows, -1),
        mask=mask,
        uncounted=before,
    )


def flat_tables(kept: Adjustments) -> Adjustments:
    """The tables as `sample` reads them: [data · slots, ...], of the masks [data · slots · time, words]."""
    edit_ids, edit_values, edit_until, counts, masks = (x.reshape(-1, *x.shape[2:]) for x in kept)
    return Adjustments(edit_ids, edit_values, edit_until, counts, masks.reshape(-1, masks.shape[-1]))
