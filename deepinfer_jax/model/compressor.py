"""Compressor of KV sources: tokens to latents, latents to entries and index keys (model.md §5.5)."""

from typing import Any

import jax
import jax.numpy as jnp

from deepinfer_jax.cache.view import Groups, NewTokens, OpenGroup
from deepinfer_jax.config.layer_plan import LayerPlan
from deepinfer_jax.config.model_config import TextConfig
from deepinfer_jax.config.precision import PrecisionPolicy
from deepinfer_jax.kernels.dot import matmul
from deepinfer_jax.kernels.quantized_linear import linear
from deepinfer_jax.kernels.rowwise import rowwise
from deepinfer_jax.model.context import ForwardContext
from deepinfer_jax.model.norm import rms_norm
from deepinfer_jax.model.rope import rotate, rotation
from deepinfer_jax.weights.params import Attention, Compressor, IndexKey


@jax.named_scope("attention.compress")
def store_entries(x: jax.Array, cache: Any, params: Attention, plan: LayerPlan, context: ForwardContext) -> Any:
    """The cache with what a KV source makes of its normed input [batch, time, hidden]: entries and index keys."""
    compressor, view, text = params.compressor, context.view, context.text
    assert compressor is not None and params.index_key is not None
    if plan.ratio == 1:
        groups = _single_groups(x, compressor, view.new, text)
    else:
        tokens, cache = view.extend_open_group(cache, plan.index, _gated_tokens(x, compressor))
        groups = _closed_groups(tokens, compressor, plan.ratio, view.new, text, context.policy)
    entries, index_keys = entries_and_index_keys(
        groups.latents, groups.numbers, params=params.index_key, ratio=plan.ratio, text=text
    )
    return view.write_entries(cache, plan.index, groups, entries, index_keys)


def _single_groups(x: jax.Array, params: Compressor, new: NewTokens, text: TextConfig) -> Groups:
    """At ratio 1 every token is a group."""
    latents = _token_latents(x, params=params, eps=text.rms_norm_eps)
    numbers = new.start[:, None] + jnp.arange(new.time, dtype=jnp.int32)
    return Groups(latents, numbers, jnp.arange(new.time) < new.lengths[:, None])


@rowwise
def _token_latents(x: jax.Array, *, params: Compressor, eps: float) -> jax.Array:
    """c = RMSNorm(W_kv x). [batch, time, hidden] -> [batch, time, head_dim]."""
    return rms_norm(linear(x, params.wkv), params.norm, eps)


def _gated_tokens(x: jax.Array, params: Compressor) -> OpenGroup:
    """κ = W_kv x and γ = W_gate x of the new tokens, fp32."""
    wide = x.astype(jnp.float32)
    return OpenGroup(matmul(wide, params.wkv), matmul(wide, params.wgate))


def _closed_groups(
    tokens: OpenGroup, params: Compressor, ratio: int, new: NewTokens, text: TextConfig, policy: PrecisionPolicy
) -> Groups:
    """The groups that end within the new tokens. tokens: the last ratio − 1 before the new ones, and the new ones."""
    batch, carried = len(new.start), ratio - 1
    count = (new.time + ratio - 1) // ratio
    numbers = new.start[:, None] // ratio + jnp.arange(count, dtype=jnp.int32)
    # Token of absolute position p stands at p − start + carried in the concatenation.
    members = (numbers * ratio - new.start[:, None] + carried)[..., None] + jnp.arange(ratio, dtype=jnp.int32)
    members = jnp.minimum(members, carried + new.time - 1).reshape(batch, count * ratio, 1)
    kv = jnp.take_along_axis(tokens.kv, members, axis=1).reshape(batch, count, ratio, -1)
    gate = jnp.take_along_axis(tokens.gate, members, axis=1).reshape(batch, count, ratio, -1)
    complete = (numbers + 1) * ratio <= (new.start + new.lengths)[:, None]
    return Groups(_pooled(gate, kv, norm=params.norm, eps=text.rms_norm_eps, policy=policy), numbers, complete)


@rowwise
def _pooled(gate: jax.Array, kv: jax.Array, *, norm: jax.Array, eps: float, policy: PrecisionPolicy) -> jax.Array:
    """c = RMSNorm(Σ_t softmax_t(γ)·κ). gate, kv: fp32 [batch, groups, ratio, head_dim] -> [batch, groups, head_dim]."""
    return rms_norm(policy.round(jnp.sum(jax.nn.softmax(gate, axis=2) * kv, axis=2)), norm, eps)


@rowwise
def entries_and_index_keys(
    latents: jax.Array, numbers: jax.Array, *, params: IndexKey, ratio: int, text: TextConfig
) -> tuple[jax.Array, jax.Array]:
    """Rotated latents and index keys, before their cache quantisers.

    The position of entry j is that of its first token, j·ratio; the index key comes from the unrotated latent.

    Args:
        latents: [batch, groups, head_dim].
        numbers: j of each. int32 [batch, groups].

    Returns:
        entries [batch, groups, head_dim], index keys [batch, groups, index_dim].
    """
    rope = rotation(text, numbers * ratio, compressed=True)
    index_keys = rms_norm(linear(latents, params.wk), params.k_norm, text.rms_norm_eps)
    return rotate(latents, rope), rotate(index_keys, rope)
