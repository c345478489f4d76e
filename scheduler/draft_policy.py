"""Sizes each decode step by `draft_budget.py`, from the confidences that earlier steps reported (DB §6.5)."""

from collections import Counter
from collections.abc import Sequence as Sequences
from typing import Any

import numpy as np
import numpy.typing as npt

from .buckets import Bucket
from .draft_budget import AcceptanceCounts, FloatArray, StepTimes, choose_budget, confidences
from .plan import DecodeStep, Int32Array
from .sequence import Sequence


class DraftPolicy:
    """How many drafts the decode steps of one scheduler verify.

    Arguments:
        times: of its decode programs.
        temperatures: of the confidence head, one per draft.
        data_parallel_size: dp ranks.

    Attributes:
        times, acceptance: what was measured.
    """

    def __init__(self, times: StepTimes[Bucket], temperatures: Sequences[float], data_parallel_size: int = 1) -> None:
        self.times = times
        self.acceptance = AcceptanceCounts(len(temperatures))
        self._temperatures = tuple(temperatures)
        self._data = data_parallel_size
        self._sizes: Counter[int] = Counter()
        # Until a confidence is read, a draft counts as certain: it is verified, and so its confidence is measured.
        self._unknown = [1.0] * len(temperatures)

    def choose(
        self, sequences: list[Sequence], dp_rank: Int32Array, sizes: Sequences[Bucket]
    ) -> tuple[Bucket, Int32Array | None]:
        """The program of a step, and `DecodeStep.budget`.

        Arguments:
            dp_rank: of each sequence. int32 [n].
            sizes: programs that can run the step, by the tokens of a step.
        """
        rates = np.asarray([sequence.rates or self._unknown for sequence in sequences])
        by_rank = [rates[dp_rank == rank] for rank in range(self._data)]
        chosen = choose_budget(
            by_rank,
            [(bucket.tokens, self.times.baseline(bucket)) for bucket in sizes],
            slope_ms=self.times.slope_ms,
            overhead_ms=self.times.overhead_ms(len(sequences)),
        )
        bucket = next(bucket for bucket in sizes if bucket.tokens == chosen.rows)
        self._sizes[bucket.tokens] += 1
        if not bucket.packed:
            return bucket, None
        drafts = [total - len(own) for total, own in zip(chosen.totals, by_rank, strict=True)]
        return bucket, np.asarray(drafts, np.int32)

    def commit(
        self, step: DecodeStep, logits: FloatArray, verified: npt.NDArray[np.int32], counts: npt.NDArray[np.int32]
    ) -> None:
        """Commits the results of a decode step.

        Arguments:
            logits: raw confidences of all drafts that it might have verified. [n, drafts].
            verified: rows of each sequence that it computed. int32 [n].
            counts: tokens that each sequence gave. int32 [n].
        """
        chances = confidences(logits, self._temperatures)
        self.acceptance.add(chances, verified, counts)
        for sequence, rates in zip(step.sequences, np.cumprod(chances, axis=1).tolist(), strict=True):
            sequence.rates = rates

    def snapshot(self) -> dict[str, Any]:
        """Predicted and real acceptance of drafts by their position in the block; 0 where none was judged.

        Keys: predicted_acceptance, real_acceptance; num_steps_by_size, steps by the tokens of their program;
        verification_slope_ms.
        """
        judged = np.maximum(self.acceptance.judged, 1)
        return {
            "predicted_acceptance": (self.acceptance.predicted / judged).tolist(),
            "real_acceptance": (self.acceptance.accepted / judged).tolist(),
            "num_steps_by_size": dict(self._sizes),
            "verification_slope_ms": self.times.slope_ms,
        }
