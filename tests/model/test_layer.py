"""A layer is a function of values: streams and carry in, streams and carry out."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import forward, init_cache
from deepinfer_jax.cache.dense import Cache, DenseView
from deepinfer_jax.config.layer_plan import layer_plans
from deepinfer_jax.config.precision import precision_policy
from deepinfer_jax.kernels.choice import KernelChoice
from deepinfer_jax.model.backbone import layer
from deepinfer_jax.model.block import initial_streams
from deepinfer_jax.model.carry import Carry
from deepinfer_jax.model.context import ForwardContext
from deepinfer_jax.model.probe import Probe
from tests.support.small_model import small_config, small_params

pytestmark = pytest.mark.real

PRECISION = "float32_exact"
TOKENS = np.random.default_rng(0).integers(3, 180, (2, 7))


@functools.partial(jax.jit, static_argnums=0)
def run_layer(index: int, streams: jax.Array, carry: Carry, cache: Cache, rows: jax.Array) -> tuple[jax.Array, Carry]:
    """One layer as a program of its own; of `cache` the lengths before the step count."""
    config, params = small_config(), small_params(PRECISION)
    policy, (batch, time) = precision_policy(config, PRECISION), TOKENS.shape
    view = DenseView.of(cache, jnp.full(batch, time, jnp.int32), time, config, policy)
    context = ForwardContext.of(config.text, policy, view, Probe(), KernelChoice(), engram_rows=rows)
    return layer(streams, carry, params.layers[index], layer_plans(config.text)[index], context)


def test_layers_one_after_another_are_the_forward_pass() -> None:
    """A carry goes through `jax.jit`; what a layer was given is there after it as it was before."""
    config = small_config()
    whole = forward(
        small_params(PRECISION),
        config,
        TOKENS,
        cache=init_cache(config, 2, 16, precision=PRECISION),
        precision=PRECISION,
        capture=["embed", "layers.*.streams", "layers.*.pre", "layers.1.engram.rows"],
    )
    streams, pre = initial_streams(whole.captured["embed"], config.text)
    cache = init_cache(config, 2, 16, precision=PRECISION)
    rows = whole.captured["layers.1.engram.rows"][:, :, None]
    carry = Carry(pre=pre, cache=cache)
    for index in range(config.text.num_hidden_layers):
        before: list[Any] = [np.asarray(leaf) for leaf in jax.tree.leaves((streams, carry))]
        new_streams, new_carry = run_layer(index, streams, carry, cache, rows)
        for kept, leaf in zip(before, jax.tree.leaves((streams, carry)), strict=True):
            np.testing.assert_array_equal(kept, leaf)
        streams, carry = new_streams, new_carry
        # Another program: fp32 sums in another order.
        np.testing.assert_allclose(streams, whole.captured[f"layers.{index}.streams"], atol=1e-4)
        np.testing.assert_allclose(carry.pre, whole.captured[f"layers.{index}.pre"], atol=1e-5)
    assert whole.cache is not None
    # The forward pass stores the drafts' context and the n-gram tail beside the layers, and counts the tokens.
    beside = {name: getattr(whole.cache, name) for name in ("lengths", "ngrams", "draft_windows")}
    for found, wanted in zip(
        jax.tree.leaves(dataclasses.replace(carry.cache, **beside)), jax.tree.leaves(whole.cache), strict=True
    ):
        np.testing.assert_allclose(found, wanted, atol=1e-4)
