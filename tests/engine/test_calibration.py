"""Fitted temperatures: the true ones come back, and no other gives a lower loss."""

import math

import numpy as np
import pytest

from deepinfer_jax.engine.drafts.calibration import HIGHEST, LOWEST, fit_temperatures, report

pytestmark = [pytest.mark.toy, pytest.mark.unoptimised]


def blocks(temperatures: list[float], count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Blocks whose drafts are accepted with probability sigmoid(logit / temperature), one after the other."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(1.0, 3.0, (count, len(temperatures)))
    is_accepted = rng.random(logits.shape) < 1 / (1 + np.exp(-logits / np.asarray(temperatures)))
    return logits, np.cumprod(is_accepted, axis=1).sum(axis=1)


def loss(logits: np.ndarray, accepted: np.ndarray, place: int, temperature: float) -> float:
    judged = accepted >= place
    z, right = logits[judged, place] / temperature, accepted[judged] > place
    return float(np.mean(np.log1p(np.exp(np.where(right, -z, z)))))


def test_the_true_temperatures_come_back() -> None:
    truth = [0.6, 1.0, 1.7, 2.5, 4.0]
    logits, accepted = blocks(truth, 60_000)
    fits = fit_temperatures(logits, accepted)
    for place, (fit, temperature) in enumerate(zip(fits, truth, strict=True)):
        # Fisher information of the inverse temperature b: Σ z² c (1 − c); three standard errors.
        judged = accepted >= place
        z = logits[judged, place]
        chance = 1 / (1 + np.exp(-z / temperature))
        error = 3 / math.sqrt(np.sum(z**2 * chance * (1 - chance)))
        assert abs(1 / fit.temperature - 1 / temperature) < error
        assert (fit.judged, fit.accepted) == (judged.sum(), (accepted > place).sum())


def test_no_temperature_beats_the_fitted_one() -> None:
    logits, accepted = blocks([0.5, 3.0], 500, seed=1)
    for place, fit in enumerate(fit_temperatures(logits, accepted)):
        assert fit.loss_before == pytest.approx(loss(logits, accepted, place, 1.0))
        assert fit.loss_after == pytest.approx(loss(logits, accepted, place, fit.temperature))
        grid = np.geomspace(0.02, 50, 400)
        assert fit.loss_after <= min(loss(logits, accepted, place, float(t)) for t in grid) + 1e-12


def test_a_head_that_is_always_right_or_says_nothing_stays_within_bounds() -> None:
    always = np.asarray([[2.0], [3.0], [-1.0]]), np.asarray([1, 1, 0])
    never = np.asarray([[2.0], [3.0], [-1.0]]), np.asarray([0, 0, 1])
    assert fit_temperatures(*always)[0].temperature == pytest.approx(LOWEST)
    assert fit_temperatures(*never)[0].temperature == pytest.approx(HIGHEST)


def test_only_drafts_that_were_verified_and_reached_are_judged() -> None:
    nan = math.nan
    logits = np.asarray([[1.0, 2.0, nan], [1.0, nan, nan], [0.5, -2.0, nan], [0.1, 0.2, nan]])
    first, second, third = fit_temperatures(logits, np.asarray([2, 1, 0, 1]))
    assert (first.judged, first.accepted) == (4, 3)
    assert (second.judged, second.accepted) == (
        2,
        1,
    )  # of the second block none was verified; the third never got there
    assert (third.judged, third.temperature) == (0, 1.0) and math.isnan(third.loss_after)


def test_the_report_ends_with_the_value_of_the_variable() -> None:
    logits, accepted = blocks([0.5, 2.0], 2000)
    lines = report([*fit_temperatures(logits, accepted), *fit_temperatures(np.zeros((0, 1)), np.zeros(0, int))]).split(
        "\n"
    )
    values = [float(text) for text in lines[-1].split(",")]
    assert values[0] == pytest.approx(0.5, rel=0.2) and values[1] == pytest.approx(2.0, rel=0.2) and values[2] == 1
    assert len(lines) == 5 and lines[3].split() == ["3", "0", "-", "1", "-", "-"]
