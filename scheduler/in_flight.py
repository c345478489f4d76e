"""The plans that are launched and not committed, at most two; a released sequence is dropped from their steps."""

from .plan import DecodeStep, PrefillStep
from .sequence import Sequence

MAX_PLANS_IN_FLIGHT = 2
"""Zero-overhead scheduling plans one iteration while the one before runs."""


class PlansInFlight:
    """Plans in the order of launch, each with the steps of it that are not committed."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets all plans."""
        self._plans: list[list[PrefillStep | DecodeStep]] = []

    def check_room(self) -> None:
        """Raises RuntimeError if no other plan may be launched."""
        if len(self._plans) == MAX_PLANS_IN_FLIGHT:
            raise RuntimeError(f"{MAX_PLANS_IN_FLIGHT} plans are in flight; update() with the oldest one's results")

    def launch(self, *steps: PrefillStep | DecodeStep | None) -> None:
        """Adds a plan of the steps that there are; one without any needs no committing."""
        launched = [step for step in steps if step is not None]
        if launched:
            self._plans.append(launched)

    def land(self, step: PrefillStep | DecodeStep) -> None:
        """Takes out a step that is being committed. Raises ValueError for one that is not of the oldest plan."""
        if not self._plans or step not in self._plans[0]:
            raise ValueError("the step is not of the oldest plan in flight; commit each step once, plan by plan")
        self._plans[0].remove(step)
        if not self._plans[0]:
            self._plans.pop(0)

    def prefills(self, sequence: Sequence) -> bool:
        """Whether a chunk of the sequence is in flight whose results will be committed for it."""
        steps = (step for steps in self._plans for step in steps if isinstance(step, PrefillStep))
        return any(sequence in step.sequences and sequence not in step.dropped for step in steps)

    def drop(self, sequence: Sequence) -> None:
        """Has the results of a sequence passed over."""
        for steps in self._plans:
            for step in steps:
                step.dropped.add(sequence)
