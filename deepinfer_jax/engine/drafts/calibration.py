"""Temperatures of the confidence head: what it says a draft's chance is, against what became of it (model.md §9).

A draft's confidence stands for the chance that it is accepted if those before it in its block were. So each place of
the block has its own temperature, fitted to the drafts there that were judged: those whose predecessors were accepted
(sequential temperature scaling).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deepinfer_jax.engine.requests.outputs import RequestOutput
from deepinfer_jax.scheduler import confidences

LOWEST, HIGHEST = 1e-2, 1e2
"""Bounds of a fitted temperature; a head that is always right, or says nothing, would have none."""
_EPSILON = 2.0**-53


@dataclass(frozen=True)
class Fit:
    """The calibration of one place of the block.

    Attributes:
        temperature: of the lowest log loss; 1.0 where no draft was judged.
        judged, accepted: drafts.
        loss_before, loss_after: mean negative log-likelihood in nats, at temperature 1 and as fitted; NaN without any.
    """

    temperature: float
    judged: int
    accepted: int
    loss_before: float
    loss_after: float


def fit_temperatures(logits: npt.NDArray[np.floating], accepted: npt.NDArray[np.integer]) -> list[Fit]:
    """One fit for each place of the block.

    Args:
        logits: raw, of verified drafts; NaN where none was verified. [blocks, drafts].
        accepted: accepted drafts of each block. int [blocks].
    """
    fits = []
    for place in range(logits.shape[1]):
        judged = (accepted >= place) & np.isfinite(logits[:, place])
        fits.append(_fit(logits[judged, place].astype(np.float64), accepted[judged] > place))
    return fits


def draft_pairs(
    results: Iterable[Sequence[RequestOutput]], temperatures: Sequence[float]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """What `fit_temperatures` takes, of all decode steps of some requests.

    Args:
        results: the outputs of each request.
        temperatures: at which their confidence scores were reported, one per draft. A score that rounds to 0 or 1
            stands for a logit of ±36 there.
    """
    logits: list[npt.NDArray[np.float64]] = []
    accepted: list[int] = []
    for outputs in results:
        for output in outputs:
            if output.confidence_score is None:
                continue
            row = np.full(len(temperatures), math.nan)
            scores = np.clip(np.asarray(output.confidence_score, np.float64), _EPSILON, 1 - _EPSILON)
            row[: len(scores)] = (np.log(scores) - np.log1p(-scores)) * temperatures[: len(scores)]
            logits.append(row)
            accepted.append(output.accept_tok - 1)
    return np.asarray(logits).reshape(-1, len(temperatures)), np.asarray(accepted, np.int64)


def report(fits: Sequence[Fit]) -> str:
    """A table, and the value of DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE."""
    lines = ["draft  judged  accepted  temperature  log loss at 1  fitted"]
    for place, fit in enumerate(fits, start=1):
        share = f"{fit.accepted / fit.judged:.3f}" if fit.judged else "-"
        losses = f"{fit.loss_before:13.4f}  {fit.loss_after:6.4f}" if fit.judged else f"{'-':>13}  {'-':>6}"
        lines.append(f"{place:5}  {fit.judged:6}  {share:>8}  {fit.temperature:11.4g}  {losses}")
    return "\n".join([*lines, ",".join(f"{fit.temperature:.4g}" for fit in fits)])


def _fit(logits: npt.NDArray[np.float64], accepted: npt.NDArray[np.bool_]) -> Fit:
    if not len(logits):
        return Fit(1.0, 0, 0, math.nan, math.nan)
    # The loss is convex in 1 / temperature: its slope has one zero, which halving finds.
    low, high = math.log(1 / HIGHEST), math.log(1 / LOWEST)
    for _ in range(60):
        middle = (low + high) / 2
        chance = confidences(logits[:, None], [math.exp(-middle)])[:, 0]
        slope = float(np.sum((chance - accepted) * logits))
        low, high = (middle, high) if slope < 0 else (low, middle)
    temperature = math.exp(-(low + high) / 2)
    return Fit(
        temperature,
        len(logits),
        int(accepted.sum()),
        _loss(logits, accepted, 1.0),
        _loss(logits, accepted, temperature),
    )


def _loss(logits: npt.NDArray[np.float64], accepted: npt.NDArray[np.bool_], temperature: float) -> float:
    chance = confidences(np.where(accepted, logits, -logits)[:, None], [temperature])
    return float(-np.log(chance).mean())
