"""Confidence-scheduled verification in the engine: temperatures, and how long steps take (DB §6.5)."""

import math

import jax

from deepinfer_jax.engine.drafts.step_times import decode_times
from deepinfer_jax.engine.environ import env
from deepinfer_jax.engine.launch import Launched
from deepinfer_jax.runtime.runner import Runner
from deepinfer_jax.scheduler import BucketTable, DecodeStep, DraftPolicy, StepTimes

_NAME = "DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE"
_COLDEST = 1e-5
_SHORTEST_WAIT = 1e-4
"""Seconds; a result that was there sooner may have been there for long."""


def confidence_temperatures(num_drafts: int) -> tuple[float, ...]:
    """DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE, one for each draft, at least 1e-5.

    Raises ValueError, starting with the variable's name, for a value that cannot be.
    """
    text = env.DFLASH_CONFIDENCE_HEAD_TEMPERATURE
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(0 < value < math.inf for value in values):
        raise ValueError(f"{_NAME} is {text!r}; expected a positive number, or a comma list of one for each draft")
    if len(values) == 1:
        values *= num_drafts
    if num_drafts and len(values) != num_drafts:
        raise ValueError(
            f"{_NAME} is {text!r}, {len(values)} temperatures, but {num_drafts} tokens are drafted per step"
        )
    return tuple(max(value, _COLDEST) for value in values)


def draft_policy(
    runner: Runner, buckets: BucketTable, temperatures: tuple[float, ...], data_parallel_size: int, key: str
) -> DraftPolicy:
    """The policy of an engine whose programs are compiled; they are measured unless an earlier engine did it.

    key: names all that times depend on beside the programs' shapes and the version of jax.
    """
    times = decode_times(
        buckets.decode,
        runner.time_decode,
        key=f"{key} jax {jax.__version__}",
        directory=env.DECODE_PERF_CACHE_DIR,
        ttl=env.DECODE_PERF_CACHE_TTL_SEC,
    )
    return DraftPolicy(
        StepTimes({bucket: (bucket.tokens, ms) for bucket, ms in times.items()}), temperatures, data_parallel_size
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
