"""How many drafts a decode step verifies, as arithmetic: from confidences and measured step times (DB §6.5).

The drafts of a sequence are verified from the first on, so draft j is of use with the product of the confidences
c_1 … c_j, its *rate*. A step of more rows takes longer and gives more tokens; the number of rows is chosen that gives
most tokens per time. The host chooses it from confidences that are some steps old; which sequences the rows go to, the
device decides by the newest. That keeps every sequence's distribution what it would be: whether a draft is verified may
depend on the confidences up to it, never on later ones of the same block, which know what the draft was.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.floating[Any]]

_LARGEST_LOGIT = 60.0
_SLOPE_SAMPLES, _LEAST_SLOPE_SAMPLES = 5000, 10
_OVERHEAD_SAMPLES, _LEAST_OVERHEAD_SAMPLES = 9, 5
_STEPS_PER_SLOPE = 64


def confidences(logits: FloatArray, temperatures: Sequence[float]) -> FloatArray:
    """The probability that each draft is accepted if those before it are: float64 [n, drafts] of raw logits, NaN: 0.

    temperatures: one per draft, positive.
    """
    scaled = np.asarray(logits, np.float64) / np.asarray(temperatures)
    return np.nan_to_num(1 / (1 + np.exp(-np.clip(scaled, -_LARGEST_LOGIT, _LARGEST_LOGIT))))


@dataclass(frozen=True)
class RowBudget:
    """What a decode step verifies.

    Attributes:
        rows: the size of the step program, per dp rank.
        totals: rows of each dp rank that are used: one for each sequence, and the drafts that are verified.
    """

    rows: int
    totals: tuple[int, ...]


def choose_budget(
    rates: Sequence[FloatArray], curve: Sequence[tuple[int, float]], *, slope_ms: float = 0, overhead_ms: float = 0
) -> RowBudget:
    """The number of rows that gives most tokens per time; the smallest of those that give as many.

    Arguments:
        rates: of each dp rank, [sequences, drafts], products of confidences: in [0, 1], never rising in a row.
        curve: (rows, ms) of each step program, rows rising.
        slope_ms: what a row takes beyond the curve.
        overhead_ms: what a step takes beside its program.

    Raises ValueError if the sequences of a dp rank are more than the rows of the largest program.
    """
    descending = [np.sort(own, axis=None)[::-1] for own in rates]
    # The tokens that are expected of a dp rank beyond one per sequence, by the number of drafts verified.
    gains = [np.concatenate([[0.0], np.cumsum(own, dtype=np.float64)]) for own in descending]
    useful = [int(np.count_nonzero(own)) for own in descending]
    sequences = [len(own) for own in rates]
    best, most = None, -1.0
    for rows, ms in curve:
        if rows < max(sequences):
            continue
        verified = [min(rows - n, count) for n, count in zip(sequences, useful, strict=True)]
        expected = sum(sequences) + sum(float(gain[k]) for gain, k in zip(gains, verified, strict=True))
        throughput = expected / (ms + slope_ms * rows + overhead_ms)
        if throughput > most:
            best, most = RowBudget(rows, tuple(n + k for n, k in zip(sequences, verified, strict=True))), throughput
    if best is None:
        raise ValueError(f"{max(sequences)} sequences, but the step programs have {[rows for rows, _ in curve]} rows")
    return best


class StepTimes[Program]:
    """Times of step programs as they run, beside those that were measured once (DB §6.5).

    Arguments:
        measured: of each program its rows and the milliseconds that it took when it was measured.
    """

    def __init__(self, measured: Mapping[Program, tuple[int, float]]) -> None:
        self._measured = dict(measured)
        self._excess: deque[tuple[Program, float]] = deque(maxlen=_SLOPE_SAMPLES)
        self._overheads: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_OVERHEAD_SAMPLES))
        self._all_overheads: deque[float] = deque(maxlen=_OVERHEAD_SAMPLES)
        self._slope, self._until_next = 0.0, 1

    def baseline(self, program: Program) -> float:
        """The milliseconds that it took when it was measured."""
        return self._measured[program][1]

    def add(self, program: Program, num_sequences: int, step_ms: float, overhead_ms: float) -> None:
        """Commits a step.

        Arguments:
            step_ms: that the program took.
            overhead_ms: that the step took beside it.
        """
        rows, baseline = self._measured[program]
        self._excess.append((program, (step_ms - baseline) / rows))
        self._overheads[num_sequences].append(overhead_ms)
        self._all_overheads.append(overhead_ms)
        self._until_next -= 1
        if self._until_next == 0:
            self._slope, self._until_next = self._measured_slope(), _STEPS_PER_SLOPE

    @property
    def slope_ms(self) -> float:
        """What a row takes beyond the curve, at least 0: the median over the programs of the median of each, of those
        with 10 samples among the last 5000. It is worked out anew every 64 steps."""
        return self._slope

    def overhead_ms(self, num_sequences: int) -> float:
        """The median of the last 9 steps of so many sequences, if there are 5; else of the last 9; else 0."""
        for samples in (self._overheads.get(num_sequences, ()), self._all_overheads):
            if len(samples) >= _LEAST_OVERHEAD_SAMPLES:
                return float(np.median(samples))
        return 0.0

    def _measured_slope(self) -> float:
        samples: defaultdict[Program, list[float]] = defaultdict(list)
        for program, ms in self._excess:
            samples[program].append(ms)
        medians = [np.median(own) for own in samples.values() if len(own) >= _LEAST_SLOPE_SAMPLES]
        return max(0.0, float(np.median(medians))) if medians else 0.0


class AcceptanceCounts:
    """Predicted against real acceptance of drafts by their position in the block.

    A draft counts if it was verified and all before it were accepted: only then the step says what became of it.

    Attributes:
        judged, accepted: int64 [drafts], so many drafts.
        predicted: float64 [drafts], sum of the judged drafts' confidences.
    """

    def __init__(self, num_drafts: int) -> None:
        self.judged = np.zeros(num_drafts, np.int64)
        self.accepted = np.zeros(num_drafts, np.int64)
        self.predicted = np.zeros(num_drafts)

    def add(self, confidences: FloatArray, verified: npt.NDArray[np.integer[Any]], counts: npt.NDArray[Any]) -> None:
        """Commits a step of n sequences.

        Arguments:
            confidences: [n, drafts].
            verified: rows of each sequence, 1 + drafts verified. int [n].
            counts: tokens that each sequence gave, 1 + drafts accepted. int [n].
        """
        position = np.arange(1, len(self.judged) + 1)
        judged = (position < verified[:, None]) & (position <= counts[:, None])
        self.judged += judged.sum(axis=0)
        self.accepted += (judged & (position < counts[:, None])).sum(axis=0)
        self.predicted += np.where(judged, confidences, 0).sum(axis=0)
