"""`sample_fn`, the research sampler: the engine's distribution, under jit and vmap, and in a loop with `forward`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import SamplerState, forward, generate_tokens, init_params, sample_fn
from deepinfer_jax.checkpoint.tiny_config import TINY
from deepinfer_jax.config.model_config import parse_config
from tests.support.sampling_twin import assert_distributed, brute_force_logprobs

pytestmark = pytest.mark.real

TINY_CONFIG = parse_config(TINY)
DRAWS, VOCAB = 50_000, 12
LOGITS = (np.random.default_rng(1).normal(size=VOCAB) * 1.5).astype(np.float32)
HISTORY = np.asarray([3, 3, 4, 5, 5, 5, -1, -1], np.int32)


def test_it_draws_from_the_processed_distribution_under_jit_and_vmap() -> None:
    state = SamplerState(
        temperature=1.3, top_p=0.95, min_p=0.01,
        presence_penalty=0.4, frequency_penalty=0.2, repetition_penalty=1.2, prompt_len=2,
    )  # fmt: skip
    keys = jax.random.split(jax.random.key(4), DRAWS)
    draw = jax.jit(jax.vmap(sample_fn, in_axes=(None, None, 0, None)))
    tokens, states = draw(jnp.asarray(LOGITS), state, keys, jnp.asarray(HISTORY))
    logits = LOGITS.astype(np.float64).copy()
    for token in (3, 4, 5):
        logits[token] *= 1 / 1.2 if logits[token] > 0 else 1.2
    logits[4] -= 0.4 + 0.2  # 3 is the prompt's
    logits[5] -= 0.4 + 3 * 0.2
    assert_distributed(np.asarray(tokens), np.exp(brute_force_logprobs(logits.astype(np.float32), 1.3, 0.95, -1, 0.01)))
    np.testing.assert_array_equal(states.temperature, np.full(DRAWS, 1.3, np.float32))


def test_temperature_zero_is_the_argmax_and_states_may_differ_within_a_batch() -> None:
    states = SamplerState(temperature=jnp.asarray([0.0, 1.0]), top_k=jnp.asarray([-1, 1]))
    axes = jax.tree.map(lambda _: None, SamplerState()).replace(temperature=0, top_k=0)
    keys = jax.random.split(jax.random.key(4), 2)
    tokens, _ = jax.vmap(sample_fn, in_axes=(None, axes, 0, None))(jnp.asarray(LOGITS), states, keys, HISTORY)
    assert tokens.tolist() == [LOGITS.argmax()] * 2


@pytest.fixture(scope="module")
def params() -> object:
    return init_params(TINY_CONFIG, jax.random.key(0), precision="float32")


@pytest.mark.slow
def test_generation_is_greedy_decoding_of_forward(params: object) -> None:
    prompts = np.random.default_rng(0).integers(3, 250, (2, 5))
    found = generate_tokens(
        params, TINY_CONFIG, prompts, 4, key=jax.random.key(1), state=SamplerState(temperature=0.0), precision="float32"
    )
    whole = np.hstack([prompts, found])
    logits = forward(params, TINY_CONFIG, whole, precision="float32").logits
    np.testing.assert_array_equal(found, np.asarray(logits).argmax(-1)[:, 4:-1])


@pytest.mark.slow
def test_generation_takes_a_function_of_ones_own_with_any_state(params: object) -> None:
    def every_third(logits: jax.Array, state: jax.Array, key: jax.Array, history: jax.Array) -> tuple:
        """Counts its calls; every third token repeats the first one of the prompt."""
        return jnp.where(state % 3 == 2, history[0], jnp.argmin(logits)).astype(jnp.int32), state + 1

    prompts = np.asarray([[7, 8], [9, 8]])
    found = generate_tokens(
        params, TINY_CONFIG, prompts, 6, key=jax.random.key(1), sampler=every_third, state=0, precision="float32"
    )
    assert found[:, 2::3].tolist() == [[7, 7], [9, 9]]
    again = generate_tokens(
        params, TINY_CONFIG, prompts, 6, key=jax.random.key(2), sampler=every_third, state=0, precision="float32"
    )
    np.testing.assert_array_equal(found, again)
