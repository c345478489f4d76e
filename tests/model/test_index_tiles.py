"""A long context is scored some query rows at a time: same bits, bounded memory."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import Params, init_cache
from deepinfer_jax.cache.dense import Cache, DenseView, with_lengths_after
from deepinfer_jax.config.precision import precision_policy
from deepinfer_jax.kernels.choice import KernelChoice
from deepinfer_jax.kernels.tiling import map_time
from deepinfer_jax.model import indexer
from deepinfer_jax.model.backbone import hidden_states
from deepinfer_jax.model.probe import Probe
from tests.support.small_model import small_config, small_params

pytestmark = pytest.mark.real

BATCH, TIME = 2, 31  # at ratio 1 more entries than picks, and more blocks than candidates
PICKS = tuple(f"layers.{layer}.attention.index_picks" for layer in (1, 2, 3))


def advance(
    params: Params,
    cache: Cache,
    tokens: jax.Array,
    kernels: KernelChoice = KernelChoice(),  # noqa: B008
) -> tuple[jax.Array, Cache, dict[str, jax.Array]]:
    """Hidden states, cache and picks. Not jitted as `forward` is, so that each test compiles a program of its own."""
    config, (batch, time) = small_config(), tokens.shape
    policy, probe = precision_policy(config, params.precision), Probe(PICKS, ())
    lengths = jnp.full(batch, time)
    view = DenseView.of(cache, lengths, time, config, policy, in_order=kernels.batch_invariant)
    hidden, carry = hidden_states(params, tokens, view, cache, config, policy, probe, kernels)
    return hidden, with_lengths_after(carry.cache, lengths), dict(carry.captured)


def tokens_of(batch: int, time: int) -> jax.Array:
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.integers(3, small_config().text.vocab_size - 8, (batch, time)), jnp.int32)


def set_rows(monkeypatch: pytest.MonkeyPatch, rows: int, batch: int, entries: int) -> None:
    monkeypatch.setattr(indexer, "SCORE_BYTES", rows * batch * entries * 4)
    assert indexer.score_rows(batch, entries) == rows


@pytest.mark.slow
@pytest.mark.parametrize("invariant", [False, True], ids=["as fast as can be", "batch invariant"])
def test_picks_have_the_same_bits_however_many_rows_are_scored_at_once(
    invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, tokens = small_config().text, tokens_of(BATCH, TIME)
    assert text.index_topk < TIME and text.candidate_topk_blocks * text.candidate_block_size < TIME

    def run() -> Any:
        cache = init_cache(small_config(), BATCH, TIME, precision="reference")
        step = jax.jit(lambda *arguments: advance(*arguments, KernelChoice(batch_invariant=invariant)))
        return jax.tree.map(np.asarray, step(small_params("reference"), cache, tokens))

    whole = run()
    set_rows(monkeypatch, 3, BATCH, TIME)  # tiles of 3 rows at ratio 1, of 6 at ratio 2; the last ones are padded
    tiled = run()
    for wanted, found in zip(jax.tree.leaves(whole), jax.tree.leaves(tiled), strict=True):
        assert np.array_equal(wanted, found)


def test_gradients_pass_by_the_picks_of_tiles() -> None:
    """Picks are integers: only what is gathered with them has a gradient."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 7, 9)), jnp.float32)

    def loss(x: jax.Array) -> jax.Array:
        picks = map_time(lambda scores: indexer.pick(scores, 2), x, size=3)
        return jnp.sum(jnp.take_along_axis(x, picks, axis=-1) ** 2)

    second = np.sort(x, axis=-1)[..., -2:-1]
    assert np.array_equal(jax.grad(loss)(x), np.where(x >= second, 2 * x, 0))


@pytest.mark.slow
def test_temporaries_of_a_long_context_are_less_than_the_scores_of_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    context, time = 1 << 16, 64
    monkeypatch.setattr(indexer, "PRODUCT_BYTES", 1 << 16)
    set_rows(monkeypatch, 2, 1, context)
    params = small_params("reference")
    cache = jax.eval_shape(lambda: init_cache(small_config(), 1, context, precision="reference"))
    tokens = jax.ShapeDtypeStruct((1, time), jnp.int32)
    compiled = jax.jit(lambda *arguments: advance(*arguments)[:2], donate_argnums=1).lower(params, cache, tokens)
    analysis: Any = compiled.compile().memory_analysis()
    assert analysis.temp_size_in_bytes < time * context * 2
