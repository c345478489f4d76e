"""The drafts that a step verifies, against a loop that takes one after the other (DB §5.9)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax.runtime.allocation import allocate, verification_rates
from deepinfer_jax.scheduler import confidences

pytestmark = pytest.mark.toy

ROWS, DRAFTS = 5, 3
allocate_jit, rates_jit = jax.jit(allocate), jax.jit(verification_rates, static_argnums=1)


def one_after_the_other(rates: np.ndarray, most: list[int], total: int) -> list[int]:
    """The next draft of the row whose next draft is best, of the first such row, until there are enough."""
    taken = [0] * len(most)
    for _ in range(total):
        open_rows = [row for row in range(len(most)) if taken[row] < most[row]]
        if not open_rows:
            break
        best = max(open_rows, key=lambda row: (rates[row, taken[row]], -row))
        taken[best] += 1
    return taken


# Few different values, so that there are ties; 0 and 1 among them.
RATES = st.lists(
    st.lists(st.integers(0, 4), min_size=DRAFTS, max_size=DRAFTS).map(lambda row: sorted(row, reverse=True)),
    min_size=ROWS,
    max_size=ROWS,
)


@given(RATES, st.lists(st.integers(0, DRAFTS), min_size=ROWS, max_size=ROWS), st.integers(0, ROWS * DRAFTS + 2))
def test_the_most_promising_drafts_are_taken(rates: list[list[int]], most: list[int], total: int) -> None:
    values = np.asarray(rates, np.float32) / 4
    found = allocate_jit(values, jnp.asarray(most, jnp.int32), jnp.int32(total))
    assert found.tolist() == one_after_the_other(values, most, total)


def test_the_examples_of_deepinfer_come_out() -> None:
    """DB §16; the totals there hold one row of each sequence."""
    first = jnp.float32([[0.9, 0.7, 0.5], [0.6, 0.2, 0.1]])
    for total, rows in [(4, [3, 1]), (8, [4, 4])]:
        assert (1 + allocate(first, jnp.full(2, 3), jnp.int32(total - 2))).tolist() == rows
    second = jnp.float32([[0.95, 0.9, 0.8], [0.3, 0.1, 0.02], [0.6, 0.3, 0.1]])
    assert (1 + allocate(second, jnp.full(3, 3), jnp.int32(8 - 3))).tolist() == [4, 2, 2]


def test_rates_are_products_of_the_hosts_confidences_and_never_rise() -> None:
    logits = np.random.default_rng(0).normal(size=(200, DRAFTS)).astype(np.float32) * 8
    temperatures = (0.5, 1.0, 3.0)
    found = np.asarray(rates_jit(logits, temperatures))
    np.testing.assert_allclose(found, np.cumprod(confidences(logits, temperatures), axis=1), rtol=1e-5)
    assert (np.diff(found, axis=1) <= 0).all()


@pytest.mark.parametrize("place", range(DRAFTS))
def test_a_confidence_that_is_nan_counts_as_none(place: int) -> None:
    logits = np.full((1, DRAFTS), 2.0, np.float32)
    logits[0, place] = np.nan
    rates = np.asarray(rates_jit(logits, (1.0,) * DRAFTS))[0]
    assert (rates[place:] == 0).all() and (rates[:place] > 0.7).all()


@given(RATES, st.integers(0, ROWS * DRAFTS), st.integers(0, ROWS - 1), st.integers(0, DRAFTS - 1), st.data())
def test_whether_a_draft_is_taken_does_not_depend_on_the_rates_behind_it(
    rates: list[list[int]], total: int, row: int, draft: int, data: Any
) -> None:
    """What makes verification by confidences unbiased: later confidences know what the draft was."""
    other = [list(own) for own in rates]
    for later in range(draft + 1, DRAFTS):
        other[row][later] = data.draw(st.integers(0, other[row][later - 1]))
    found = [
        int(allocate_jit(np.asarray(r, np.float32) / 4, jnp.full(ROWS, DRAFTS, jnp.int32), jnp.int32(total))[row])
        for r in (rates, other)
    ]
    assert (found[0] > draft) == (found[1] > draft)
