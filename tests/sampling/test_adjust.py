"""What changes the logits of single rows: by the formulas, one row at a time."""

import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.sampling import MAX_EDITS, MIN_LOGPROB, Adjustments, SamplerOptions
from tests.support.sampling_twin import brute_force_logprobs, make_rows, sample_jit

pytestmark = [pytest.mark.toy, pytest.mark.unoptimised]

VOCAB = 40
RNG = np.random.default_rng(5)
LOGITS = RNG.normal(size=VOCAB).astype(np.float32) * 2


def tables(
    edits: list[tuple[int, float, int]] = [],  # noqa: B006  # never changed
    prompt: list[int] = [],  # noqa: B006
    output: list[int] = [],  # noqa: B006
    allowed: list[int] | None = None,
) -> Adjustments:
    """Of one sequence, in row 1 of three; the other rows would change everything."""
    ids = np.full((3, MAX_EDITS), 7, np.int32)
    values, until = np.full(ids.shape, 50, np.float32), np.full(ids.shape, 1000, np.int32)
    ids[1] = -1
    for place, entry in enumerate(edits):
        ids[1, place], values[1, place], until[1, place] = entry
    counts = np.full((3, VOCAB), 9, np.int32)
    counts[1] = 0
    counts[1, prompt] = 1
    np.add.at(counts[1], output, 2)
    masks = np.zeros((3, 2), np.uint32)
    for token in allowed or []:
        masks[1, token // 32] |= np.uint32(1) << np.uint32(token % 32)
    return Adjustments(*(jnp.asarray(table) for table in (ids, values, until, counts, masks)))


def logprobs_of(adjustments: Adjustments, logits: np.ndarray = LOGITS, count: int = 1, **fields: object) -> np.ndarray:
    """All log-probabilities that the rows sample by, [count, vocab]."""
    rows = make_rows(count, **fields)
    found = sample_jit(jnp.tile(jnp.asarray(logits), (count, 1)), rows, tables=adjustments, num_top=VOCAB)
    result = np.empty((count, VOCAB))
    np.put_along_axis(result, np.asarray(found.top_tokens), np.asarray(found.top_logprobs), axis=1)
    return result


def expected(logits: np.ndarray) -> np.ndarray:
    return np.maximum(brute_force_logprobs(logits.astype(np.float32)), MIN_LOGPROB)


def test_edits_add_to_logits_while_the_position_is_below_theirs() -> None:
    edits = [(3, 1.5, 2**31 - 1), (9, -np.inf, 6), (3, -0.5, 5)]
    found = logprobs_of(tables(edits), count=4, edits=[1, 1, 1, -1], position=[4, 5, 6, 4])
    for row, changes in enumerate([{3: 1.0, 9: -np.inf}, {3: 1.5, 9: -np.inf}, {3: 1.5}, {}]):
        logits = LOGITS.copy()
        for token, value in changes.items():
            logits[token] += value
        np.testing.assert_allclose(found[row], expected(logits), atol=1e-5)


def test_penalties_are_those_of_the_formulas() -> None:
    prompt, output, uncounted = [1, 2, 3, 30], [3, 4, 4, 5], [5, 6, -1]
    found = logprobs_of(
        tables(prompt=prompt, output=output), count=2, counts=[1, -1], uncounted=[uncounted] * 2,
        presence=0.3, frequency=0.7, repetition=1.4,
    )  # fmt: skip
    logits = LOGITS.astype(np.float64).copy()
    whole = [*output, 5, 6]
    for token in range(VOCAB):
        if token in prompt + whole:
            logits[token] *= 1 / 1.4 if logits[token] > 0 else 1.4
        logits[token] -= 0.7 * whole.count(token) + 0.3 * (token in whole)
    np.testing.assert_allclose(found[0], expected(logits), atol=1e-5)
    np.testing.assert_allclose(found[1], expected(LOGITS), atol=1e-5)


def test_a_mask_leaves_what_it_allows() -> None:
    allowed = [0, 31, 32, 39]
    found = logprobs_of(tables(allowed=allowed), count=2, mask=[1, -1])
    logits = np.full(VOCAB, -np.inf)
    logits[allowed] = LOGITS[allowed]
    np.testing.assert_allclose(found[0], expected(logits), atol=1e-5)
    np.testing.assert_allclose(found[1], expected(LOGITS), atol=1e-5)


def test_edits_come_before_penalties_and_both_before_the_mask() -> None:
    found = logprobs_of(
        tables([(0, 100.0, 99), (31, 10.0, 99)], prompt=[31], allowed=[31, 32, 39]),
        edits=1, counts=1, mask=1, repetition=2.0,
    )  # fmt: skip
    logits = np.full(VOCAB, -np.inf)
    logits[[31, 32, 39]] = (LOGITS[31] + 10) / 2, LOGITS[32], LOGITS[39]
    np.testing.assert_allclose(found[0], expected(logits), atol=1e-5)


def test_raw_log_probabilities_are_the_models_whatever_is_sampled_from() -> None:
    fields = {"edits": 1, "counts": 1, "mask": 1, "repetition": 2.0, "temperature": 0.3, "top_k": 2}
    adjustments = tables([(31, 10.0, 99)], prompt=[31], allowed=[31, 32, 39])
    found = logprobs_of(adjustments, count=2, raw_logprobs=[True, False], **fields)
    np.testing.assert_allclose(found[0], expected(LOGITS), atol=1e-5)
    assert (found[1] > MIN_LOGPROB).sum() == 2


def test_a_row_whose_bans_leave_nothing_is_marked_and_a_hidden_nan_too() -> None:
    logits = LOGITS.copy()
    logits[5] = np.nan
    rows = make_rows(2, mask=[1, 1])
    nothing = sample_jit(jnp.asarray(np.stack([LOGITS, logits])), rows, tables=tables(allowed=[]))
    assert nothing.finite.tolist() == [False, False]
    something = sample_jit(jnp.asarray(np.stack([LOGITS, logits])), rows, tables=tables(allowed=[4]))
    assert (something.finite.tolist(), something.tokens[0]) == ([True, False], 4)


def test_a_blacklisted_id_is_never_sampled_but_may_be_forced() -> None:
    logits = jnp.asarray(np.tile(LOGITS, (3, 1)))
    best = np.argsort(-LOGITS)[:2].tolist()
    rows = make_rows(3, greedy=[True, False, False], temperature=[1e-5, 1, 1], forced=[-1, -1, best[0]])
    options = SamplerOptions(blacklist=tuple(sorted(set(range(VOCAB)) - {best[1]})))
    assert sample_jit(logits, rows, options=options).tokens.tolist() == [best[1], best[1], best[0]]


def test_the_sum_of_what_is_less_likely() -> None:
    logits = jnp.asarray([[0.0, 1.0, 0.0, 2.0]] * 4)
    found = sample_jit(logits, make_rows(4, forced=[0, 1, 2, 3]), options=SamplerOptions(sum_smaller_probs=True))
    p = np.exp([0, 1, 0, 2]) / np.exp([0, 1, 0, 2]).sum()
    assert found.sum_smaller_probs is not None
    np.testing.assert_allclose(found.sum_smaller_probs, [p[0], p[0] + p[2] + p[1], p[0] + p[2], 1], rtol=1e-6)
