"""Compiles the programs of a runner ahead of time, and finds the one for a step or a state op.

What the programs compute is in `steps.py`, `state_ops.py` and `step_program.py`. Programs are shared: engines of one
process with equal configuration and arrays of equal kind use the same ones.
"""

import functools
import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Sharding
from tqdm import tqdm

from deepinfer_jax.cache.pools import CacheShape
from deepinfer_jax.runtime.abstract_tree import AbstractTree, abstract_tree
from deepinfer_jax.runtime.paged_model import StepModel
from deepinfer_jax.runtime.state_ops import (
    WRITES,
    StateOp,
    mask_input_shapes,
    state_op_input_shapes,
    state_op_program,
    write_masks,
)
from deepinfer_jax.runtime.step_program import Kind, host_input_shape, program_of
from deepinfer_jax.runtime.steps import StepState
from deepinfer_jax.sampling import SamplerOptions
from deepinfer_jax.scheduler import Bucket

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
    op: StateOp,
    shape: CacheShape,
    options: SamplerOptions,
    params: AbstractTree,
    state: AbstractTree,
    inputs: AbstractTree,
) -> Any:
    """The compiled program of a state op, which takes (params, state, *inputs); shared like those of `compile_step`."""
    logger.info("compiling the %s program", op)
    program = jax.jit(state_op_program(model, op, shape, options), donate_argnums=1 if op in WRITES else ())
    return program.lower(params.tree(), state.tree(), *inputs.tree()).compile()


@functools.lru_cache(maxsize=32)
def compile_write_masks(masks: AbstractTree, rows: AbstractTree) -> Any:
    """The compiled `write_masks`; shared like those of `compile_step`."""
    return jax.jit(write_masks, donate_argnums=0).lower(masks.tree(), *rows.tree()).compile()


class CompiledPrograms:
    """The programs of one runner; none before `warm_up`.

    Arguments:
        shape: sizes of the pools.
        table_width: blocks of the longest block table.
        placement: of the host's inputs.
        options: what all rows are sampled by.
        features: image features that every prefill step takes; None: none.

    Attributes:
        features: as given, as a description.
        steps, state_ops: the compiled programs.
        write_masks: the compiled `state_ops.write_masks`.
    """

    def __init__(
        self,
        model: StepModel,
        shape: CacheShape,
        table_width: int,
        placement: Sharding | None,
        options: SamplerOptions,
        features: Array | jax.ShapeDtypeStruct | None,
    ) -> None:
        self.features = None if features is None else abstract_tree(features)
        self._model = model
        self._shape = shape
        self._table_width = table_width
        self._placement = placement
        self._options = options
        self.clear()

    def clear(self) -> None:
        """Drops all programs."""
        self.steps: dict[tuple[Kind, Bucket], Any] = {}
        self.state_ops: dict[StateOp, Any] = {}
        self.write_masks: Any = None

    def warm_up(
        self,
        steps: Sequence[tuple[Kind, Bucket]],
        state_ops: Sequence[StateOp],
        params: Any,
        state: StepState,
        *,
        progress: bool,
    ) -> None:
        """Compiles these programs and `write_masks`; nothing is run, so no state is left behind (K19)."""
        described_params, described_state = abstract_tree(params), abstract_tree(state)

        def compiled_step(kind: Kind, bucket: Bucket) -> Any:
            inputs = self._step_inputs(kind, bucket)
            return compile_step(
                self._model, kind, self._shape, bucket, self._options, described_params, described_state, inputs
            )

        def compiled_op(op: StateOp) -> Any:
            inputs = self._placed(state_op_input_shapes(self._model, op, self._shape, self._table_width))
            return compile_state_op(
                self._model, op, self._shape, self._options, described_params, described_state, inputs
            )

        masks = abstract_tree(state.table.adjustments.masks)
        self.write_masks = compile_write_masks(masks, self._placed(mask_input_shapes(masks.leaves[0])))

        # The compiler leaves Python alone and is mostly one thread. Each program it works on takes memory.
        with ThreadPoolExecutor(min(_COMPILER_THREADS, os.cpu_count() or 1)) as pool:
            programs = pool.map(compiled_step, *zip(*steps, strict=True))
            ops = pool.map(compiled_op, state_ops)
            bar = tqdm(programs, desc="Compiling step programs", total=len(steps), disable=not progress, leave=False)
            self.steps = dict(zip(steps, bar, strict=True))
            self.state_ops = dict(zip(state_ops, ops, strict=True))

    def step(self, kind: Kind, bucket: Bucket) -> Any:
        """The program (params, state, *inputs) of a step. Raises RuntimeError if it was not compiled."""
        program = self.steps.get((kind, bucket))
        if program is None:
            known = ", ".join(f"{kind} {bucket}" for kind, bucket in self.steps)
            raise RuntimeError(f"no {kind} program was compiled for {bucket}; there are: {known or 'none'}")
        return program

    def state_op(self, op: StateOp) -> Any:
        """The program (params, state, *inputs) of a state op. Raises RuntimeError if it was not compiled."""
        program = self.state_ops.get(op)
        if program is None:
            known = ", ".join(self.state_ops) or "none"
            raise RuntimeError(f"no {op} program was compiled; this runner has: {known}")
        return program

    def _step_inputs(self, kind: Kind, bucket: Bucket) -> AbstractTree:
        features = self.features.leaves if self.features is not None and kind == "prefill" else ()
        size = host_input_shape(kind, self._shape, bucket, images=bool(features))
        inputs = (jax.ShapeDtypeStruct(size, np.int32, sharding=self._placement), *features)
        return AbstractTree(jax.tree.structure(inputs), inputs)

    def _placed(self, inputs: tuple[jax.ShapeDtypeStruct, ...]) -> AbstractTree:
        placed = (jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._placement) for x in inputs)
        return AbstractTree(jax.tree.structure(inputs), tuple(placed))
