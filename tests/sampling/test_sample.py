"""Filters against a brute-force twin, draws against their distribution, randomness against its counters."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.sampling import GREEDY_TEMPERATURE, MIN_LOGPROB, SamplerOptions, random_words
from tests.support.sampling_twin import brute_force_logprobs, make_rows, processed_jit, sample_jit

pytestmark = pytest.mark.toy


@settings(max_examples=150)
@given(
    # Quarters, so that ties are frequent; never a mass that equals a top_p up to rounding.
    quarters=st.lists(st.integers(-24, 24), min_size=11, max_size=11),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_p=st.sampled_from([0.013, 0.2371, 0.6113, 0.9377, 1.0]),
    top_k=st.sampled_from([-1, 1, 2, 5, 11, 400]),
    min_p=st.sampled_from([0.0, 0.0, 0.0317, 0.413, 1.0]),
    force_top_k=st.sampled_from([0, 0, 1, 4, 11, 400]),
)
def test_filters_equal_the_brute_force_twin(
    quarters: list[int], temperature: float, top_p: float, top_k: int, min_p: float, force_top_k: int
) -> None:
    logits = np.asarray(quarters, np.float32) / 4
    rows = make_rows(1, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    options = SamplerOptions(force_top_k=force_top_k)
    found = processed_jit(jnp.asarray(logits[None]), rows, options=options)[0]
    expected = brute_force_logprobs(logits, temperature, top_p, top_k, min_p, force_top_k)
    np.testing.assert_array_equal(np.isfinite(found), np.isfinite(expected))
    # float32 exponentials and sums of eleven terms.
    np.testing.assert_allclose(found, expected, atol=2e-6)


@pytest.mark.slow
def test_filters_equal_the_brute_force_twin_on_a_large_vocabulary() -> None:
    logits = np.random.default_rng(0).normal(size=(4, 20_000)).astype(np.float32) * 3
    settings_ = [(0.7, 0.9, -1), (1.0, 1.0, 50), (1.3, 0.5, 1000), (1.0, 0.999, 3)]
    t, p, k = (np.asarray(column) for column in zip(*settings_, strict=True))
    found = processed_jit(jnp.asarray(logits), make_rows(4, temperature=t, top_p=p, top_k=k))
    for row, (temperature, top_p, top_k) in enumerate(settings_):
        expected = brute_force_logprobs(logits[row], temperature, top_p, top_k)
        # The kept sets may differ by one token at the top-p boundary, where mass is counted in 2^-31.
        assert abs(np.isfinite(found[row]).sum() - np.isfinite(expected).sum()) <= 1
        both = np.isfinite(found[row]) & np.isfinite(expected)
        np.testing.assert_allclose(found[row][both], expected[both], atol=2e-5)


def test_ties_at_the_boundary_keep_the_lowest_ids() -> None:
    logits = jnp.zeros((3, 8), jnp.float32)
    kept = jnp.isfinite(processed_jit(logits, make_rows(3, top_p=[1, 0.25, 0.25], top_k=[3, -1, 2])))
    # 0.25 of mass stands before the third token, exactly top_p: it is kept.
    assert [row.nonzero()[0].tolist() for row in np.asarray(kept)] == [[0, 1, 2], [0, 1, 2], [0, 1]]


def test_greedy_is_the_argmax_with_the_lowest_id_on_ties() -> None:
    logits = jnp.float32([[0, 3, 1, 3], [5, 5, 5, 5], [-1, -2, -1, -9]])
    found = sample_jit(logits, make_rows(3, greedy=True, temperature=GREEDY_TEMPERATURE), num_top=2)
    assert found.tokens.tolist() == [1, 0, 0]
    # The distribution at temperature 1e-5: equal maxima share the mass, the rest has none.
    np.testing.assert_allclose(found.logprobs, -np.log([2, 4, 2]), rtol=1e-6)
    assert found.top_tokens.tolist() == [[1, 3], [0, 1], [0, 2]]


def test_logprobs_are_clamped_and_top_lists_descend() -> None:
    logits = jnp.float32([[1, 4, 2, 3]])
    found = sample_jit(logits, make_rows(1, top_k=2, forced=0), num_top=4)
    assert (found.tokens.tolist(), found.logprobs.tolist()) == ([0], [MIN_LOGPROB])
    assert found.top_tokens.tolist()[0][:2] == [1, 3]
    np.testing.assert_allclose(
        found.top_logprobs[0], [-np.log1p(np.exp(-1.0)), -1 - np.log1p(np.exp(-1.0)), MIN_LOGPROB, MIN_LOGPROB],
        rtol=1e-6,
    )  # fmt: skip


def test_rows_without_a_distribution_are_marked() -> None:
    inf, nan = np.inf, np.nan
    bad = [[0, nan, 1], [0, inf, 1], [-inf, -inf, -inf], [0, -0.0, 0]]
    good = [[-inf, 0, 1], [1e-30, 0, 0], [5, 5, 5]]
    assert sample_jit(jnp.float32(bad + good), make_rows(7)).finite.tolist() == [False] * 4 + [True] * 3


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(1.0, 1.0, -1), (0.6, 1.0, -1), (1.4, 0.8, -1), (1.0, 0.9, 4)]
)
def test_draws_follow_the_processed_distribution(temperature: float, top_p: float, top_k: int) -> None:
    draws = 20_000
    logits = np.random.default_rng(1).normal(size=12).astype(np.float32) * 1.5
    rows = make_rows(draws, temperature=temperature, top_p=top_p, top_k=top_k, seed=[3, 4])
    tokens = np.asarray(sample_jit(jnp.broadcast_to(jnp.asarray(logits), (draws, 12)), rows).tokens)
    expected = np.exp(brute_force_logprobs(logits, temperature, top_p, top_k)) * draws
    observed = np.bincount(tokens, minlength=12)
    kept = expected > 0
    assert not observed[~kept].any()
    chi_square = ((observed - expected)[kept] ** 2 / expected[kept]).sum()
    # Mean n, variance 2n for n = kept - 1 degrees of freedom; the draw is fixed, five sigma is safe.
    degrees = kept.sum() - 1
    assert chi_square < degrees + 5 * np.sqrt(2 * degrees)


def test_draws_at_different_positions_and_seeds_are_independent() -> None:
    count = 20_000
    uniform = jnp.zeros((count, 4), jnp.float32)
    by_position = np.asarray(sample_jit(uniform, make_rows(count)).tokens)
    by_seed = np.asarray(
        sample_jit(uniform, make_rows(count, position=5, seed=np.stack([np.arange(count)] * 2, 1))).tokens
    )
    for first, second in [(by_position[:-1], by_position[1:]), (by_position, by_seed), (by_seed[:-1], by_seed[1:])]:
        pairs = np.bincount(first * 4 + second, minlength=16)
        expected = len(first) / 16
        chi_square = ((pairs - expected) ** 2 / expected).sum()
        assert chi_square < 15 + 5 * np.sqrt(30)  # 15 degrees of freedom, five sigma


def test_a_draw_depends_on_its_own_row_only() -> None:
    rng = np.random.default_rng(2)
    logits = jnp.asarray(rng.normal(size=(6, 50)), jnp.float32)
    rows = make_rows(
        6, temperature=[1, 0.5, 2, 1, 1, 1e-5], top_p=[1, 0.9, 1, 0.3, 1, 1], top_k=[-1, -1, 7, -1, -1, -1],
        greedy=[False] * 5 + [True], seed=rng.integers(0, 2**32, (6, 2)), position=[9, 2, 7, 1, 0, 3],
    )  # fmt: skip
    together = sample_jit(logits, rows)
    order = np.asarray([3, 1, 5, 0, 4, 2])
    shuffled = sample_jit(logits[order], jax.tree.map(operator.itemgetter(order), rows))
    np.testing.assert_array_equal(shuffled.tokens, np.asarray(together.tokens)[order])
    single = [jax.tree.map(operator.itemgetter(slice(i, i + 1)), rows) for i in range(6)]
    alone = [sample_jit(logits[i : i + 1], own).tokens[0] for i, own in enumerate(single)]
    np.testing.assert_array_equal(np.asarray(alone), together.tokens)


def test_the_generator_is_threefry_2x32() -> None:
    # Known answers of the Random123 distribution (threefry2x32, 20 rounds).
    ones = 0xFFFFFFFF
    for word, expected in [(0, ["6b200159", "99ba4efe"]), (ones, ["1cb996fc", "bb002be7"])]:
        seed = jnp.asarray([[word, word]], jnp.uint32)
        found = random_words(seed, jnp.asarray([word], jnp.uint32), word)[0]
        assert [f"{w:08x}" for w in found.tolist()] == expected
