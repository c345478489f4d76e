"""The state that steps hand on, on the device, and the state ops on it: read, restore, write, draft, poison.

`Runner` adds the steps. What a state op computes is in `state_ops.py`.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax import Array
from jax.sharding import Mesh

from deepinfer_jax.cache.pools import CacheShape, block_bytes, init_pools, slot_bytes
from deepinfer_jax.runtime.compiled_programs import CompiledPrograms
from deepinfer_jax.runtime.paged_model import StepModel
from deepinfer_jax.runtime.slot_table import init_slot_table
from deepinfer_jax.runtime.state_ops import (
    BLOCK_ROWS,
    MASK_ROWS,
    SLOT_ROWS,
    PendingBytes,
    Places,
    StateOp,
    pack_restore,
    places,
)
from deepinfer_jax.runtime.steps import StepState
from deepinfer_jax.sampling import SamplerOptions
from deepinfer_jax.weights.sharding import over_data


class DeviceState:
    """Pools and slot table of one engine, and the state ops on them, which happen in the order of the calls.

    Every program that changes the state takes it for good: where one fails, none is left until `reset`.

    Arguments:
        shape: sizes of the pools.
        table_width: blocks of the longest block table.
        mesh: what `params` are spread over; the data axis has `shape.data` devices.
        options: what all rows are sampled by.
        features: image features that every prefill step takes, or their description; None: none.

    Attributes:
        slot_bytes: of the state of one sequence.
        block_bytes: of one block.
    """

    def __init__(
        self,
        model: StepModel,
        params: Any,
        *,
        shape: CacheShape,
        table_width: int,
        mesh: Mesh | None,
        options: SamplerOptions,
        features: Array | jax.ShapeDtypeStruct | None,
    ) -> None:
        declared = model.state(shape.tokens_per_block)
        self.slot_bytes, self.block_bytes = slot_bytes(declared), block_bytes(declared)
        self._model = model
        self._params = params
        self._shape = shape
        self._table_width = table_width
        self._mesh = mesh
        self._placement = over_data(mesh)
        self._programs = CompiledPrograms(model, shape, table_width, self._placement, options, features)
        self._state: StepState | None = None
        self.reset()

    def reset(self) -> None:
        """Empties pools and slots; needed after a step that failed, which took the state with it."""
        self._state = None  # freed before the new one is made
        cache = init_pools(self._model.state(self._shape.tokens_per_block), self._shape, self._mesh)
        table = init_slot_table(self._shape, self._table_width, self._model.vocab_size, self._mesh)
        self._state = StepState(cache, table)

    def close(self) -> None:
        """Frees parameters, state and programs."""
        self._params = self._state = None
        self._programs.clear()

    def read_slots(
        self, dp_rank: npt.NDArray[np.int32], slots: npt.NDArray[np.int32], lengths: npt.NDArray[np.int32]
    ) -> PendingBytes:
        """Launches the reading of n sequences' state as the last launched step leaves it; result [n, slot_bytes].

        dp_rank, slots: int32 [n]; lengths: tokens whose state it is, at most `CacheShape.num_drafts` fewer than the
        last launched step may have computed. int32 [n].
        """
        where = places(dp_rank, SLOT_ROWS)
        numbers = np.stack([slots, lengths], axis=1)
        return self._read("read_slots", where, numbers, SLOT_ROWS, self._shape.slots, self.slot_bytes)

    def restore(
        self,
        dp_rank: npt.NDArray[np.int32],
        slots: npt.NDArray[np.int32],
        lengths: npt.NDArray[np.int32],
        last_tokens: npt.NDArray[np.int32],
        block_tables: Sequence[Sequence[int]],
        sampling: Mapping[str, npt.NDArray[Any]],
        states: npt.NDArray[np.uint8],
    ) -> None:
        """Launches the filling of n slots: state, whole block table, length, last token and sampling parameters.

        A prefill step that starts at the length may follow, or, of a prompt that is computed, a decode step.

        Args:
            dp_rank, slots: int32 [n], where.
            lengths: tokens whose state it is. int32 [n].
            last_tokens: the token at position length, where it is known; a decode step takes it. int32 [n].
            block_tables: n of them, of at most table_width blocks.
            sampling: the columns of `step_input.RESTORE_COLUMNS` that are not named here, [n]; others are passed over.
            states: what `read_slots` gave for sequences of these lengths. uint8 [n, slot_bytes].
        """
        where, shape = places(dp_rank, SLOT_ROWS), self._shape
        rows = pack_restore(where, shape, slots, lengths, last_tokens, block_tables, self._table_width, sampling)
        for inputs in zip(rows, where.spread(states, shape.data, SLOT_ROWS, 0), strict=True):
            self._write("restore", *inputs)

    def write_adjustments(
        self,
        dp_rank: npt.NDArray[np.int32],
        slots: npt.NDArray[np.int32],
        edits: npt.NDArray[np.int32],
        counts: npt.NDArray[np.int32],
    ) -> None:
        """Launches the writing of what changes the logits of n sequences that start.

        dp_rank, slots: int32 [n]; edits: of `pack_edits`, int32 [n, 3 · MAX_EDITS]; counts: those of `Adjustments`
        without the last token that the slot will know, int32 [n, vocab].
        """
        where, shape = places(dp_rank, SLOT_ROWS), self._shape
        edit_rows = where.spread(np.hstack([slots[:, None], edits]), shape.data, SLOT_ROWS, shape.slots)
        for inputs in zip(edit_rows, where.spread(counts, shape.data, SLOT_ROWS, 0), strict=True):
            self._write("write_adjustments", *inputs)

    def drafts(self, dp_rank: npt.NDArray[np.int32], slots: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """int32 [n, drafts]: what the next decode step verifies of n slots; waits for all that was launched."""
        assert self._state is not None and self._state.table.drafts is not None
        return np.asarray(self._state.table.drafts.tokens)[dp_rank, slots]

    def write_masks(
        self, dp_rank: npt.NDArray[np.int32], slots: npt.NDArray[np.int32], masks: npt.NDArray[np.uint32]
    ) -> None:
        """Launches the writing of the masks of n slots for the steps that follow.

        dp_rank, slots: int32 [n]; masks: uint32 [n, 1 + num_drafts, words], see `Adjustments.masks`.
        """
        where, shape = places(dp_rank, MASK_ROWS), self._shape
        numbers, rows = (
            where.spread(slots, shape.data, MASK_ROWS, shape.slots),
            where.spread(masks, shape.data, MASK_ROWS, 0),
        )
        state, self._state = self._state, None  # its masks are donated
        assert state is not None
        written = state.table.adjustments.masks
        for inputs in zip(numbers, rows, strict=True):
            written = self._programs.write_masks(written, *(jax.device_put(own, self._placement) for own in inputs))
        self._state = state._replace(
            table=dataclasses.replace(state.table, adjustments=state.table.adjustments._replace(masks=written))
        )

    def draft(self, dp_rank: npt.NDArray[np.int32], slots: npt.NDArray[np.int32]) -> None:
        """Launches the drafting behind the last tokens of n restored slots, for the decode step that follows.

        dp_rank, slots: int32 [n].
        """
        where, shape = places(dp_rank, SLOT_ROWS), self._shape
        for own in where.spread(slots, shape.data, SLOT_ROWS, shape.slots):
            self._write("draft", own)

    def read_blocks(self, dp_rank: int, blocks: Sequence[int]) -> PendingBytes:
        """Launches the reading of n blocks of one dp rank; result [n, block_bytes]."""
        where, numbers = self._block_calls(dp_rank, blocks)
        return self._read("read_blocks", where, numbers, BLOCK_ROWS, self._shape.blocks, self.block_bytes)

    def write_blocks(self, dp_rank: int, blocks: Sequence[int], contents: npt.NDArray[np.uint8]) -> None:
        """Launches the writing of n blocks of one dp rank; contents: of `read_blocks`, uint8 [n, block_bytes]."""
        (where, numbers), shape = self._block_calls(dp_rank, blocks), self._shape
        rows = where.spread(numbers, shape.data, BLOCK_ROWS, shape.blocks)
        for inputs in zip(rows, where.spread(contents, shape.data, BLOCK_ROWS, 0), strict=True):
            self._write("write_blocks", *inputs)

    def poison(self, blocks: Sequence[Sequence[int]], slots: Sequence[Sequence[int]]) -> None:
        """Launches the overwriting of blocks and slots, a list of each for every dp rank (`cache.pools.poison`)."""
        shape = self._shape
        spread_blocks = _spread_lists(blocks, shape.data, BLOCK_ROWS, shape.blocks)
        spread_slots = _spread_lists(slots, shape.data, SLOT_ROWS, shape.slots)
        for own_blocks, own_slots in itertools.zip_longest(spread_blocks, spread_slots):
            self._write(
                "poison",
                np.full((shape.data, BLOCK_ROWS), shape.blocks, np.int32) if own_blocks is None else own_blocks,
                np.full((shape.data, SLOT_ROWS), shape.slots, np.int32) if own_slots is None else own_slots,
            )

    def _block_calls(self, dp_rank: int, blocks: Sequence[int]) -> tuple[Places, npt.NDArray[np.int32]]:
        return places(np.full(len(blocks), dp_rank, np.int32), BLOCK_ROWS), np.asarray(blocks, np.int32)

    def _read(
        self, op: StateOp, where: Places, numbers: npt.NDArray[np.int32], rows: int, empty: int, width: int
    ) -> PendingBytes:
        program = self._programs.state_op(op)
        inputs = where.spread(numbers, self._shape.data, rows, empty)
        arrays = tuple(program(self._params, self._state, jax.device_put(own, self._placement)) for own in inputs)
        for array in arrays:
            array.copy_to_host_async()
        return PendingBytes(arrays, where, width)

    def _write(self, op: StateOp, *inputs: npt.NDArray[Any]) -> None:
        program = self._programs.state_op(op)
        state, self._state = self._state, None  # donated: a program that fails leaves none
        self._state = program(self._params, state, *(jax.device_put(own, self._placement) for own in inputs))


def _spread_lists(lists: Sequence[Sequence[int]], data: int, rows: int, empty: int) -> list[npt.NDArray[np.int32]]:
    """A list of numbers for each dp rank, `rows` of each to an array int32 [data, rows] filled up with `empty`."""
    dp_rank = np.repeat(np.arange(len(lists), dtype=np.int32), [len(own) for own in lists])
    numbers = np.asarray([number for own in lists for number in own], np.int32)
    return places(dp_rank, rows).spread(numbers, data, rows, empty)
