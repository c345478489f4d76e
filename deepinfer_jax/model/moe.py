"""Mixture of experts: router, routed experts, shared expert (model.md §6)."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from deepinfer_jax.config.model_config import TextConfig
from deepinfer_jax.config.precision import PrecisionPolicy
from deepinfer_jax.kernels.choice import KernelChoice
from deepinfer_jax.kernels.dot import matmul
from deepinfer_jax.kernels.experts import routed_experts, swiglu
from deepinfer_jax.kernels.formats import fake_quant_fp8
from deepinfer_jax.kernels.quantized_linear import linear
from deepinfer_jax.kernels.rowwise import rowwise
from deepinfer_jax.model.expert_dispatch import dispatched_experts
from deepinfer_jax.weights.params import Experts, MoE
from deepinfer_jax.weights.sharding import EXPERT

_RENORM_EPS = 1e-20  # independent of rms_norm_eps (model.md §1.2)
_DEEP = -80.0  # below it log1p(e^g) is e^g in float32, and e^g is close to the smallest normal number


@jax.named_scope("moe.router")
def expert_scores(x: jax.Array, params: MoE) -> jax.Array:
    """sqrt(softplus(g)) of every expert, fp32. [batch, time, hidden] -> float32 [batch, time, experts]."""
    return _scores(x, gate=params.gate.astype(jnp.float32))


@rowwise
def _scores(x: jax.Array, *, gate: jax.Array) -> jax.Array:
    return _root_softplus(matmul(x.astype(jnp.float32), gate))


def _root_softplus(logits: jax.Array) -> jax.Array:
    """sqrt(softplus(g)), fp32, in any shape."""
    # The inner wheres keep the branch that is not taken, and with it every gradient, finite.
    moderate = (logits > _DEEP) & (logits <= 20)
    softplus = jnp.where(logits > 20, logits, jnp.log1p(jnp.exp(jnp.where(moderate, logits, 0))))
    # From −87 on float32 loses softplus(g) = e^g (XLA:CPU flushes it to 0), but not its root: such experts stay
    # ordered.
    deep = jnp.exp(0.5 * jnp.where(logits > _DEEP, _DEEP, logits))
    return jnp.where(logits > _DEEP, jnp.sqrt(softplus), deep)


@jax.named_scope("moe.router")
def select_experts(scores: jax.Array, params: MoE, image_mask: jax.Array | None, k: int) -> jax.Array:
    """The k largest of score + bias, in descending order, lowest id first on ties.

    Args:
        scores: float32 [batch, time, experts].
        image_mask: bool [batch, time]; those tokens are chosen with `bias_vl` (T26). None: text only.

    Returns:
        int32 [batch, time, k].
    """
    bias = params.bias
    if image_mask is not None and params.bias_vl is not None:
        bias = jnp.where(image_mask[..., None], params.bias_vl, params.bias)
    return lax.top_k(lax.stop_gradient(scores + bias), k)[1]


@jax.named_scope("moe.router")
@rowwise
def expert_weights(scores: jax.Array, expert_ids: jax.Array, *, scale: float) -> jax.Array:
    """Scores of the chosen experts, renormalised when there are several; the bias never enters (M1).

    expert_ids: int32 [batch, time, k]; scale: `routed_scaling_factor` -> float32 [batch, time, k].
    """
    weights = jnp.take_along_axis(scores, expert_ids, axis=-1)
    if expert_ids.shape[-1] > 1:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + _RENORM_EPS)
    return weights * scale


def shared_expert(x: jax.Array, params: Experts, limit: float, quantize: bool) -> jax.Array:
    """w2 · swiglu(w1 x, w3 x), clamped like a routed expert (T17). x: [..., hidden]."""
    if quantize:
        x = fake_quant_fp8(x)  # once, for both projections
    hidden = swiglu(linear(x, params.w1), linear(x, params.w3), None, limit)
    return linear(hidden, params.w2, quantize_input=quantize)


def moe(
    x: jax.Array,
    params: MoE,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    valid: jax.Array,
    text: TextConfig,
    policy: PrecisionPolicy,
    mesh: Mesh | None,
    kernels: KernelChoice,
) -> jax.Array:
    """y = bf16( Σ experts + shared ), fp32 sum in ascending expert id, shared last.

    Args:
        x: [batch, time, hidden].
        expert_ids, expert_weights: [batch, time, k].
        valid: bool [batch, time]; padding rows are not sent to the routed experts.
        mesh: what the routed experts are spread over, or None.
        kernels: which implementation of the routed experts runs; on a mesh always the reference.
    """
    batch, time, hidden = x.shape
    limit, quantize = text.swiglu_limit, policy.quantize_activations
    with jax.named_scope("moe.experts"):
        arguments = (
            jnp.where(valid[..., None], expert_ids, params.gate.shape[0]).reshape(batch * time, -1),
            expert_weights.reshape(batch * time, -1),
        )
        rows, experts = x.reshape(batch * time, hidden), params.experts
        if mesh is not None and mesh.shape.get(EXPERT, 1) > 1:
            routed = dispatched_experts(rows, experts, *arguments, mesh, limit=limit, quantize_input=quantize)
        else:
            w1, w3, w2 = experts.w1, experts.w3, experts.w2
            choice = kernels if mesh is None else KernelChoice()  # XLA does not partition a Pallas call
            routed = routed_experts(rows, w1, w3, w2, *arguments, limit=limit, quantize_input=quantize, choice=choice)
        routed = routed.reshape(batch, time, hidden)
    return _add_shared(x, routed, params=params.shared_experts, limit=limit, policy=policy)


@jax.named_scope("moe.shared")
@rowwise
def _add_shared(
    x: jax.Array, routed: jax.Array, *, params: Experts, limit: float, policy: PrecisionPolicy
) -> jax.Array:
    return policy.round(routed + shared_expert(x, params, limit, policy.quantize_activations).astype(jnp.float32))
