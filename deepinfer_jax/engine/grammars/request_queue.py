"""Structured output in the engine: grammars are compiled beside the step loop, and followed token by token.

A sequence with a grammar stays out of every plan until that is compiled. From then on its masks are made as soon as the
results of a step are read, while the device runs what was launched after it; a plan that holds the sequence brings
them to the device. All of it is a function of the output, so a preempted sequence goes on with what it has.
"""

import contextlib
from collections.abc import Callable, Set
from typing import Any

import numpy as np

from deepinfer_jax.engine.config import GrammarLimits
from deepinfer_jax.engine.grammars.constraint import Constraint
from deepinfer_jax.engine.requests.columns import slot_places
from deepinfer_jax.engine.requests.request import mark_ready
from deepinfer_jax.runtime.runner import Runner
from deepinfer_jax.runtime.step_result import StepResult
from deepinfer_jax.scheduler import DecodeStep, PrefillStep, Sequence, SequenceStatus, StepPlan
from deepinfer_jax.structured import (
    GrammarError,
    GrammarPool,
    PendingGrammar,
    StructuredArgs,
    grammar_vocabulary,
)

Fail = Callable[[Sequence, str, SequenceStatus], None]
"""Ends a sequence for a reason, in a status."""


class GrammarRequestQueue:
    """The grammars of an engine's requests.

    Arguments:
        tokenizer: of the engine.
        vocab_size: width of the logits.
        num_rows: most rows of a sequence in a step.
        limits: of the threads that compile grammars.
        fail: called for a sequence whose grammar failed; it must end it.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, num_rows: int, limits: GrammarLimits, fail: Fail) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._shape = (num_rows, -(-vocab_size // 32))
        self._limits = limits
        self._fail = fail
        self._pool: GrammarPool | None = None
        self._pending: dict[Sequence, PendingGrammar] = {}
        self._in_use = False

    @property
    def pending(self) -> Set[Sequence]:
        """Sequences whose grammar is not compiled."""
        return self._pending.keys()

    def constraint(self, args: StructuredArgs) -> Constraint:
        """Of a new request."""
        return Constraint(args, np.zeros(self._shape, np.uint32), np.zeros(self._shape[0], np.bool_))

    def add(self, sequence: Sequence) -> None:
        """Has the grammar of a submitted sequence compiled; it must not be schedulable."""
        self._in_use = True
        if self._pool is None:
            self._pool = self._make_pool()
        try:
            self._pending[sequence] = self._pool.submit(sequence.request.constraint.args)
        except GrammarError as error:
            self._fail(sequence, str(error), SequenceStatus.FINISHED_SO_FAILED)

    def pump(self) -> None:
        """Lets the sequences whose grammar is compiled into the plans, and ends those whose grammar failed."""
        for sequence, pending in list(self._pending.items()):
            if sequence.status.finished:  # aborted
                del self._pending[sequence]
                continue
            constraint: Constraint = sequence.request.constraint
            try:
                constraint.matcher = pending.matcher()
                if constraint.matcher is None:
                    continue
                constraint.advance(sequence.output_token_ids, [])
                mark_ready(sequence, "grammar")
            except GrammarError as error:
                self._fail(sequence, str(error), SequenceStatus.FINISHED_SO_FAILED)
            del self._pending[sequence]

    def wait(self, seconds: float) -> None:
        """Returns once a grammar is compiled or failed, at the latest after so many seconds."""
        if self._pool is not None:
            self._pool.wait(list(self._pending.values()), seconds)

    def follow(self, step: PrefillStep | DecodeStep, result: StepResult) -> None:
        """Takes what a step gave, and makes the masks of the next one; ends a sequence that left its grammar."""
        if not self._in_use:
            return
        completes = step.completes if isinstance(step, PrefillStep) else np.ones(len(step.sequences), np.bool_)
        for row, sequence in enumerate(step.sequences):
            constraint: Constraint | None = sequence.request.constraint
            if constraint is None or sequence.status.finished or sequence in step.dropped or not completes[row]:
                continue
            try:
                drafts = [] if result.drafts is None else result.drafts[row].tolist()
                constraint.advance(sequence.output_token_ids, drafts)
            except GrammarError as error:
                self._fail(sequence, str(error), SequenceStatus.FINISHED_SO_FAILED)

    def close(self) -> None:
        """Ends the threads. May be called again."""
        self._pending.clear()
        if self._pool is not None:
            self._pool.close()

    def _make_pool(self) -> GrammarPool:
        return GrammarPool(
            lambda: grammar_vocabulary(self._tokenizer, self._vocab_size, self._tokenizer.eos_token_id),
            num_threads=self._limits.num_threads,
            timeout=self._limits.timeout,
            cache_bytes=self._limits.cache_bytes,
        )


def look_ahead(runner: Runner, restored: list[Sequence]) -> None:
    """Makes the masks of restored sequences that decode next: what was drafted for them only the device knows.

    Waits for what was launched, if some of them has a grammar.
    """
    constrained = [sequence for sequence in restored if sequence.request.constraint is not None]
    if not constrained:
        return
    drafts = runner.drafts(**slot_places(constrained))
    for sequence, own in zip(constrained, drafts.tolist(), strict=True):
        # Its grammar looked at this place before it was planned; if it fails now, it does when the step is committed.
        with contextlib.suppress(GrammarError):
            sequence.request.constraint.advance(sequence.output_token_ids, own)


def write_masks(runner: Runner, plan: StepPlan) -> bool:
    """Launches the writing of the masks that the steps of a plan need, before them; returns whether they need any."""
    rows: list[Sequence] = []
    if plan.prefill is not None:
        rows += [s for s, samples in zip(plan.prefill.sequences, plan.prefill.samples, strict=True) if samples]
    if plan.decode is not None:
        rows += plan.decode.sequences
    masked = [sequence for sequence in rows if sequence.request.constraint is not None]
    masked = [sequence for sequence in masked if sequence.request.constraint.masked.any()]
    if masked:
        masks = np.stack([sequence.request.constraint.masks for sequence in masked])
        runner.write_masks(**slot_places(masked), masks=masks)
    return bool(masked)
