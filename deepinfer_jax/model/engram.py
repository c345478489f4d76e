"""Engram: n-gram memory read by hash and gated into the streams (model.md §7.3)."""

import jax
import jax.numpy as jnp
from jax import lax

from deepinfer_jax.config.model_config import TextConfig
from deepinfer_jax.config.precision import PrecisionPolicy
from deepinfer_jax.kernels.quantized_linear import dequantize, linear
from deepinfer_jax.kernels.rowwise import rowwise
from deepinfer_jax.tokenization.engram_hash import DEAD
from deepinfer_jax.weights.params import Engram

_GATE_FLOOR = 1e-6


@jax.named_scope("engram")
def compressed_ids(tokens: jax.Array, token_map: jax.Array, image_mask: jax.Array | None) -> jax.Array:
    """Compressed id of each token; DEAD at image tokens and at ids outside the map (T41). int32 [batch, time]."""
    size = token_map.shape[0]
    known = (tokens >= 0) & (tokens < size)
    if image_mask is not None:
        known = known & ~image_mask
    return jnp.where(known, token_map[jnp.clip(tokens, 0, size - 1)], DEAD)


@jax.named_scope("engram")
def engram(
    streams: jax.Array,
    rows: jax.Array,
    params: Engram,
    image_mask: jax.Array | None,
    text: TextConfig,
    policy: PrecisionPolicy,
) -> jax.Array:
    """Adds the gated memory to every stream; image tokens keep their streams.

    Args:
        streams: [batch, time, streams, hidden].
        rows: table rows. int32 [batch, time, (ngram - 1)·heads].
        image_mask: bool [batch, time], or None.
    """
    table = jax.tree.map(lambda leaf: jnp.take(leaf, rows, axis=0), params.embed)
    memory = dequantize(table, policy.dtype).astype(policy.dtype).reshape(*streams.shape[:2], -1)
    return _add_memory(streams, memory, image_mask, params=params, eps=text.rms_norm_eps, policy=policy)


@rowwise
def _add_memory(
    streams: jax.Array,
    memory: jax.Array,
    image_mask: jax.Array | None,
    *,
    params: Engram,
    eps: float,
    policy: PrecisionPolicy,
) -> jax.Array:
    """h_s + σ(±√|d_s|)·v, with d_s the product of stream and key, both normed. memory: [batch, time, rows·dim]."""
    batch, time, count, hidden = streams.shape
    projected = linear(memory, params.wkv, quantize_input=policy.quantize_activations).astype(jnp.float32)
    key = projected[..., : count * hidden].reshape(batch, time, count, hidden)
    value = projected[..., None, count * hidden :]
    h = streams.astype(jnp.float32)
    fused = params.q_weight.astype(jnp.float32) * params.k_weight.astype(jnp.float32)
    d = (
        jnp.sum(h * fused * key, axis=-1)
        * lax.rsqrt(jnp.mean(h * h, axis=-1) + eps)
        * lax.rsqrt(jnp.mean(key * key, axis=-1) + eps)
        * hidden**-0.5
    )
    gate = jax.nn.sigmoid(jnp.copysign(jnp.sqrt(jnp.maximum(jnp.abs(d), _GATE_FLOOR)), d))
    if image_mask is not None:
        gate = jnp.where(image_mask[..., None], 0, gate)
    return policy.round(h + gate[..., None] * value)
