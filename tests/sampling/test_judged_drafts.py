"""The rule of verification: what comes out has the target's distribution, whatever the drafts' was."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.sampling import DraftRows
from tests.support.sampling_twin import assert_distributed, brute_force_logprobs, draft_jit, make_rows, sample_jit

pytestmark = pytest.mark.toy

DRAWS, VOCAB = 50_000, 12


def some_logits(seed: int) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=VOCAB) * 1.5).astype(np.float32)


def repeated(row: np.ndarray, count: int = DRAWS) -> jax.Array:
    return jnp.broadcast_to(jnp.asarray(row), (count, *row.shape))


def of_tokens(tokens: list[int], logprobs: np.ndarray | None = None) -> DraftRows:
    drafts = jnp.asarray(tokens, jnp.int32)
    return DraftRows(drafts, jnp.full((len(tokens), VOCAB), -jnp.log(VOCAB)) if logprobs is None else logprobs)


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(1.0, 1.0, -1), (0.6, 1.0, -1), (1.4, 0.8, -1), (1.0, 0.9, 4)]
)
@pytest.mark.parametrize("agreement", [0.0, 0.8])
def test_judged_drafts_have_the_targets_distribution(
    temperature: float, top_p: float, top_k: int, agreement: float
) -> None:
    target, other = some_logits(1), some_logits(2)
    draft = agreement * target + (1 - agreement) * other
    rows = make_rows(DRAWS, temperature=temperature, top_p=top_p, top_k=top_k, seed=[3, 4])
    p, q = (np.exp(brute_force_logprobs(logits, temperature, top_p, top_k)) for logits in (target, draft))

    drafts = DraftRows(*draft_jit(repeated(draft), rows, 0))
    assert_distributed(np.asarray(drafts.tokens), q)
    found = sample_jit(repeated(target), rows, drafts=drafts)
    assert_distributed(np.asarray(found.tokens), p)
    accepted, tokens = np.asarray(found.accepted), np.asarray(found.tokens)
    assert (tokens == np.asarray(drafts.tokens))[accepted].all()
    assert_distributed(tokens[accepted], np.minimum(p, q))
    assert_distributed(tokens[~accepted], np.maximum(p - q, 0))
    rate = np.minimum(p, q).sum()
    assert abs(accepted.mean() - rate) < 4 * np.sqrt(rate * (1 - rate) / DRAWS)  # 4 standard errors


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_p=st.sampled_from([0.2371, 0.9377, 1.0]),
    top_k=st.sampled_from([-1, 1, 5]),
    min_p=st.sampled_from([0.0, 0.0317]),
    raw=st.booleans(),
)
def test_a_judged_token_is_told_as_a_plain_one_would_be(seed: int, raw: bool, **filters: float) -> None:
    rng = np.random.default_rng(seed)
    logits = jnp.asarray(rng.normal(size=(4, VOCAB)) * 3, jnp.float32)
    rows = make_rows(4, seed=[seed, 1], raw_logprobs=raw, **filters)
    drafts = DraftRows(*draft_jit(logits[::-1], rows, 0))
    judged = sample_jit(logits, rows, drafts=drafts, num_top=3)
    plain = sample_jit(logits, rows.replace(forced=judged.tokens), num_top=3)
    np.testing.assert_array_equal(judged.logprobs, plain.logprobs)
    np.testing.assert_array_equal(judged.top_tokens, plain.top_tokens)
    np.testing.assert_array_equal(judged.top_logprobs, plain.top_logprobs)
    assert (np.exp(judged.top_logprobs).sum(axis=1) <= 1 + 1e-6).all()
    assert (np.diff(judged.top_logprobs, axis=1) <= 0).all()


def test_a_draft_of_the_target_itself_is_always_accepted() -> None:
    logits, rows = repeated(some_logits(1)), make_rows(DRAWS)
    assert sample_jit(logits, rows, drafts=DraftRows(*draft_jit(logits, rows, 0))).accepted.all()


def test_a_draft_outside_the_targets_filter_is_never_accepted() -> None:
    logits = repeated(np.arange(VOCAB, dtype=np.float32), 1000)
    found = sample_jit(logits, make_rows(1000, top_k=3), drafts=of_tokens([2] * 1000))
    assert not found.accepted.any()
    assert set(np.asarray(found.tokens).tolist()) == {9, 10, 11}


def test_greedy_accepts_the_argmax_only() -> None:
    logits = repeated(np.asarray([0, 3, 3, 1] + [-1] * 8, np.float32), 4)
    rows = make_rows(4, greedy=[True, True, True, False], temperature=[1e-5] * 3 + [1.0])
    found = sample_jit(logits, rows, drafts=of_tokens([1, 2, -1, -1]))
    assert found.tokens.tolist()[:3] == [1, 1, 1]
    assert found.accepted.tolist() == [True, False, False, False]
    all_greedy = make_rows(3, greedy=True, temperature=1e-5)
    found = sample_jit(logits[:3], all_greedy, drafts=of_tokens([1, 2, -1]))
    assert (found.tokens.tolist(), found.accepted.tolist()) == ([1, 1, 1], [True, False, False])
    assert draft_jit(logits, make_rows(4, greedy=True, temperature=1e-5), 0)[0].tolist() == [1, 1, 1, 1]


def test_a_row_without_a_draft_is_a_plain_sample() -> None:
    logits, rows = repeated(some_logits(1), 500), make_rows(500)
    plain = sample_jit(logits, rows)
    beside = sample_jit(logits, rows, drafts=of_tokens([-1, 3] * 250))
    np.testing.assert_array_equal(beside.tokens[::2], plain.tokens[::2])
    assert not beside.accepted[::2].any()
    assert (beside.tokens[1::2] != plain.tokens[1::2]).any()
    np.testing.assert_array_equal(  # a distribution that is none says nothing about its draft
        sample_jit(logits, rows, drafts=of_tokens([3] * 500, jnp.full((500, VOCAB), jnp.nan))).tokens, plain.tokens
    )


def test_a_forced_token_is_accepted_where_it_was_drafted() -> None:
    rows = make_rows(3, forced=[5, 5, -1], greedy=[True, False, False])
    found = sample_jit(repeated(some_logits(1), 3), rows, drafts=of_tokens([5, 4, 4]))
    assert found.tokens.tolist()[:2] == [5, 5]
    assert found.accepted.tolist()[:2] == [True, False]


def test_a_row_without_a_distribution_ends_its_sequence() -> None:
    logits = np.stack([some_logits(1)] * 2)
    logits[0, 3] = np.nan
    found = sample_jit(jnp.asarray(logits), make_rows(2, greedy=True), drafts=of_tokens([3, int(logits[1].argmax())]))
    assert found.accepted.tolist() == [False, True]
    assert found.finite.tolist() == [False, True]


@pytest.mark.slow
def test_the_purposes_of_a_position_are_independent() -> None:
    """Were draft, acceptance and residual of one number, a rejected draft would bend what follows it."""
    uniform = jnp.ones((DRAWS, VOCAB), jnp.float32)
    rows = make_rows(DRAWS, seed=[8, 1])
    drafts, logprobs = draft_jit(uniform, rows, 0)
    fresh = sample_jit(uniform, rows).tokens
    # Rejected always: the target excludes what was drafted.
    target = jnp.where(jax.nn.one_hot(drafts, VOCAB, dtype=jnp.bool_), -jnp.inf, 0.0)
    found = sample_jit(target, rows, drafts=DraftRows(drafts, logprobs))
    assert not found.accepted.any()
    offset = np.asarray(found.tokens - drafts) % VOCAB
    assert_distributed(offset, np.asarray([0] + [1] * (VOCAB - 1), float))
    assert_distributed(np.asarray(drafts * VOCAB + fresh), np.ones(VOCAB**2))


def test_a_judged_draft_depends_on_its_own_row_only() -> None:
    rng = np.random.default_rng(2)
    logits, draft_logits = (jnp.asarray(rng.normal(size=(8, VOCAB)), jnp.float32) for _ in range(2))
    rows = make_rows(
        8, temperature=[1, 0.5, 2, 1, 1, 1, 1, 1e-5], greedy=[False] * 7 + [True], top_p=[1, 0.9, 1, 0.3, 1, 1, 1, 1],
        seed=rng.integers(0, 2**32, (8, 2)),
    )  # fmt: skip
    drafts = DraftRows(*draft_jit(draft_logits, rows, 0))
    together = sample_jit(logits, rows, drafts=drafts)
    for i in range(8):
        here = slice(i, i + 1)
        own = jax.tree.map(operator.itemgetter(here), rows)
        alone = sample_jit(logits[here], own, drafts=DraftRows(drafts.tokens[here], drafts.logprobs[here]))
        assert (alone.tokens[0], alone.accepted[0]) == (together.tokens[i], together.accepted[i])


def test_whether_a_draft_is_verified_may_depend_on_an_earlier_block() -> None:
    """An earlier block, of which only its first draft was accepted, tells by its confidences what it had drafted next.

    Here the next block's draft for that position is verified only if that was a likely token. Were it the same draft
    again, 10 % of the tokens would be others.
    """
    target, draft = some_logits(1), some_logits(2)
    rows = make_rows(DRAWS, seed=[5, 9])
    earlier, _ = draft_jit(repeated(draft), rows, 1)
    drafts, logprobs = draft_jit(repeated(draft), rows, 0)
    assert_distributed(
        np.asarray(earlier * VOCAB + drafts), np.outer(*[np.exp(brute_force_logprobs(draft))] * 2).reshape(-1)
    )
    likely = jnp.asarray(target)[earlier] > jnp.median(jnp.asarray(target))
    verified = jnp.where(likely, drafts, -1)
    assert 0.2 < float(likely.mean()) < 0.8
    found = sample_jit(repeated(target), rows, drafts=DraftRows(verified, logprobs))
    assert_distributed(np.asarray(found.tokens), np.exp(brute_force_logprobs(target)))
