"""Hyper-connections: four residual streams mixed around each sublayer, single pass (model.md §4)."""

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from deepinfer_jax.config.model_config import TextConfig
from deepinfer_jax.kernels.dot import matmul
from deepinfer_jax.kernels.rounding import round_to
from deepinfer_jax.kernels.rowwise import rowwise
from deepinfer_jax.model.norm import rms_norm
from deepinfer_jax.weights.params import HyperConnection


@struct.dataclass
class Mix:
    """Coefficients of one sublayer.

    Attributes:
        pre: collapse weights for the *next* sublayer (T3). float32 [batch, time, streams].
        post: how the sublayer's output enters each stream. float32 [batch, time, streams].
        comb: how stream j (first index) goes over into stream k (T4). float32 [batch, time, streams, streams].
    """

    pre: jax.Array
    post: jax.Array
    comb: jax.Array


def mix_coefficients(streams: jax.Array, params: HyperConnection, text: TextConfig) -> Mix:
    """pre, post and the doubly normalised comb of one sublayer. streams: [batch, time, streams, hidden]."""
    batch, time, count, hidden = streams.shape
    v = streams.reshape(batch, time, count * hidden).astype(jnp.float32)
    m = matmul(v, params.fn) * lax.rsqrt(jnp.mean(v * v, axis=-1, keepdims=True) + text.rms_norm_eps)
    scale, base = params.scale, params.base
    pre = jax.nn.sigmoid(m[..., :count] * scale[0] + base[:count]) + text.hc_eps
    post = 2.0 * jax.nn.sigmoid(m[..., count : 2 * count] * scale[1] + base[count : 2 * count])
    logits = m[..., 2 * count :] * scale[2] + base[2 * count :]
    comb = sinkhorn(logits.reshape(batch, time, count, count), text.hc_sinkhorn_iters, text.hc_eps)
    return Mix(pre, post, comb)


def sinkhorn(logits: jax.Array, iterations: int, eps: float) -> jax.Array:
    """Row softmax, then alternating column and row normalisation; the first column pass counts as iteration 1.

    logits: float32 [..., rows, columns].
    """

    def columns(c: jax.Array) -> jax.Array:
        return c / (jnp.sum(c, axis=-2, keepdims=True) + eps)

    def rows_then_columns(c: jax.Array, _: None) -> tuple[jax.Array, None]:
        return columns(c / (jnp.sum(c, axis=-1, keepdims=True) + eps)), None

    first = columns(jax.nn.softmax(logits, axis=-1) + eps)
    return lax.scan(rows_then_columns, first, None, length=iterations - 1)[0]


@rowwise
def collapse(streams: jax.Array, pre: jax.Array) -> jax.Array:
    """x = Σ_s pre_s·h_s, rounded. [batch, time, streams, hidden] -> [batch, time, hidden]."""
    return round_to(jnp.sum(pre[..., None] * streams.astype(jnp.float32), axis=-2), streams.dtype)


@jax.named_scope("hc_mix")
@rowwise
def enter_sublayer(
    streams: jax.Array, pre: jax.Array, *, params: HyperConnection, norm: jax.Array, text: TextConfig
) -> tuple[Mix, jax.Array]:
    """A sublayer's own mix, and its normed input [batch, time, hidden], collapsed with the one before's pre (T3).

    streams: [batch, time, streams, hidden]; pre: float32 [batch, time, streams].
    """
    mix = mix_coefficients(streams, params, text)
    return mix, rms_norm(collapse(streams, pre), norm, text.rms_norm_eps)


@jax.named_scope("hc_mix")
@rowwise
def expand(output: jax.Array, streams: jax.Array, mix: Mix) -> jax.Array:
    """h'_k = post_k·y + Σ_j comb[j, k]·h_j, rounded. output: [batch, time, hidden]."""
    wide = streams.astype(jnp.float32)
    carried = jnp.sum(mix.comb[..., None] * wide[..., :, None, :], axis=-3)
    return round_to(mix.post[..., None] * output.astype(jnp.float32)[..., None, :] + carried, streams.dtype)
