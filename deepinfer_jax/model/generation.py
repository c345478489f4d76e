"""Generation with `forward` alone: small, to be read and changed. The engine is what is fast."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import Array

from deepinfer_jax.cache.dense import Cache, init_cache
from deepinfer_jax.config.model_config import ModelConfig
from deepinfer_jax.model.forward import forward
from deepinfer_jax.sampling import SampleFn, SamplerState, sample_fn
from deepinfer_jax.weights.params import Params


def generate_tokens(
    params: Params,
    config: ModelConfig,
    tokens: Array | npt.NDArray[Any],
    max_tokens: int,
    *,
    key: Array,
    sampler: SampleFn = sample_fn,
    state: Any = None,
    precision: str = "reference",
) -> Array:
    """Goes on with prompts of equal length, past an end-of-sequence token too.

    Args:
        params, config, precision: as of `forward`.
        tokens: any integer dtype [batch, time].
        max_tokens: how many to add, at least 1.
        key: of `jax.random`; each token of each sequence has a key of its own, derived from it.
        sampler: chooses each token. It is compiled once for each function object.
        state: the one that every sequence begins with; None: a `SamplerState` that knows the prompt's length.

    Returns:
        The new tokens, int32 [batch, max_tokens].
    """
    batch, time = tokens.shape
    if state is None:
        state = SamplerState(prompt_len=time)
    states = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (batch, *jnp.shape(leaf))), state)
    history = jnp.full((batch, time + max_tokens), -1, jnp.int32).at[:, :time].set(jnp.asarray(tokens, jnp.int32))
    cache: Cache | None = init_cache(config, batch=batch, max_length=time + max_tokens, precision=precision)
    new = tokens
    for position in range(time, time + max_tokens):
        output = forward(params, config, new, cache=cache, precision=precision)
        cache = output.cache
        assert output.logits is not None
        keys = jax.random.split(jax.random.fold_in(key, position), batch)
        chosen, states = _over_batch(sampler)(output.logits[:, -1], states, keys, history)
        history = history.at[:, position].set(chosen)
        new = np.asarray(chosen)[:, None]
    return history[:, time:]


@functools.lru_cache(maxsize=16)
def _over_batch(sampler: Any) -> Any:
    return jax.jit(jax.vmap(sampler))
