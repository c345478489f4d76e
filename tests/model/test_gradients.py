"""`jax.grad` through `forward`: true derivatives without quantisers, straight-through with them."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import deepinfer_jax.cache.dense
import deepinfer_jax.model.attention
import deepinfer_jax.model.indexer
from deepinfer_jax import ModelConfig, Params, forward, load_config, load_params
from deepinfer_jax.model.forward import _forward
from tests.support.paths import GOLDEN_A

pytestmark = [pytest.mark.real, pytest.mark.unoptimised, pytest.mark.slow]


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return load_config(GOLDEN_A)


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return np.load(GOLDEN_A / "short.f32nq.npz")["input_ids"]


def loss_of(logits: jax.Array) -> jax.Array:
    """A fixed random linear functional: every logit counts, and the loss is of order 1."""
    weights = np.random.default_rng(0).standard_normal(logits.shape).astype(np.float32)
    return jnp.sum(logits * weights) / np.sqrt(weights.size)


def float_leaves(params: Params) -> Params:
    """The differentiable part: all but the token map."""
    return params.replace(token_map=None)


def gradient(params: Params, config: ModelConfig, tokens: np.ndarray, precision: str) -> tuple[Any, Any]:
    def loss(leaves: Params) -> jax.Array:
        full = leaves.replace(token_map=params.token_map)
        logits = forward(full, config, tokens, precision=precision).logits
        assert logits is not None
        return loss_of(logits)

    return jax.jit(jax.value_and_grad(loss))(float_leaves(params))


def _constant(value: jax.Array, _: jax.Array) -> jax.Array:
    return value


GROUPS: dict[str, Callable[[str], bool]] = {
    "embedding": lambda path: ".embed" in path and "engram" not in path,
    "attention": lambda path: ".attn." in path and "layers" in path and "draft" not in path,
    "experts": lambda path: ".ffn." in path and "draft" not in path,
    "hyper-connections": lambda path: ".hc_" in path and "draft" not in path,
    "Engram": lambda path: ".engram." in path,
    "head": lambda path: ".head" in path and "draft" not in path,
}


@pytest.fixture(scope="module")
def exact(config: ModelConfig, tokens: np.ndarray) -> tuple[Params, Any]:
    params = load_params(GOLDEN_A, config, precision="float32_exact")
    return params, gradient(params, config, tokens, "float32_exact")[1]


@pytest.fixture(scope="module")
def exact_loss(config: ModelConfig, tokens: np.ndarray, exact: tuple[Params, Any]) -> Callable[[Params], float]:
    """The loss with picks and routing held at their values for the unmoved parameters, as `jax.grad` holds them."""
    params, _ = exact
    names = ("layers.*.index_picks", "layers.*.expert_ids")
    fixed = forward(params, config, tokens, precision="float32_exact", capture=names).captured
    edits = {name: functools.partial(_constant, value) for name, value in fixed.items()}

    @jax.jit
    def loss(moved: Params) -> jax.Array:
        logits = forward(moved, config, tokens, precision="float32_exact", edit=edits).logits
        assert logits is not None
        return loss_of(logits)

    return lambda moved: float(loss(moved))


@pytest.mark.parametrize("group", GROUPS)
def test_gradient_equals_central_differences(
    group: str, exact: tuple[Params, Any], exact_loss: Callable[[Params], float]
) -> None:
    params, grad = exact
    rng = np.random.default_rng(1)
    chosen = [
        GROUPS[group](jax.tree_util.keystr(path))
        for path, _ in jax.tree_util.tree_leaves_with_path(float_leaves(params))
    ]
    assert any(chosen)
    leaves, tree = jax.tree.flatten(float_leaves(params))
    grads = jax.tree.leaves(grad)
    # A direction along the gradient, so that the difference stands well above fp32 noise, plus a random part.
    scale = float(np.sqrt(sum(float(jnp.sum(g * g)) for g, use in zip(grads, chosen, strict=True) if use)))
    assert scale > 0
    direction = [
        np.asarray(g) / scale + rng.standard_normal(g.shape).astype(np.float32) / np.sqrt(g.size) * 0.1
        if use
        else 0 * g
        for g, use in zip(grads, chosen, strict=True)
    ]
    predicted = sum(float(np.vdot(np.asarray(g), d)) for g, d in zip(grads, direction, strict=True))

    def at(step: float) -> float:
        moved = jax.tree.unflatten(tree, [leaf + step * d for leaf, d in zip(leaves, direction, strict=True)])
        return exact_loss(moved.replace(token_map=params.token_map))

    # The best of a few steps: fp32 noise of the loss, about 1e-6, counts 1 / step, curvature and clamps count step.
    errors = [abs((at(step) - at(-step)) / (2 * step) - predicted) for step in (1e-2, 3e-3, 1e-3, 3e-4)]
    assert min(errors) <= 5e-3 * abs(predicted), (predicted, errors)


@pytest.fixture
def identity_plus_constant(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every quantiser q(x) as x + c with the constant c = q(x) − x."""

    def replaced(quantiser: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
        return lambda x: x + lax.stop_gradient(quantiser(x) - x)

    for module, name in (
        (deepinfer_jax.cache.dense, "fake_quant_fp4_kv"),
        (deepinfer_jax.cache.dense, "fake_quant_fp4_index"),
        (deepinfer_jax.model.attention, "fake_quant_fp8"),
        (deepinfer_jax.model.indexer, "fake_quant_fp4_index"),
    ):
        monkeypatch.setattr(module, name, replaced(getattr(module, name)))
    _forward.clear_cache()
    yield
    _forward.clear_cache()


@pytest.fixture(scope="module")
def straight_through(config: ModelConfig, tokens: np.ndarray) -> tuple[Params, Any, Any]:
    params = load_params(GOLDEN_A, config, precision="float32")
    return (params, *gradient(params, config, tokens, "float32"))


@pytest.mark.usefixtures("identity_plus_constant")
def test_float32_gradient_is_that_of_quantisers_as_identity_plus_constant(
    config: ModelConfig, tokens: np.ndarray, straight_through: tuple[Params, Any, Any]
) -> None:
    params, loss, grad = straight_through
    other_loss, other = gradient(params, config, tokens, "float32")
    np.testing.assert_allclose(loss, other_loss, rtol=1e-5)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(grad), jax.tree.leaves(other), strict=True):
        # x + (q − x) is q up to an ulp of x; 1e-3 of a leaf's largest entry is far below any missing path.
        bound = 1e-3 * float(jnp.max(jnp.abs(b))) + 1e-7
        assert float(jnp.max(jnp.abs(a - b))) <= bound, jax.tree_util.keystr(path)


def test_every_backbone_weight_has_a_gradient(straight_through: tuple[Params, Any, Any]) -> None:
    _, _, grad = straight_through
    silent = ("draft", "vision", "bias", "indexer", "index_key", "bias_vl")  # choose, or belong to another pass
    for path, leaf in jax.tree_util.tree_leaves_with_path(grad):
        name = jax.tree_util.keystr(path)
        assert np.isfinite(np.asarray(leaf)).all(), name
        if not any(word in name for word in silent):
            assert float(jnp.max(jnp.abs(leaf))) > 0, name
