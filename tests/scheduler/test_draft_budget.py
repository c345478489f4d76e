"""The row budget of a decode step against brute force, and what is measured for it (DB §6.5, §16)."""

import itertools
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax.scheduler import AcceptanceCounts, RowBudget, StepTimes, choose_budget, confidences

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("curve", "rates", "how", "budget"),
    [
        ([(1, 10), (2, 10.5), (4, 14), (8, 20)], [[0.9, 0.7, 0.5], [0.6, 0.2, 0.1]], {}, (4, 4)),
        ([(1, 10), (2, 10.5), (4, 14), (8, 20)], [[0.9, 0.7, 0.5], [0.6, 0.2, 0.1]], {"overhead_ms": 20}, (8, 8)),
        ([(1, 10), (2, 10.5), (4, 14), (8, 20)], [[0.9, 0.7, 0.5], [0.6, 0.2, 0.1]], {"slope_ms": 1}, (4, 4)),
        (
            [(1, 5), (2, 5.2), (4, 6), (8, 8), (12, 11)],
            [[0.95, 0.9, 0.8], [0.3, 0.1, 0.02], [0.6, 0.3, 0.1]],
            {},
            (8, 8),
        ),
    ],
)
def test_the_examples_of_deepinfer_come_out(
    curve: list[tuple[int, float]], rates: list[list[float]], how: dict[str, float], budget: tuple[int, int]
) -> None:
    assert choose_budget([np.asarray(rates)], curve, **how) == RowBudget(budget[0], (budget[1],))


# Multiples of 1/8 and whole times, so that brute force adds up the same numbers in any order.
RATES = st.lists(
    st.lists(st.integers(0, 8), min_size=3, max_size=3).map(lambda row: [x / 8 for x in sorted(row, reverse=True)]),
    min_size=1,
    max_size=4,
)
CURVE = st.lists(st.tuples(st.integers(1, 8), st.integers(1, 20)), min_size=1, max_size=5).map(
    lambda steps: list(itertools.accumulate([*steps, (16, 3)], lambda a, b: (a[0] + b[0], a[1] + b[1])))
)


@given(RATES, CURVE, st.integers(0, 2), st.integers(0, 30))
def test_one_data_index_gets_what_deepinfers_walk_over_totals_finds(
    rates: list[list[float]], curve: list[tuple[int, float]], slope: int, overhead: int
) -> None:
    """One draft after the other, most promising first; the first total of the best throughput."""
    best, most = 0, -1.0
    expected = float(len(rates))
    ranked = sorted(itertools.chain(*rates), reverse=True)
    for total in range(len(rates), len(rates) + len(ranked) + 1):
        if total > len(rates):
            expected += ranked[total - len(rates) - 1]
        program = min((rows, ms) for rows, ms in curve if rows >= total)
        throughput = expected / (program[1] + slope * program[0] + overhead)
        if throughput > most:
            best, most = total, throughput
    budget = choose_budget([np.asarray(rates)], curve, slope_ms=slope, overhead_ms=overhead)
    assert budget.totals == (best,)
    assert budget.rows == min(rows for rows, _ in curve if rows >= best)


@pytest.mark.slow
@given(st.lists(RATES, min_size=2, max_size=3), CURVE)
def test_no_other_numbers_of_rows_on_several_data_indices_give_more(
    rates: list[list[list[float]]], curve: list[tuple[int, float]]
) -> None:
    def throughput(program: tuple[int, float], totals: tuple[int, ...]) -> float:
        tokens = 0.0
        for own, total in zip(rates, totals, strict=True):
            tokens += len(own) + sum(sorted(itertools.chain(*own), reverse=True)[: total - len(own)])
        return tokens / program[1]

    budget = choose_budget([np.asarray(own) for own in rates], curve)
    found = throughput(next(step for step in curve if step[0] == budget.rows), budget.totals)
    choices = [
        throughput(program, totals)
        for program in curve
        for totals in itertools.product(*(range(len(own), program[0] + 1) for own in rates))
    ]
    assert all(total <= budget.rows for total in budget.totals)
    assert found == max(choices)


def test_sequences_without_a_program_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"3 sequences, but the step programs have \[1, 2\] rows"):
        choose_budget([np.ones((3, 2))], [(1, 1.0), (2, 1.5)])


def test_confidences_are_logistic_in_the_scaled_logit_and_saturate() -> None:
    found = confidences(np.asarray([[0.0, 2.0, 1e4], [-2.0, -1e4, np.log(3)]]), [1.0, 2.0, 1.0])
    e = np.e
    wanted = [[0.5, e / (1 + e), 1 / (1 + np.exp(-60))], [1 / (1 + e**2), 1 / (1 + np.exp(60)), 0.75]]
    np.testing.assert_allclose(found, wanted, rtol=1e-12)
    assert confidences(np.asarray([[np.nan, 0.0]]), [1.0, 1.0]).tolist() == [[0.0, 0.5]]


def test_the_slope_is_the_median_over_programs_of_medians() -> None:
    times = StepTimes({"small": (2, 10.0), "middle": (4, 14.0), "large": (8, 20.0)})
    assert times.slope_ms == 0
    rng = np.random.default_rng(0)
    excess: dict[str, list[float]] = {"small": [], "middle": [], "large": []}
    for step in range(1 + 64 * 3):
        program = ["small", "middle", "small", "large"][step % 4] if step % 40 else "large"
        ms = {"small": 11.0, "middle": 15.0, "large": 24.0}[program] + float(rng.normal())
        times.add(program, 2, ms, 0)
        rows, baseline = {"small": (2, 10), "middle": (4, 14), "large": (8, 20)}[program]
        excess[program].append((ms - baseline) / rows)
    assert times.slope_ms == pytest.approx(statistics.median(statistics.median(own) for own in excess.values()))
    assert times.baseline("large") == 20.0


def test_few_and_old_samples_do_not_count_and_the_slope_is_never_negative() -> None:
    times = StepTimes({"a": (1, 10.0), "b": (1, 10.0)})
    for _ in range(60):
        times.add("a", 1, 13.0, 0)
    for _ in range(5):
        times.add("b", 1, 99.0, 0)
    assert times.slope_ms == 3.0
    for _ in range(5056):  # 5000 samples, up to a multiple of 64
        times.add("a", 1, 8.0, 0)
    assert times.slope_ms == 0.0
    for _ in range(128):
        times.add("b", 1, 15.0, 0)
    assert times.slope_ms == 1.5  # the median of -2 and 5


def test_the_overhead_is_that_of_as_many_sequences_or_of_any() -> None:
    times = StepTimes({"a": (8, 10.0)})
    for ms in (1.0, 2.0, 3.0, 4.0):
        times.add("a", 5, 10.0, ms)
    assert times.overhead_ms(5) == 0
    times.add("a", 6, 10.0, 100.0)
    assert times.overhead_ms(5) == 3.0  # of all five
    times.add("a", 5, 10.0, 5.0)
    assert (times.overhead_ms(5), times.overhead_ms(6)) == (3.0, 3.5)
    for ms in range(10, 19):
        times.add("a", 5, 10.0, float(ms))
    assert times.overhead_ms(5) == 14.0  # the last nine


@given(st.integers(0, 2**31), st.integers(1, 40))
def test_acceptance_is_counted_as_one_would_by_hand(seed: int, rows: int) -> None:
    rng = np.random.default_rng(seed)
    chances = rng.random((rows, 3))
    verified = rng.integers(1, 5, rows)
    counts = rng.integers(1, verified + 1)
    by_step, at_once = AcceptanceCounts(3), AcceptanceCounts(3)
    judged, accepted, predicted = [0] * 3, [0] * 3, [0.0] * 3
    for row in range(rows):
        for draft in range(verified[row] - 1):
            judged[draft] += 1
            predicted[draft] += chances[row, draft]
            if draft >= counts[row] - 1:
                break
            accepted[draft] += 1
        by_step.add(chances[row : row + 1], verified[row : row + 1], counts[row : row + 1])
    at_once.add(chances, verified, counts)
    for found in (by_step, at_once):
        assert (found.judged.tolist(), found.accepted.tolist()) == (judged, accepted)
        np.testing.assert_allclose(found.predicted, predicted)
