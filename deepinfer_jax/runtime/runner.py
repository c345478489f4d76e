"""Compiled step programs and the cache that they hand on."""

import functools
import logging
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from deepinfer_jax.runtime.step_input import NUM_COLUMNS, pack
from deepinfer_jax.runtime.steps import StepOutput, StepShape, run_step
from deepinfer_jax.runtime.text_model import StepModel

logger = logging.getLogger(__name__)

# Lengths of the lists of likeliest tokens; SamplingParams allows no longer one (DB §1.5).
_TOP_BUCKETS = (0, 8, 64, 1000)


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
def compile_step(model: StepModel, shape: StepShape, params: Spec, cache: Spec) -> Any:
    """The compiled `run_step`, which takes (params, cache, packed) and donates the cache.

    Engines of one process share programs: a model with equal configuration and arrays of equal kind is compiled once.
    """
    logger.info("compiling the step program of %s", shape)
    step = jax.jit(functools.partial(run_step, model, shape), donate_argnums=1)
    packed = jax.ShapeDtypeStruct((shape.rows, NUM_COLUMNS + shape.time), np.int32)
    return step.lower(params.tree(), cache.tree(), packed).compile()


class Runner:
    """Runs steps of `model` with `params` on a dense cache.

    A program is compiled once per `StepShape` and kept. The cache has as many rows as the step asks for: it grows
    with its contents, and is laid out anew when every row starts from nothing.
    """

    def __init__(self, model: StepModel, params: Any) -> None:
        self._model = model
        self._params = params
        self._programs: dict[StepShape, Any] = {}
        self._rows = 0
        self._cache: Any = None

    @property
    def compile_count(self) -> int:
        """How many programs this runner has needed."""
        return len(self._programs)

    def run(
        self,
        slots: npt.NDArray[np.int32],
        tokens: npt.NDArray[np.int32],
        *,
        cache_rows: int,
        chunk: int,
        num_top: int,
        prompt_logprobs: bool,
        reset: npt.NDArray[np.bool_],
        **columns: npt.ArrayLike,
    ) -> StepOutput:
        """One step of all rows in use, `slots` int32 [n], on `tokens` int32 [n, new]; blocks until it is done.

        Arguments:
            cache_rows: rows of the cache from now on.
            chunk: most new tokens of a row with so many rows; a step of more than one token runs in this shape.
            num_top: length of the longest list of likeliest tokens that a row asks for.
            prompt_logprobs: whether some row wants those of its new tokens.
            reset: bool [n], rows that start from nothing.
            columns: the other columns of `step_input`, each `[n]`.

        Returns NumPy arrays of the given rows, in their order.
        """
        if self._cache is None or (reset.all() and cache_rows != self._rows):
            self._cache = None  # freed before the new one is made
            self._rows, self._cache = cache_rows, self._model.init_cache(cache_rows)
        elif cache_rows > self._rows:
            self._grow(cache_rows)
        shape = StepShape(
            rows=self._rows,
            time=1 if tokens.shape[1] == 1 else chunk,
            num_top=next(bucket for bucket in _TOP_BUCKETS if bucket >= num_top),
            prompt_logprobs=prompt_logprobs,
        )
        packed = pack(shape.rows, shape.time, slots, tokens, reset=reset, **columns)
        program = self._program(shape)
        cache, self._cache = self._cache, None  # donated: a step that fails leaves none
        output, cache = program(self._params, cache, packed)
        output = jax.device_get(output)
        self._cache = cache
        return jax.tree.map(lambda array: array[slots], output)

    def close(self) -> None:
        """Frees parameters, cache and programs."""
        self._params = self._cache = None
        self._programs.clear()

    def _program(self, shape: StepShape) -> Any:
        if shape not in self._programs:
            self._programs[shape] = compile_step(self._model, shape, _spec(self._params), _spec(self._cache))
        return self._programs[shape]

    def _grow(self, rows: int) -> None:
        """Moves the rows in use to a larger cache."""
        self._cache = jax.tree.map(
            lambda new, kept: new.at[: kept.shape[0]].set(kept), self._model.init_cache(rows), self._cache
        )
        self._rows = rows
