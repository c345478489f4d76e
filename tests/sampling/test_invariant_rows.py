"""With batch invariance what a row gives has the same bits in any batch, whatever it and its neighbours ask for."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.kernels.rowwise import batch_invariant, rowwise
from deepinfer_jax.sampling import MAX_EDITS, Adjustments, DraftRows, Sampled, SamplingRows, draw_draft, sample
from tests.support.sampling_twin import make_rows

pytestmark = pytest.mark.toy

VOCAB, ROWS = 3000, 21
RNG = np.random.default_rng(6)
TABLES = Adjustments(
    jnp.asarray(RNG.integers(-1, VOCAB, (ROWS, MAX_EDITS)), jnp.int32),
    jnp.asarray(RNG.normal(size=(ROWS, MAX_EDITS)), jnp.float32),
    jnp.asarray(RNG.integers(0, 40, (ROWS, MAX_EDITS)), jnp.int32),
    jnp.asarray(RNG.integers(0, 5, (ROWS, VOCAB)), jnp.int32),
    jnp.asarray(RNG.integers(0, 2**32, (ROWS, -(-VOCAB // 32))), jnp.uint32),
)


@functools.partial(jax.jit, static_argnames="invariant")
def sampled(logits: jax.Array, rows: SamplingRows, drafts: DraftRows, invariant: bool = True) -> Sampled:
    def of_rows(logits: jax.Array, rows: SamplingRows, drafts: DraftRows) -> Sampled:
        return sample(logits, rows, tables=TABLES, drafts=drafts, num_top=20)

    with batch_invariant(invariant):
        return rowwise(of_rows, lead=1)(logits, rows, drafts)


@pytest.mark.parametrize("invariant", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_row_gives_the_same_in_any_batch(invariant: bool) -> None:
    wanted = [RNG.integers(-1, ROWS, ROWS) for _ in range(3)]
    rows = make_rows(
        ROWS, temperature=RNG.uniform(0.3, 2, ROWS), top_p=RNG.choice([1, 0.9], ROWS), top_k=RNG.choice([-1, 40], ROWS),
        min_p=RNG.choice([0, 0.01], ROWS), raw_logprobs=RNG.choice([False, True], ROWS), presence=0.3, frequency=0.1,
        repetition=1.1, seed=RNG.integers(0, 2**32, (ROWS, 2)), edits=wanted[0], counts=wanted[1], mask=wanted[2],
        uncounted=RNG.integers(-1, VOCAB, (ROWS, 3)),
    )  # fmt: skip
    logits, other = (jnp.asarray(RNG.normal(size=(ROWS, VOCAB)) * 3, jnp.float32) for _ in range(2))
    drafts = DraftRows(*draw_draft((logits + other) / 2, rows, 0))
    whole = jax.tree.map(np.asarray, sampled(logits, rows, drafts, invariant=invariant))
    for batch in ([3], [20, 4], list(range(ROWS - 1, 2, -1))):
        index = np.asarray(batch)
        part = sampled(*jax.tree.map(lambda array, own=index: array[own], (logits, rows, drafts)), invariant=invariant)
        for name in ("tokens", "accepted", "top_tokens"):
            np.testing.assert_array_equal(getattr(part, name), getattr(whole, name)[index])
        for name in ("logprobs", "top_logprobs"):
            if invariant:
                np.testing.assert_array_equal(getattr(part, name), getattr(whole, name)[index])
            else:
                np.testing.assert_allclose(getattr(part, name), getattr(whole, name)[index], atol=1e-5)
