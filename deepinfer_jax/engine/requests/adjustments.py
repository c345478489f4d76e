"""What changes the logits of requests, to the device when they start (or start again)."""

import numpy as np
import numpy.typing as npt

from deepinfer_jax.engine.requests.columns import slot_places
from deepinfer_jax.engine.requests.request import Request
from deepinfer_jax.runtime.runner import Runner
from deepinfer_jax.runtime.slot_sampling import pack_edits
from deepinfer_jax.scheduler import Sequence, StepPlan


def write_adjustments(runner: Runner, plan: StepPlan[Request], vocab_size: int) -> None:
    """Launches the writing for the sequences that start in this plan; before its steps."""
    starting = [restore.sequence for restore in plan.restores]
    if plan.prefill is not None:
        starting += [s for s, start in zip(plan.prefill.sequences, plan.prefill.starts, strict=True) if start == 0]
    wanted = [s for s in starting if s.request.params.penalised or s.request.params.edits(0)]
    if not wanted:
        return
    runner.write_adjustments(
        **slot_places(wanted),
        edits=np.stack([pack_edits(sequence.request.params.edits(sequence.prompt_len)) for sequence in wanted]),
        counts=np.stack([_counts(sequence, vocab_size) for sequence in wanted]),
    )


def _counts(sequence: Sequence[Request], vocab_size: int) -> npt.NDArray[np.int32]:
    """int32 [vocab]: `Adjustments.counts`; the last token of the output is what the next step counts."""
    counts = np.zeros(vocab_size, np.int32)
    if sequence.request.params.penalised:
        counts[sequence.prompt_token_ids[sequence.prompt_token_ids < vocab_size]] = 1
        np.add.at(counts, sequence.output_token_ids[:-1], 2)
    return counts
