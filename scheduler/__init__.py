"""Continuous batching on the host: which rows run in the next step, and where their state lives. NumPy only, no jax.

    scheduler.add_sequence(Sequence(...))
    plan = scheduler.schedule()                               # plain arrays: a prefill step, a decode step
    scheduler.update(plan.decode, tokens, counts, finite)     # the step's results

- scheduler: the door. sequence: a request. plan: the output. limits: what can run at all. buckets: step shapes.
- decode, decode_layout: the decode step. prefill, chunks: the prefill step. commit, in_flight: results.
- lifecycle: start, preemption, release of sequences; preemption chooses whom. resident_sequences, block_manager:
  accounts of blocks and slots.
- prefix_cache, prefix, snapshots: reuse of state. draft_policy, draft_budget: number of drafts.
"""

from .block_manager import BlockManager
from .buckets import Bucket, BucketTable, bucket_table
from .draft_budget import AcceptanceCounts, RowBudget, StepTimes, choose_budget, confidences
from .draft_policy import DraftPolicy
from .limits import Limits, slots_for
from .plan import DecodeStep, PrefillStep, Restore, StepPlan, blocks_for, blocks_per_decode
from .scheduler import Scheduler
from .sequence import FINISH_REASONS, ImageContent, Imported, Sequence, SequenceStatus

__all__ = [
    "FINISH_REASONS",
    "AcceptanceCounts",
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
    "slots_for",
]
