"""State ops: the programs beside the steps. They copy state between host and device, draft behind it, write what
changes logits, or spoil blocks and slots.

Each takes a few rows, always as many; more rows are several calls. Unused rows have a slot or a block out of range:
nothing is written for them, and what is read for them means nothing.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import numpy as np
import numpy.typing as npt
from jax import Array

from deepinfer_jax.cache.pools import (
    CacheShape,
    block_bytes,
    poison,
    read_blocks,
    read_slots,
    slot_bytes,
    write_blocks,
    write_slots,
)
from deepinfer_jax.kernels.pools import write_pool
from deepinfer_jax.runtime.paged_model import StepModel
from deepinfer_jax.runtime.slot_sampling import with_adjustments, with_sampling
from deepinfer_jax.runtime.step_input import RESTORE_COLUMNS, pack_rows, unpack
from deepinfer_jax.runtime.step_sampling import next_drafts
from deepinfer_jax.runtime.steps import StepState
from deepinfer_jax.sampling import MAX_EDITS, NO_OPTIONS, SamplerOptions
from deepinfer_jax.scheduler.plan import row_places

StateOp = Literal["read_slots", "restore", "read_blocks", "write_blocks", "draft", "poison", "write_adjustments"]

WRITES: frozenset[StateOp] = frozenset({*get_args(StateOp)} - {"read_slots", "read_blocks"})
"""Ops that take the state and give it back changed; the others give bytes and leave it."""

# Rows of one call, of each dp rank.
SLOT_ROWS = 4
BLOCK_ROWS = 16
MASK_ROWS = 8


def state_op_program(
    model: StepModel, op: StateOp, shape: CacheShape, options: SamplerOptions = NO_OPTIONS
) -> Callable[..., Any]:
    """The function (parameters, state, *host inputs) of an op."""
    declared = model.state(shape.tokens_per_block)

    def read_state(params: Any, state: StepState, rows: Array) -> Array:
        return read_slots(declared, state.cache, rows[..., 0], rows[..., 1])

    def read_contents(params: Any, state: StepState, blocks: Array) -> Array:
        return read_blocks(declared, state.cache, blocks)

    def write_contents(params: Any, state: StepState, blocks: Array, contents: Array) -> StepState:
        return state._replace(cache=write_blocks(declared, state.cache, blocks, contents))

    def draft(params: Any, state: StepState, slots: Array) -> StepState:
        return state._replace(table=next_drafts(model, options, params, state.cache, state.table, slots)[0])

    def spoil(params: Any, state: StepState, blocks: Array, slots: Array) -> StepState:
        return state._replace(cache=poison(declared, state.cache, blocks, slots))

    def adjust(params: Any, state: StepState, edits: Array, counts: Array) -> StepState:
        adjustments = with_adjustments(state.table.adjustments, edits, counts)
        return state._replace(table=dataclasses.replace(state.table, adjustments=adjustments))

    programs: dict[StateOp, Callable[..., Any]] = {
        "read_slots": read_state,
        "restore": functools.partial(_restore, declared),
        "read_blocks": read_contents,
        "write_blocks": write_contents,
        "draft": draft,
        "poison": spoil,
        "write_adjustments": adjust,
    }
    return programs[op]


def state_op_input_shapes(
    model: StepModel, op: StateOp, shape: CacheShape, table_width: int
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The host inputs of an op; each leads with the data axis."""
    declared = model.state(shape.tokens_per_block)
    slots, blocks = (shape.data, SLOT_ROWS), (shape.data, BLOCK_ROWS)
    inputs: dict[StateOp, tuple[tuple[Any, Any], ...]] = {
        "read_slots": (((*slots, 2), np.int32),),
        "restore": (
            ((*slots, len(RESTORE_COLUMNS) + table_width), np.int32),
            ((*slots, slot_bytes(declared)), np.uint8),
        ),
        "read_blocks": ((blocks, np.int32),),
        "write_blocks": ((blocks, np.int32), ((*blocks, block_bytes(declared)), np.uint8)),
        "draft": ((slots, np.int32),),
        "poison": ((blocks, np.int32), (slots, np.int32)),
        "write_adjustments": (((*slots, 1 + 3 * MAX_EDITS), np.int32), ((*slots, model.vocab_size), np.int32)),
    }
    return tuple(jax.ShapeDtypeStruct(size, dtype) for size, dtype in inputs[op])


def write_masks(masks: Array, slots: Array, rows: Array) -> Array:
    """The slot table's `Adjustments.masks` with rows uint32 [data, k, time, words] in slots int32 [data, k].

    It comes before every step of a constrained sequence, so it takes nothing else of the state.
    """
    return write_pool(masks, (slots,), rows)


def mask_input_shapes(masks: jax.ShapeDtypeStruct) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """The host inputs of `write_masks`."""
    rows = (masks.shape[0], MASK_ROWS)
    return jax.ShapeDtypeStruct(rows, np.int32), jax.ShapeDtypeStruct((*rows, *masks.shape[2:]), masks.dtype)


def _restore(declared: Any, params: Any, state: StepState, packed: Array, states: Array) -> StepState:
    """Slot state, block table, length, limit, last token and sampling parameters of each row, on `pack_restore`."""
    cache, table = state
    column, tables, _ = unpack(packed, RESTORE_COLUMNS, packed.shape[2] - len(RESTORE_COLUMNS))
    slots = column["slot"]
    table = dataclasses.replace(
        table,
        lengths=write_pool(table.lengths, (slots,), column["length"]),
        limit=write_pool(table.limit, (slots,), column["limit"]),
        last_token=write_pool(table.last_token, (slots,), column["last_token"]),
        blocks=write_pool(table.blocks, (slots,), tables),
        sampling=with_sampling(table.sampling, slots, column),
    )
    return StepState(write_slots(declared, cache, slots, column["length"], states), table)


class Places(NamedTuple):
    """Where rows stand in the calls of an op: in array `call` at [dp_rank, row]. int32 [n] each."""

    call: npt.NDArray[np.int32]
    dp_rank: npt.NDArray[np.int32]
    row: npt.NDArray[np.int32]

    @property
    def num_calls(self) -> int:
        return int(self.call.max(initial=-1)) + 1

    def spread(self, values: npt.NDArray[Any], data: int, rows: int, empty: int) -> list[npt.NDArray[Any]]:
        """values [n, ...] -> for each call [data, rows, ...], `empty` where no row stands.

        Always fresh arrays: JAX on CPU reads the host's buffer while the program runs (K11).
        """
        spread = np.full((self.num_calls, data, rows, *values.shape[1:]), empty, values.dtype)
        spread[self] = values
        return list(spread)


def places(dp_rank: npt.NDArray[np.int32], rows: int) -> Places:
    """The rows of each dp rank, in their order, `rows` to a call."""
    ordinal, _ = row_places(dp_rank)
    return Places(ordinal // rows, np.asarray(dp_rank, np.int32), ordinal % rows)


def pack_restore(
    where: Places,
    shape: CacheShape,
    slots: npt.NDArray[np.int32],
    lengths: npt.NDArray[np.int32],
    last_tokens: npt.NDArray[np.int32],
    block_tables: Sequence[Sequence[int]],
    table_width: int,
    sampling: Mapping[str, npt.ArrayLike],
) -> list[npt.NDArray[np.int32]]:
    """For each call int32 [data, SLOT_ROWS, columns + table_width]; a block table ends with the number of blocks."""
    tables = np.full((len(slots), table_width), shape.blocks, np.int32)
    for row, blocks in enumerate(block_tables):
        tables[row, : len(blocks)] = blocks
    columns = {**sampling, "slot": slots, "length": lengths, "last_token": last_tokens}
    rows = pack_rows(len(slots), RESTORE_COLUMNS, columns, tables)
    return where.spread(rows, shape.data, SLOT_ROWS, shape.slots)


@dataclasses.dataclass(frozen=True)
class PendingBytes:
    """Bytes that are on their way to the host.

    Attributes:
        arrays: of each call, uint8 [data, rows, bytes].
        places: of the n rows in them.
        width: bytes of each.
    """

    arrays: tuple[Array, ...]
    places: Places
    width: int

    def result(self) -> npt.NDArray[np.uint8]:
        """uint8 [n, width]. Waits until they are here; raises what went wrong on the device."""
        call, *place = self.places
        found = np.empty((len(call), self.width), np.uint8)
        for number, array in enumerate(self.arrays):
            own = call == number
            dp_rank, row = (axis[own] for axis in place)
            found[own] = np.asarray(array)[dp_rank, row]
        return found

    def rows(self) -> list[npt.NDArray[np.uint8]]:
        """The same as n arrays, uint8 [width] each in memory of its own: one that is kept keeps no other."""
        arrays = [np.asarray(array) for array in self.arrays]
        return [arrays[call][dp_rank, row].copy() for call, dp_rank, row in zip(*self.places, strict=True)]
