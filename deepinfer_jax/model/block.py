"""The pair of sublayers, attention and experts, that layers of the backbone and of the draft share (model.md §4)."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from deepinfer_jax.config.model_config import TextConfig
from deepinfer_jax.config.precision import PrecisionPolicy
from deepinfer_jax.kernels.choice import KernelChoice
from deepinfer_jax.model.carry import Carry
from deepinfer_jax.model.hyper_connections import enter_sublayer, expand
from deepinfer_jax.model.moe import expert_scores, expert_weights, moe, select_experts
from deepinfer_jax.model.probe import Probe
from deepinfer_jax.weights.params import Layer

Attend = Callable[[jax.Array, Carry], tuple[jax.Array, Carry]]
"""Normed input [batch, time, hidden] and carry -> attention's output [batch, time, hidden], and the carry after it."""


def initial_streams(embedded: jax.Array, text: TextConfig) -> tuple[jax.Array, jax.Array]:
    """Four equal streams and pre = (1, 0, 0, 0). embedded: [batch, time, hidden]."""
    batch, time, hidden = embedded.shape
    streams = jnp.broadcast_to(embedded[:, :, None], (batch, time, text.hc_mult, hidden))
    pre = jnp.zeros((batch, time, text.hc_mult), jnp.float32).at[..., 0].set(1.0)
    return streams, pre


def block(
    streams: jax.Array,
    carry: Carry,
    params: Layer,
    attend: Attend,
    *,
    name: str,
    experts_per_token: int,
    image_mask: jax.Array | None,
    valid: jax.Array,
    text: TextConfig,
    policy: PrecisionPolicy,
    probe: Probe,
    mesh: Mesh | None,
    kernels: KernelChoice,
) -> tuple[jax.Array, Carry]:
    """Attention and experts, each collapsing with the previous sublayer's pre and expanding with its own mix (T3).

    Args:
        streams: [batch, time, streams, hidden].
        name: prefix of the probed tensors, e.g. "layers.3".
        image_mask: bool [batch, time]; None: all is text.
        valid: bool [batch, time], false at padding.

    Returns:
        streams and carry for the next layer.
    """
    mix, x = enter_sublayer(streams, carry.pre, params=params.hc_attn, norm=params.attn_norm, text=text)
    x, carry = probe(f"{name}.attention.input", x, carry)
    y, carry = attend(x, carry)
    y, carry = probe(f"{name}.attention.output", y, carry)
    streams, pre = expand(y, streams, mix), mix.pre

    mix, x = enter_sublayer(streams, pre, params=params.hc_ffn, norm=params.ffn_norm, text=text)
    scores = expert_scores(x, params.ffn)
    expert_ids = select_experts(scores, params.ffn, image_mask, experts_per_token)
    expert_ids, carry = probe(f"{name}.moe.expert_ids", expert_ids, carry)
    weights = expert_weights(scores, expert_ids, scale=text.routed_scaling_factor)
    weights, carry = probe(f"{name}.moe.expert_weights", weights, carry)
    y = moe(x, params.ffn, expert_ids, weights, valid, text, policy, mesh, kernels)
    y, carry = probe(f"{name}.moe.output", y, carry)
    streams, carry = probe(f"{name}.streams", expand(y, streams, mix), carry)
    pre, carry = probe(f"{name}.pre", mix.pre, carry)
    return streams, dataclasses.replace(carry, pre=pre)
