"""One layer around its two sublayers, backbone and draft alike (model.md §4, Appendix A)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from deepinfer_jax.config.model_config import TextConfig
from deepinfer_jax.config.precision import PrecisionPolicy
from deepinfer_jax.kernels.choice import KernelChoice
from deepinfer_jax.kernels.rowwise import rowwise
from deepinfer_jax.model.hyper_connections import Mix, collapse, expand, mix_coefficients
from deepinfer_jax.model.moe import expert_scores, expert_weights, moe, select_experts
from deepinfer_jax.model.norm import rms_norm
from deepinfer_jax.model.probe import Probe
from deepinfer_jax.weights.params import HyperConnection, Layer


def initial_streams(embedded: jax.Array, text: TextConfig) -> tuple[jax.Array, jax.Array]:
    """Four equal streams and pre = (1, 0, 0, 0). embedded: [batch, time, hidden]."""
    batch, time, hidden = embedded.shape
    streams = jnp.broadcast_to(embedded[:, :, None], (batch, time, text.hc_mult, hidden))
    pre = jnp.zeros((batch, time, text.hc_mult), jnp.float32).at[..., 0].set(1.0)
    return streams, pre


def block(
    streams: jax.Array,
    pre: jax.Array,
    params: Layer,
    attend: Callable[[jax.Array], jax.Array],
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
) -> tuple[jax.Array, jax.Array]:
    """Attention and experts, each collapsing with the previous sublayer's pre and expanding with its own mix (T3).

    Args:
        streams: [batch, time, streams, hidden].
        pre: float32 [batch, time, streams].
        attend: normed input [batch, time, hidden] to attention output.
        name: prefix of the probed tensors, e.g. "layers.3".

    Returns:
        streams and pre for the next layer.
    """
    mix, x = enter_sublayer(streams, pre, params.hc_attn, params.attn_norm, text)
    y = probe(f"{name}.attention.output", attend(probe(f"{name}.attention.input", x)))
    streams, pre = rowwise(expand, y, streams, mix), mix.pre

    mix, x = enter_sublayer(streams, pre, params.hc_ffn, params.ffn_norm, text)
    scores = expert_scores(x, params.ffn)
    expert_ids = select_experts(scores, params.ffn, image_mask, experts_per_token)
    expert_ids = probe(f"{name}.moe.expert_ids", expert_ids)
    weights = expert_weights(scores, expert_ids, text.routed_scaling_factor)
    weights = probe(f"{name}.moe.expert_weights", weights)
    y = probe(f"{name}.moe.output", moe(x, params.ffn, expert_ids, weights, valid, text, policy, mesh, kernels))
    return probe(f"{name}.streams", rowwise(expand, y, streams, mix)), probe(f"{name}.pre", mix.pre)


def enter_sublayer(
    streams: jax.Array, pre: jax.Array, params: HyperConnection, norm: jax.Array, text: TextConfig
) -> tuple[Mix, jax.Array]:
    """A sublayer's own mix, and its normed input [batch, time, hidden]."""

    def enter(streams: jax.Array, pre: jax.Array) -> tuple[Mix, jax.Array]:
        mix = mix_coefficients(streams, params, text)
        return mix, rms_norm(collapse(streams, pre), norm, text.rms_norm_eps)

    return rowwise(enter, streams, pre)
