"""Compiled step programs, the state that they hand on, and results that are still on their way."""

import functools
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh
from tqdm import tqdm

from deepinfer_jax.runtime.slot_table import init_slot_table
from deepinfer_jax.runtime.step_input import pack_decode, pack_prefill
from deepinfer_jax.runtime.step_program import Kind, host_input_shape, program_of
from deepinfer_jax.runtime.steps import StepOutput, StepState
from deepinfer_jax.runtime.text_model import StepModel
from deepinfer_jax.scheduler import Bucket, BucketTable, DecodeStep, PrefillStep
from deepinfer_jax.sharding import over_data
from deepinfer_jax.state import CacheShape, init_pools

logger = logging.getLogger(__name__)

_COMPILER_THREADS = 4


class Spec(NamedTuple):
    """Structure, shapes, dtypes and placement of a pytree of arrays; hashable."""

    structure: jax.tree_util.PyTreeDef
    leaves: tuple[jax.ShapeDtypeStruct, ...]

    def tree(self) -> Any:
        """The pytree, with its leaves' descriptions in their places."""
        return self.structure.unflatten(self.leaves)


def _spec(tree: Any) -> Spec:
    leaves, structure = jax.tree.flatten(tree)
    return Spec(structure, tuple(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in leaves))


@functools.lru_cache(maxsize=64)
def compile_step(
    model: StepModel, kind: Kind, shape: CacheShape, bucket: Bucket, params: Spec, state: Spec, packed: Spec
) -> Any:
    """The compiled step program, which takes (params, state, packed) and donates the state.

    Engines of one process share programs: a model with equal configuration and arrays of equal kind is compiled once.
    """
    logger.info("compiling the %s program of %s", kind, bucket)
    step = jax.jit(program_of(model, kind, shape, bucket), donate_argnums=1)
    return step.lower(params.tree(), state.tree(), packed.tree()).compile()


@dataclass(frozen=True)
class StepResult:
    """What the rows of one step gave, in the order of the step's sequences, n of them.

    Attributes:
        tokens: the token after each row's last new one. int32 [n, 1].
        counts: how many of them count. int32 [n].
        logprobs: float32 [n, 1].
        finite: bool [n], false where the logits were not.
        top_tokens, top_logprobs: int32 and float32 [n, 1, 1000 or the vocabulary]; None unless some row wanted them.
        prompt_logprobs: float32 [n, time]; None unless some row wanted them.
    """

    tokens: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    finite: npt.NDArray[np.bool_]
    top_tokens: npt.NDArray[np.int32] | None
    top_logprobs: npt.NDArray[np.float32] | None
    prompt_logprobs: npt.NDArray[np.float32] | None


@dataclass(frozen=True)
class InFlight:
    """A launched step. Its small outputs are already on their way to the host.

    Attributes:
        output: device arrays, [data · bucket.rows, ...].
        places: int32 [n], where the step's sequences are among these rows.
    """

    output: StepOutput
    places: npt.NDArray[np.int32]
    wants_top: bool
    wants_prompt_logprobs: bool

    def start_copies(self) -> None:
        """Sends the arrays that `result` reads towards the host as soon as they exist."""
        sampled = self.output.sampled
        arrays = [sampled.tokens, sampled.logprobs, sampled.finite]
        if self.wants_top:
            arrays += [sampled.top_tokens, sampled.top_logprobs]
        if self.wants_prompt_logprobs and self.output.prompt_logprobs is not None:
            arrays.append(self.output.prompt_logprobs)
        for array in arrays:
            array.copy_to_host_async()

    def result(self) -> StepResult:
        """Waits until the step is done; raises what went wrong on the device."""
        sampled = self.output.sampled

        def rows(array: Any, wanted: bool = True) -> Any:
            return np.asarray(array)[self.places] if wanted else None

        return StepResult(
            tokens=rows(sampled.tokens)[:, None],
            counts=np.ones(len(self.places), np.int32),
            logprobs=rows(sampled.logprobs)[:, None],
            finite=rows(sampled.finite),
            top_tokens=rows(sampled.top_tokens)[:, None] if self.wants_top else None,
            top_logprobs=rows(sampled.top_logprobs)[:, None] if self.wants_top else None,
            prompt_logprobs=rows(self.output.prompt_logprobs, self.wants_prompt_logprobs),
        )


class Runner:
    """Runs step programs of `model` with `params`, one per bucket, all compiled by `warm_up`.

    Arguments:
        buckets: every shape that a step may have.
        shape: sizes of the pools.
        table_width: blocks of the longest block table.
        mesh: what `params` are spread over; the data axis has `shape.data` devices.
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
    ) -> None:
        self._model = model
        self._params = params
        self._buckets = buckets
        self._shape = shape
        self._table_width = table_width
        self._mesh = mesh
        self._placement = over_data(mesh)
        self._programs: dict[tuple[Kind, Bucket], Any] = {}
        self._state: StepState | None = None
        self.reset()

    @property
    def compile_count(self) -> int:
        """How many programs this runner has; `warm_up` makes all, a step never one."""
        return len(self._programs)

    def warm_up(self, *, progress: bool = False) -> None:
        """Compiles every program ahead of time; nothing is run, so no state is left behind (K19)."""
        kinds: list[tuple[Kind, Bucket]] = [("decode", bucket) for bucket in self._buckets.decode]
        kinds += [("prefill", bucket) for bucket in self._buckets.prefill]
        params, state = _spec(self._params), _spec(self._state)

        def compiled(kind: Kind, bucket: Bucket) -> Any:
            host_input = jax.ShapeDtypeStruct(
                host_input_shape(kind, self._shape, bucket), np.int32, sharding=self._placement
            )
            packed = Spec(jax.tree.structure(0), (host_input,))
            return compile_step(self._model, kind, self._shape, bucket, params, state, packed)

        # The compiler leaves Python alone and is mostly one thread. Each program it works on takes memory.
        with ThreadPoolExecutor(min(_COMPILER_THREADS, os.cpu_count() or 1)) as pool:
            programs = pool.map(compiled, *zip(*kinds, strict=True))
            bar = tqdm(programs, desc="Compiling step programs", total=len(kinds), disable=not progress, leave=False)
            self._programs = dict(zip(kinds, bar, strict=True))

    def prefill(self, step: PrefillStep, sampling: dict[str, npt.NDArray[Any]]) -> InFlight:
        """Launches a prefill step; sampling: the columns of `step_input.PREFILL_COLUMNS` that the step lacks, [n]."""
        packed = pack_prefill(step, self._shape.data, self._shape.slots, sampling)
        wants_top, wants_prompt = (bool(np.any(sampling[name])) for name in ("wants_top", "wants_prompt_logprobs"))
        return self._launch("prefill", step, packed, wants_top, wants_prompt)

    def decode(self, step: DecodeStep, forced: npt.NDArray[np.int32] | None, wants_top: bool) -> InFlight:
        """Launches a decode step; forced: int32 [n], an id that a row must produce, −1 for none; None: no row."""
        packed = pack_decode(step, self._shape.data, self._shape.slots, forced, wants_top)
        return self._launch("decode", step, packed, wants_top, False)

    def close(self) -> None:
        """Frees parameters, state and programs."""
        self._params = self._state = None
        self._programs.clear()

    def reset(self) -> None:
        """Empties pools and slots; needed after a step that failed, which took the state with it."""
        self._state = None  # freed before the new one is made
        cache = init_pools(self._model.state(self._shape.tokens_per_block), self._shape, self._mesh)
        self._state = StepState(cache, init_slot_table(self._shape, self._table_width, self._mesh))

    def _launch(
        self,
        kind: Kind,
        step: DecodeStep | PrefillStep,
        packed: npt.NDArray[np.int32],
        wants_top: bool,
        wants_prompt_logprobs: bool,
    ) -> InFlight:
        program = self._programs.get((kind, step.bucket))
        if program is None:
            known = ", ".join(f"{kind} {bucket}" for kind, bucket in self._programs)
            raise RuntimeError(f"no {kind} program was compiled for {step.bucket}; there are: {known or 'none'}")
        state, self._state = self._state, None  # donated: a step that fails leaves none
        output, self._state = program(self._params, state, jax.device_put(packed, self._placement))
        step_in_flight = InFlight(
            output, step.data_index * step.bucket.rows + step.row, wants_top, wants_prompt_logprobs
        )
        step_in_flight.start_copies()
        return step_in_flight
