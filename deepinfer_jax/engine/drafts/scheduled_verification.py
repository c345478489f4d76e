"""Confidence-scheduled verification in the engine: its policy, and how long steps take (DB §6.5)."""

import math

import jax

from deepinfer_jax.engine.config import EngineConfig
from deepinfer_jax.engine.drafts.step_times import decode_times
from deepinfer_jax.engine.launch import Launched
from deepinfer_jax.runtime.runner import Runner
from deepinfer_jax.scheduler import BucketTable, DecodeStep, DraftPolicy, StepTimes

_SHORTEST_WAIT = 1e-4
"""Seconds; a result that was there sooner may have been there for long."""


def draft_policy(runner: Runner, buckets: BucketTable, config: EngineConfig, key: str) -> DraftPolicy:
    """The policy of an engine whose programs are compiled; they are measured unless an earlier engine did it.

    key: names all that times depend on beside the programs' shapes and the version of jax.
    """
    times = decode_times(
        buckets.decode,
        runner.time_decode,
        key=f"{key} jax {jax.__version__}",
        directory=config.decode_times.directory,
        ttl=config.decode_times.ttl,
    )
    return DraftPolicy(
        StepTimes({bucket: (bucket.tokens, ms) for bucket, ms in times.items()}),
        config.confidence_temperatures,
        config.data_parallel_size,
    )


class StepClock:
    """Finds out how long the device took for a decode step, from when the host launched and when it read."""

    def __init__(self) -> None:
        self._last_arrival = -math.inf

    def read(self, launched: Launched, asked: float, arrived: float) -> tuple[float, float] | None:
        """(milliseconds of the step, those that the device stood still before it); None if it is not known.

        Every step is to be reported, in the order of the device. The time is known of a decode step for which the host
        had to wait and behind which nothing was read.

        Args:
            asked, arrived: when the host began to wait for the result, and when it had it; time.perf_counter().
        """
        before, self._last_arrival = self._last_arrival, arrived
        waited = arrived - asked > _SHORTEST_WAIT
        if not isinstance(launched.step, DecodeStep) or launched.states is not None or not waited:
            return None
        idle = max(launched.at - before, 0.0) if math.isfinite(before) else 0.0
        return 1000 * (arrived - max(launched.at, before)), 1000 * idle
