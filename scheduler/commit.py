"""Commits the tokens of a step: appends them to its sequences, and finds out which of these have ended."""

import numpy as np
import numpy.typing as npt

from .plan import DecodeStep, PrefillStep
from .sequence import Sequence, SequenceStatus


def commit_tokens(
    step: PrefillStep | DecodeStep,
    tokens: npt.NDArray[np.int32],
    counts: npt.NDArray[np.int32],
    finite: list[bool],
    num_drafts: int,
) -> tuple[list[tuple[int, int]], list[Sequence]]:
    """Appends to each sequence what its row gave; arguments as in `Scheduler.update`.

    A sequence whose logits were not finite emits the tokens before the row that failed, the last of its `counts`, and
    fails, unless it ends with them.

    Returns (row, number of tokens) of each row that emitted tokens or failed, and the sequences that have ended.
    """
    # The host has counted on the most tokens: of a prompt's last chunk its sample, of a decode step all drafts.
    if isinstance(step, PrefillStep):
        counts, most = step.samples.astype(np.int32), 1
    else:
        most = 1 + num_drafts
    emitted: list[tuple[int, int]] = []
    ended: list[Sequence] = []
    dropped, running = step.dropped, SequenceStatus.RUNNING
    rows = zip(step.sequences, tokens.tolist(), counts.tolist(), finite, strict=True)
    for row, (sequence, token_ids, count, is_finite) in enumerate(rows):
        if sequence in dropped:
            continue
        if not is_finite:
            # What came before the row that failed is right, and may end it: that row then was one too many.
            number = sequence.append_tokens(token_ids[: max(count - 1, 0)])
            if not sequence.status.finished:
                sequence.status = SequenceStatus.FINISHED_FAILED
        elif count:
            sequence.num_inflight_steps -= 1
            number = sequence.append_tokens(token_ids[:count])
            sequence.num_tokens += number - most
        else:  # a chunk that gives no token
            continue
        emitted.append((row, number))
        if sequence.status is not running:
            ended.append(sequence)
    return emitted, ended
