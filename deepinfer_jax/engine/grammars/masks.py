"""Structured output, step by step: which tokens the next step of a sequence may give.

Masks are made as soon as the results of a step are read, while the device runs what was launched after it; a plan that
holds the sequence brings them to the device. All of it is a function of the output, so a preempted sequence goes on
with what it has.
"""

import contextlib

import numpy as np

from deepinfer_jax.engine.requests.background import Failure
from deepinfer_jax.engine.requests.columns import slot_places
from deepinfer_jax.engine.requests.request import Request
from deepinfer_jax.runtime.runner import Runner
from deepinfer_jax.runtime.step_result import StepResult
from deepinfer_jax.scheduler import DecodeStep, PrefillStep, Sequence, SequenceStatus, StepPlan
from deepinfer_jax.structured import GrammarError


def follow_grammars(step: PrefillStep[Request] | DecodeStep[Request], result: StepResult) -> list[Failure]:
    """Takes what a step gave, and makes the masks of the next one; returns what has left its grammar."""
    completes = step.completes if isinstance(step, PrefillStep) else np.ones(len(step.sequences), np.bool_)
    failures = []
    for row, sequence in enumerate(step.sequences):
        constraint = sequence.request.constraint
        if constraint is None or sequence.status.finished or sequence in step.dropped or not completes[row]:
            continue
        try:
            drafts = [] if result.drafts is None else result.drafts[row].tolist()
            constraint.advance(sequence.output_token_ids, drafts)
        except GrammarError as error:
            failures.append(Failure(sequence, str(error), SequenceStatus.FINISHED_SO_FAILED))
    return failures


def look_ahead(runner: Runner, restored: list[Sequence[Request]]) -> None:
    """Makes the masks of restored sequences that decode next: what was drafted for them only the device knows.

    Waits for what was launched, if some of them has a grammar.
    """
    constrained = [
        (sequence, constraint) for sequence in restored if (constraint := sequence.request.constraint) is not None
    ]
    if not constrained:
        return
    drafts = runner.drafts(**slot_places([sequence for sequence, _ in constrained]))
    for (sequence, constraint), own in zip(constrained, drafts.tolist(), strict=True):
        # Its grammar looked at this place before it was planned; if it fails now, it does when the step is committed.
        with contextlib.suppress(GrammarError):
            constraint.advance(sequence.output_token_ids, own)


def write_masks(runner: Runner, plan: StepPlan[Request]) -> bool:
    """Launches the writing of the masks that the steps of a plan need, before them; returns whether they need any."""
    rows: list[Sequence[Request]] = []
    if plan.prefill is not None:
        rows += [s for s, samples in zip(plan.prefill.sequences, plan.prefill.samples, strict=True) if samples]
    if plan.decode is not None:
        rows += plan.decode.sequences
    constrained = [
        (sequence, constraint) for sequence in rows if (constraint := sequence.request.constraint) is not None
    ]
    masked = [(sequence, constraint) for sequence, constraint in constrained if constraint.masked.any()]
    if masked:
        masks = np.stack([constraint.masks for _, constraint in masked])
        runner.write_masks(**slot_places([sequence for sequence, _ in masked]), masks=masks)
    return bool(masked)
