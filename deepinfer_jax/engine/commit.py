"""Waits for a launched step, and hands its results to scheduler, feature cache and draft policy; `requests/results.py`
makes the outputs."""

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deepinfer_jax.engine.drafts.scheduled_verification import StepClock
from deepinfer_jax.engine.images.features import FeatureCache
from deepinfer_jax.engine.launch import Launched
from deepinfer_jax.engine.requests.request import Request
from deepinfer_jax.engine.requests.results import keep_prompt_logprobs
from deepinfer_jax.runtime.step_result import StepResult
from deepinfer_jax.scheduler import DecodeStep, DraftPolicy, PrefillStep, Scheduler, SequenceStatus


@dataclass(frozen=True, eq=False)
class Arrived:
    """A step whose results are there.

    Attributes:
        step: as it was planned.
        result: what it gave.
        states: of `step.captures`, each uint8 [bytes of a slot] of its own.
        asked, at: when the host began to wait for the results, and when it had them; time.perf_counter().
        milliseconds: of the step, and those that the device stood still before it; None if they cannot be known.
    """

    step: PrefillStep[Request] | DecodeStep[Request]
    result: StepResult
    states: list[npt.NDArray[np.uint8]]
    asked: float
    at: float
    milliseconds: tuple[float, float] | None


def wait_for_results(launched: Launched, clock: StepClock) -> Arrived:
    """Waits for the results of the oldest launched step; clock: has seen all before it."""
    asked = time.perf_counter()
    result, states = launched.result.result(), launched.captured()
    at = time.perf_counter()
    return Arrived(launched.step, result, states, asked, at, clock.read(launched, asked, at))


def commit_results(scheduler: Scheduler[Request], arrived: Arrived) -> list[tuple[int, int]]:
    """Tokens to sequences, log-probabilities of prompts to their requests; returns what `Scheduler.update` does."""
    step, result = arrived.step, arrived.result
    if isinstance(step, PrefillStep):
        keep_prompt_logprobs(step, result)
    return scheduler.update(step, result.tokens, result.counts, result.finite, arrived.states)


def forget_failed_images(
    step: PrefillStep[Request] | DecodeStep[Request], emitted: list[tuple[int, int]], features: FeatureCache | None
) -> None:
    """What a failed sequence read of images may be what was wrong; the cache of blocks heals likewise."""
    for row, _ in emitted:
        sequence = step.sequences[row]
        if features is not None and sequence.status is SequenceStatus.FINISHED_FAILED:
            features.forget(sequence.request.image_prompt)


def learn_from_drafts(policy: DraftPolicy | None, arrived: Arrived) -> None:
    """Has the policy of verification, if there is one, learn from a decode step."""
    step, result = arrived.step, arrived.result
    if policy is None or not isinstance(step, DecodeStep):
        return
    assert result.confidences is not None
    policy.commit(step, result.confidences, result.verified, result.counts)
    if arrived.milliseconds is not None:
        policy.times.add(step.bucket, len(step.sequences), *arrived.milliseconds)
