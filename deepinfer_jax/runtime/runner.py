"""Compiled step programs, the state that they hand on, and results that are still on their way."""

import dataclasses
import functools
import itertools
import logging
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax import Array
from jax.sharding import Mesh
from tqdm import tqdm

from deepinfer_jax.cache.pools import CacheShape, block_bytes, init_pools, slot_bytes
from deepinfer_jax.runtime.abstract_tree import AbstractTree, abstract_tree
from deepinfer_jax.runtime.duties import STEPS_ALONE, RunnerDuties
from deepinfer_jax.runtime.paged_model import StepModel
from deepinfer_jax.runtime.slot_table import init_slot_table
from deepinfer_jax.runtime.state_ops import (
    BLOCK_ROWS,
    MASK_ROWS,
    SLOT_ROWS,
    WRITES,
    PendingBytes,
    Places,
    StateOp,
    mask_input_shapes,
    pack_restore,
    places,
    state_op_input_shapes,
    state_op_program,
    write_masks,
)
from deepinfer_jax.runtime.step_input import full_decode, pack_decode, pack_prefill
from deepinfer_jax.runtime.step_program import Kind, host_input_shape, program_of
from deepinfer_jax.runtime.steps import StepOutput, StepState
from deepinfer_jax.sampling import NO_OPTIONS, SamplerOptions
from deepinfer_jax.scheduler import Bucket, BucketTable, DecodeStep, PrefillStep
from deepinfer_jax.weights.sharding import over_data

logger = logging.getLogger(__name__)

_COMPILER_THREADS = 4


@functools.lru_cache(maxsize=64)
def compile_step(
    model: StepModel,
    kind: Kind,
    shape: CacheShape,
    bucket: Bucket,
    options: SamplerOptions,
    params: AbstractTree,
    state: AbstractTree,
    inputs: AbstractTree,
) -> Any:
    """The compiled step program, which takes (params, state, *inputs) and donates the state.

    Engines of one process share programs: a model with equal configuration and arrays of equal kind is compiled once.
    """
    logger.info("compiling the %s program of %s", kind, bucket)
    step = jax.jit(program_of(model, kind, shape, bucket, options), donate_argnums=1)
    return step.lower(params.tree(), state.tree(), *inputs.tree()).compile()


@functools.lru_cache(maxsize=32)
def compile_state_op(
    model: StepModel,
    move: StateOp,
    shape: CacheShape,
    options: SamplerOptions,
    params: AbstractTree,
    state: AbstractTree,
    inputs: AbstractTree,
) -> Any:
    """The compiled program of a move, which takes (params, state, *inputs); shared like those of `compile_step`."""
    logger.info("compiling the %s program", move)
    program = jax.jit(state_op_program(model, move, shape, options), donate_argnums=1 if move in WRITES else ())
    return program.lower(params.tree(), state.tree(), *inputs.tree()).compile()


@functools.lru_cache(maxsize=32)
def compile_write_masks(masks: AbstractTree, rows: AbstractTree) -> Any:
    """The compiled `write_masks`; shared like those of `compile_step`."""
    return jax.jit(write_masks, donate_argnums=0).lower(masks.tree(), *rows.tree()).compile()


@dataclass(frozen=True)
class StepResult:
    """What the sequences of one step gave, in the step's order, n of them; see `StepOutput`.

    Attributes:
        tokens: of q = 1 row of a prefill step, of q = 1 + drafts rows of a decode step. int32 [n, q].
        counts: so many of them, the first ones, count. int32 [n].
        logprobs: float32 [n, q].
        finite: bool [n], false where the logits were not.
        verified: rows that were computed, at most q. int32 [n].
        drafts: the next ones, int32 [n, drafts]; None without.
        confidences: raw, of the drafts that might have been verified. float32 [n, drafts]; None of a prefill step, or
            without drafts.
        top_tokens, top_logprobs: int32 and float32 [n, q, 1000 or the vocabulary]; None unless some row wanted them.
        prompt_logprobs: float32 [n, time]; None unless some row wanted them.
        sum_smaller_probs: float32 [n, q]; None unless the sampler's options ask for them.
        draft_logprobs: float32 [n, q], of each row's draft in its own distribution; None of a prefill step, and unless
            the sampler's options ask for them.
    """

    tokens: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    finite: npt.NDArray[np.bool_]
    verified: npt.NDArray[np.int32]
    drafts: npt.NDArray[np.int32] | None = None
    confidences: npt.NDArray[np.float32] | None = None
    top_tokens: npt.NDArray[np.int32] | None = None
    top_logprobs: npt.NDArray[np.float32] | None = None
    prompt_logprobs: npt.NDArray[np.float32] | None = None
    sum_smaller_probs: npt.NDArray[np.float32] | None = None
    draft_logprobs: npt.NDArray[np.float32] | None = None


@dataclass(frozen=True)
class InFlight:
    """A launched step. Its small outputs are already on their way to the host.

    Attributes:
        arrays: what will be read, by the names of `StepResult`; device arrays [data · bucket.rows, ...].
        places: int32 [n], where the step's sequences are among these rows.
    """

    arrays: dict[str, Array]
    places: npt.NDArray[np.int32]

    @classmethod
    def start(
        cls, output: StepOutput, places: npt.NDArray[np.int32], wants_top: bool, wants_prompt_logprobs: bool
    ) -> "InFlight":
        """Sends the arrays that `result` reads towards the host as soon as they exist."""
        sampled = output.sampled
        arrays = {
            "tokens": sampled.tokens,
            "counts": output.counts,
            "logprobs": sampled.logprobs,
            "finite": output.finite,
            "verified": output.verified,
            "drafts": output.drafts,
            "confidences": output.confidences,
            "top_tokens": sampled.top_tokens if wants_top else None,
            "top_logprobs": sampled.top_logprobs if wants_top else None,
            "prompt_logprobs": output.prompt_logprobs if wants_prompt_logprobs else None,
            "sum_smaller_probs": sampled.sum_smaller_probs,
            "draft_logprobs": sampled.draft_logprobs,
        }
        in_flight = cls({name: array for name, array in arrays.items() if array is not None}, places)
        for array in in_flight.arrays.values():
            array.copy_to_host_async()
        return in_flight

    def result(self) -> StepResult:
        """Waits until the step is done; raises what went wrong on the device."""
        found: dict[str, Any] = {name: np.asarray(array)[self.places] for name, array in self.arrays.items()}
        return StepResult(**found)


class Runner:
    """Runs step programs of `model` with `params`, one per bucket, and moves state; all compiled by `warm_up`.

    Steps and moves happen on the device in the order of the calls.

    Arguments:
        buckets: every shape that a step may have.
        shape: sizes of the pools.
        table_width: blocks of the longest block table.
        mesh: what `params` are spread over; the data axis has `shape.data` devices.
        duties: what will run.
        options: what all rows are sampled by.
        features: image features [n, hidden] that every prefill step will take, or their description; None: none.

    Attributes:
        slot_bytes: of the state of one sequence.
        block_bytes: of one block.
    """

    def __init__(
        self,
        model: StepModel,
        params: Any,
        *,
        buckets: BucketTable,
        shape: CacheShape,
        table_width: int,
        mesh: Mesh | None = None,
        duties: RunnerDuties = STEPS_ALONE,
        options: SamplerOptions = NO_OPTIONS,
        features: Array | jax.ShapeDtypeStruct | None = None,
    ) -> None:
        declared = model.state(shape.tokens_per_block)
        self.slot_bytes, self.block_bytes = slot_bytes(declared), block_bytes(declared)
        self._model = model
        self._params = params
        self._buckets = buckets
        self._shape = shape
        self._table_width = table_width
        self._mesh = mesh
        self._placement = over_data(mesh)
        self._duties = duties
        self._options = options
        self._features = None if features is None else abstract_tree(features)
        self._programs: dict[tuple[Kind, Bucket], Any] = {}
        self._moves: dict[StateOp, Any] = {}
        self._write_masks: Any = None  # compiled
        self._state: StepState | None = None
        self.reset()

    @property
    def compile_count(self) -> int:
        """How many step programs this runner has; `warm_up` makes all, a step never one. Those that move state come
        beside them, at most eight."""
        return len(self._programs)

    def warm_up(self, *, progress: bool = False) -> None:
        """Compiles every program ahead of time; nothing is run, so no state is left behind (K19)."""
        buckets = {"decode": self._buckets.decode, "prefill": self._buckets.prefill}
        steps: list[tuple[Kind, Bucket]] = [(kind, bucket) for kind in self._duties.kinds for bucket in buckets[kind]]
        params, state = abstract_tree(self._params), abstract_tree(self._state)

        def compiled(kind: Kind, bucket: Bucket) -> Any:
            features = self._features.leaves if self._features is not None and kind == "prefill" else ()
            host_input = jax.ShapeDtypeStruct(
                host_input_shape(kind, self._shape, bucket, images=bool(features)), np.int32, sharding=self._placement
            )
            taken = (host_input, *features)
            inputs = AbstractTree(jax.tree.structure(taken), taken)
            return compile_step(self._model, kind, self._shape, bucket, self._options, params, state, inputs)

        def compiled_move(move: StateOp) -> Any:
            inputs = state_op_input_shapes(self._model, move, self._shape, self._table_width)
            placed = (jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._placement) for x in inputs)
            host_inputs = AbstractTree(jax.tree.structure(inputs), tuple(placed))
            return compile_state_op(self._model, move, self._shape, self._options, params, state, host_inputs)

        assert self._state is not None
        masks = abstract_tree(self._state.table.adjustments.masks)
        shapes = mask_input_shapes(masks.leaves[0])
        rows = (jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._placement) for x in shapes)
        self._write_masks = compile_write_masks(masks, AbstractTree(jax.tree.structure(shapes), tuple(rows)))

        # The compiler leaves Python alone and is mostly one thread. Each program it works on takes memory.
        with ThreadPoolExecutor(min(_COMPILER_THREADS, os.cpu_count() or 1)) as pool:
            programs = pool.map(compiled, *zip(*steps, strict=True))
            moves = pool.map(compiled_move, self._duties.state_ops)
            bar = tqdm(programs, desc="Compiling step programs", total=len(steps), disable=not progress, leave=False)
            self._programs = dict(zip(steps, bar, strict=True))
            self._moves = dict(zip(self._duties.state_ops, moves, strict=True))

    def time_decode(self, bucket: Bucket, *, runs: int = 5) -> float:
        """Milliseconds that a decode program takes with all its rows in use: the median of some runs, on random tokens.

        Pools and slots are empty afterwards.
        """
        program, state = self._programs["decode", bucket], self._state
        assert state is not None
        packed = jax.device_put(full_decode(bucket, self._shape.data, self._shape.tokens_per_block), self._placement)
        rng, table = np.random.default_rng(0), state.table

        def random(kept: Array) -> Array:  # so that the tokens go to different experts
            return jax.device_put(rng.integers(self._model.vocab_size, size=kept.shape, dtype=np.int32), kept.sharding)

        drafts = table.drafts
        table = dataclasses.replace(
            table,
            limit=table.limit + np.int32(1 << 30),
            last_token=random(table.last_token),
            drafts=None if drafts is None else dataclasses.replace(drafts, tokens=random(drafts.tokens)),
        )
        state, self._state = StepState(state.cache, table), None
        seconds = []
        for _ in range(1 + runs):
            start = time.perf_counter()
            output, state = program(self._params, state, packed)
            jax.block_until_ready(output.counts)
            seconds.append(time.perf_counter() - start)
        self.reset()
        return 1000 * statistics.median(seconds[1:])

    def prefill(
        self,
        step: PrefillStep,
        sampling: dict[str, npt.NDArray[Any]],
        images: tuple[npt.NDArray[np.int32], Array] | None = None,
    ) -> InFlight:
        """Launches a prefill step.

        sampling: the columns of `step_input.PREFILL_COLUMNS` that the step lacks, [n]; images: exactly if this runner
        was made with features, the places of the step's tokens, int32 [n, bucket.time] (`StepBatch`, all −1 without
        an image), and the features as they are now.
        """
        if (images is None) != (self._features is None):
            raise RuntimeError(
                "this runner's prefill programs take image features: hand over places and features with every step"
                if images is None
                else "this runner's prefill programs take no images: make it with features"
            )
        image_places, features = images or (None, None)
        packed = pack_prefill(step, self._shape.data, self._shape.slots, sampling, image_places)
        wants_top, wants_prompt = (bool(np.any(sampling[name])) for name in ("wants_top", "wants_prompt_logprobs"))
        return self._launch("prefill", step, packed, wants_top, wants_prompt, features)

    def decode(
        self,
        step: DecodeStep,
        forced: npt.NDArray[np.int32] | None,
        masked: npt.NDArray[np.int32] | None,
        wants_top: bool,
    ) -> InFlight:
        """Launches a decode step.

        forced: int32 [n, bucket.time], an id that a row must produce, −1 for none; None: no row of any sequence.
        masked: int32 [n], which of its slot's masks hold, bit j: of the row's j-th token; None: no mask.
        """
        packed = pack_decode(step, self._shape.data, self._shape.slots, forced, masked, wants_top)
        return self._launch("decode", step, packed, wants_top, False)

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
            written = self._write_masks(written, *(jax.device_put(own, self._placement) for own in inputs))
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
        where, numbers = self._block_places(dp_rank, blocks)
        return self._read("read_blocks", where, numbers, BLOCK_ROWS, self._shape.blocks, self.block_bytes)

    def write_blocks(self, dp_rank: int, blocks: Sequence[int], contents: npt.NDArray[np.uint8]) -> None:
        """Launches the writing of n blocks of one dp rank; contents: of `read_blocks`, uint8 [n, block_bytes]."""
        (where, numbers), shape = self._block_places(dp_rank, blocks), self._shape
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

    def close(self) -> None:
        """Frees parameters, state and programs."""
        self._params = self._state = None
        self._programs.clear()
        self._moves.clear()
        self._write_masks = None

    def reset(self) -> None:
        """Empties pools and slots; needed after a step that failed, which took the state with it."""
        self._state = None  # freed before the new one is made
        cache = init_pools(self._model.state(self._shape.tokens_per_block), self._shape, self._mesh)
        table = init_slot_table(self._shape, self._table_width, self._model.vocab_size, self._mesh)
        self._state = StepState(cache, table)

    def _launch(
        self,
        kind: Kind,
        step: DecodeStep | PrefillStep,
        packed: npt.NDArray[np.int32],
        wants_top: bool,
        wants_prompt_logprobs: bool,
        features: Array | None = None,
    ) -> InFlight:
        program = self._programs.get((kind, step.bucket))
        if program is None:
            known = ", ".join(f"{kind} {bucket}" for kind, bucket in self._programs)
            raise RuntimeError(f"no {kind} program was compiled for {step.bucket}; there are: {known or 'none'}")
        state, self._state = self._state, None  # donated: a step that fails leaves none
        inputs = (jax.device_put(packed, self._placement), *(() if features is None else (features,)))
        output, self._state = program(self._params, state, *inputs)
        rows = step.dp_rank * step.bucket.rows + step.row
        return InFlight.start(output, rows, wants_top, wants_prompt_logprobs)

    def _block_places(self, dp_rank: int, blocks: Sequence[int]) -> tuple[Places, npt.NDArray[np.int32]]:
        return places(np.full(len(blocks), dp_rank, np.int32), BLOCK_ROWS), np.asarray(blocks, np.int32)

    def _read(
        self, move: StateOp, where: Places, numbers: npt.NDArray[np.int32], rows: int, empty: int, width: int
    ) -> PendingBytes:
        program = self._move(move)
        inputs = where.spread(numbers, self._shape.data, rows, empty)
        arrays = tuple(program(self._params, self._state, jax.device_put(own, self._placement)) for own in inputs)
        for array in arrays:
            array.copy_to_host_async()
        return PendingBytes(arrays, where, width)

    def _write(self, move: StateOp, *inputs: npt.NDArray[Any]) -> None:
        program = self._move(move)
        state, self._state = self._state, None  # donated: a program that fails leaves none
        self._state = program(self._params, state, *(jax.device_put(own, self._placement) for own in inputs))

    def _move(self, move: StateOp) -> Any:
        program = self._moves.get(move)
        if program is None:
            raise RuntimeError(f"no {move} program was compiled; this runner has: {', '.join(self._moves) or 'none'}")
        return program


def _spread_lists(lists: Sequence[Sequence[int]], data: int, rows: int, empty: int) -> list[npt.NDArray[np.int32]]:
    """A list of numbers for each dp rank, `rows` of each to an array int32 [data, rows] filled up with `empty`."""
    dp_rank = np.repeat(np.arange(len(lists), dtype=np.int32), [len(own) for own in lists])
    numbers = np.asarray([number for own in lists for number in own], np.int32)
    return places(dp_rank, rows).spread(numbers, data, rows, empty)
