"""Which rows run in the next step, and where their state lives. NumPy only: never jax, never the model.

scheduler.add_sequence(Sequence(...))
plan = scheduler.schedule()               # plain arrays
scheduler.update(plan, sampled, finite)   # what the step gave
"""

from .plan import StepPlan
from .scheduler import Scheduler
from .sequence import FINISH_REASONS, Sequence, SequenceStatus

__all__ = ["FINISH_REASONS", "Scheduler", "Sequence", "SequenceStatus", "StepPlan"]
