"""Which rows run in the next step, and where their state lives. NumPy only: never jax, never the model.

scheduler.add_sequence(Sequence(...))
plan = scheduler.schedule()                               # plain arrays: a prefill step, a decode step
scheduler.update(plan.decode, tokens, counts, finite)     # what the step gave
"""

from .block_manager import Allocation, BlockManager
from .buckets import Bucket, BucketTable, bucket_table
from .draft_budget import AcceptanceCounts, RowBudget, StepTimes, choose_budget, confidences
from .draft_policy import DraftPolicy
from .limits import Limits
from .plan import DecodeStep, PrefillStep, Restore, StepPlan, blocks_for, blocks_per_decode
from .scheduler import Scheduler
from .sequence import FINISH_REASONS, ImageContent, Imported, Sequence, SequenceStatus

__all__ = [
    "FINISH_REASONS",
    "AcceptanceCounts",
    "Allocation",
    "BlockManager",
    "Bucket",
    "BucketTable",
    "DecodeStep",
    "DraftPolicy",
    "ImageContent",
    "Imported",
    "Limits",
    "PrefillStep",
    "Restore",
    "RowBudget",
    "Scheduler",
    "Sequence",
    "SequenceStatus",
    "StepPlan",
    "StepTimes",
    "blocks_for",
    "blocks_per_decode",
    "bucket_table",
    "choose_budget",
    "confidences",
]
