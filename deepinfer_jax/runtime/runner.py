"""Launches steps: the compiled program of a step's bucket, on the device's state, with the host's packed input.

The state and the state ops come from `DeviceState`, the programs from `CompiledPrograms`; a launched step is an
`InFlight`.
"""

import dataclasses
import statistics
import time
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax import Array
from jax.sharding import Mesh

from deepinfer_jax.cache.pools import CacheShape
from deepinfer_jax.runtime.device_state import DeviceState
from deepinfer_jax.runtime.duties import STEPS_ALONE, RunnerDuties
from deepinfer_jax.runtime.paged_model import StepModel
from deepinfer_jax.runtime.step_input import full_decode, pack_decode, pack_prefill
from deepinfer_jax.runtime.step_program import Kind
from deepinfer_jax.runtime.step_result import InFlight
from deepinfer_jax.runtime.steps import StepState
from deepinfer_jax.sampling import NO_OPTIONS, SamplerOptions
from deepinfer_jax.scheduler import Bucket, BucketTable, DecodeStep, PrefillStep


class Runner(DeviceState):
    """Runs step programs of `model` with `params`, one per bucket, and state ops; all compiled by `warm_up`.

    Steps and state ops happen on the device in the order of the calls.

    Arguments:
        buckets: every shape that a step may have.
        shape: sizes of the pools.
        table_width: blocks of the longest block table.
        mesh: what `params` are spread over; the data axis has `shape.data` devices.
        duties: what will run.
        options: what all rows are sampled by.
        features: image features [n, hidden] that every prefill step will take, or their description; None: none.
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
        super().__init__(
            model,
            params,
            shape=shape,
            table_width=table_width,
            mesh=mesh,
            options=options,
            features=features,
        )
        self._buckets = buckets
        self._duties = duties

    @property
    def compile_count(self) -> int:
        """How many step programs this runner has; `warm_up` makes all, a step never one. Those of state ops come
        beside them, at most eight."""
        return len(self._programs.steps)

    def warm_up(self, *, progress: bool = False) -> None:
        """Compiles every program ahead of time; nothing is run, so no state is left behind (K19)."""
        assert self._state is not None
        buckets = {"decode": self._buckets.decode, "prefill": self._buckets.prefill}
        steps = [(kind, bucket) for kind in self._duties.kinds for bucket in buckets[kind]]
        self._programs.warm_up(steps, self._duties.state_ops, self._params, self._state, progress=progress)

    def time_decode(self, bucket: Bucket, *, runs: int = 5) -> float:
        """Milliseconds that a decode program takes with all its rows in use: the median of some runs, on random tokens.

        Pools and slots are empty afterwards.
        """
        program, state = self._programs.step("decode", bucket), self._state
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
        was made with features, what images put in the place of the step's tokens, int32 [n, bucket.time]
        (`StepBatch.places`, all −1 without an image), and the features as they are now.
        """
        if (images is None) != (self._programs.features is None):
            raise RuntimeError(
                "this runner's prefill programs take image features: hand over places and features with every step"
                if images is None
                else "this runner's prefill programs take no images: make it with features"
            )
        image_structure, features = images or (None, None)
        packed = pack_prefill(step, self._shape.data, self._shape.slots, sampling, image_structure)
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

    def _launch(
        self,
        kind: Kind,
        step: DecodeStep | PrefillStep,
        packed: npt.NDArray[np.int32],
        wants_top: bool,
        wants_prompt_logprobs: bool,
        features: Array | None = None,
    ) -> InFlight:
        program = self._programs.step(kind, step.bucket)
        state, self._state = self._state, None  # donated: a step that fails leaves none
        inputs = (jax.device_put(packed, self._placement), *(() if features is None else (features,)))
        output, self._state = program(self._params, state, *inputs)
        rows = step.dp_rank * step.bucket.rows + step.row
        return InFlight.start(output, rows, wants_top, wants_prompt_logprobs)
