"""What becomes of drafts: how many hold, at which place of a block."""

from typing import Any

import numpy as np
import numpy.typing as npt


class DraftStats:
    """Counters since the start, of decode steps of single sequences.

    Arguments:
        num_drafts: tokens drafted per step.

    Attributes:
        steps: how many there were.
        rows: rows that they computed: the last token and the drafts that were verified.
        accepted_rows: those of them that gave a token.
        verified, accepted: int64 [num_drafts], drafts by their place in the block.
    """

    def __init__(self, num_drafts: int) -> None:
        self.steps = self.rows = self.accepted_rows = 0
        self.verified = np.zeros(num_drafts, np.int64)
        self.accepted = np.zeros(num_drafts, np.int64)

    def add(self, verified: npt.NDArray[np.int32], counts: npt.NDArray[np.int32]) -> None:
        """Commits steps of n sequences. verified: rows of each, counts: tokens that it gave; int32 [n]."""
        place = np.arange(len(self.verified))
        self.steps += len(verified)
        self.rows += int(verified.sum())
        self.accepted_rows += int(counts.sum())
        self.verified += (place < verified[:, None] - 1).sum(0)
        self.accepted += (place < counts[:, None] - 1).sum(0)

    def snapshot(self) -> dict[str, Any]:
        """All figures by name; see `LLMEngine.stats`."""
        return {
            "num_decode_rows": self.rows,
            "num_wasted_rows": self.rows - self.accepted_rows,
            "mean_accepted_length": self.accepted_rows / self.steps if self.steps else 0.0,
            "num_drafts_verified": self.verified.tolist(),
            "num_drafts_accepted": self.accepted.tolist(),
        }
