"""Attention of one layer: projections, window, compressed branch, output projection (model.md §5)."""

import dataclasses

import jax
import jax.numpy as jnp

from deepinfer_jax.cache.view import WindowKeys
from deepinfer_jax.config.layer_plan import LayerPlan
from deepinfer_jax.config.model_config import TextConfig
from deepinfer_jax.config.precision import PrecisionPolicy
from deepinfer_jax.kernels.choice import KernelChoice
from deepinfer_jax.kernels.dot import batched_matmul
from deepinfer_jax.kernels.formats import fake_quant_fp8
from deepinfer_jax.kernels.quantized_linear import dequantize, linear
from deepinfer_jax.kernels.rowwise import rowwise
from deepinfer_jax.kernels.sparse_attention import Entries, sparse_attention
from deepinfer_jax.model.carry import Carry
from deepinfer_jax.model.compressor import store_entries
from deepinfer_jax.model.context import ForwardContext
from deepinfer_jax.model.indexer import pick_entries
from deepinfer_jax.model.norm import rms_norm
from deepinfer_jax.model.rope import Rotation, rotate
from deepinfer_jax.weights.params import Attention, Weight


def attention(
    x: jax.Array, carry: Carry, params: Attention, plan: LayerPlan, context: ForwardContext
) -> tuple[jax.Array, Carry]:
    """One backbone layer's attention.

    Args:
        x: normed collapse of the streams. [batch, time, hidden].

    Returns:
        [batch, time, hidden], and the carry with what the layer stored and picked.
    """
    text, policy = context.text, context.policy
    rope = context.rotations.compressed if plan.ratio > 0 else context.rotations.window
    latent, query = query_projection(x, rope, params=params, text=text, policy=policy)
    window, carry = _window(x, carry, rope, params, plan, context)
    entries: Entries | None = None
    picks: jax.Array | None = None
    if plan.kv_owner is not None:
        if plan.is_kv_source and not context.entries_are_stored:
            carry = dataclasses.replace(carry, cache=store_entries(x, carry.cache, params, plan, context))
        if plan.is_index_source:
            carry = pick_entries(latent, x, carry, params, plan, context)
        entries, picks = _picked(carry, plan.kv_owner, context)
    positions = context.view.new.positions
    heads = attend(query, window, entries, picks, positions, params.attn_sink, text, policy, context.kernels)
    return output_projection(heads, params, rope, text, policy), carry


@jax.named_scope("attention.query")
@rowwise
def query_projection(
    x: jax.Array, rope: Rotation, *, params: Attention, text: TextConfig, policy: PrecisionPolicy
) -> tuple[jax.Array, jax.Array]:
    """qr (normed q-lora vector) and q, rotated, without a norm per head (T2; model.md §5.1).

    x: [batch, time, hidden] -> [batch, time, q_lora], [batch, time, heads, head_dim].
    """
    quantize = policy.quantize_activations
    latent = rms_norm(linear(x, params.wq_a, quantize_input=quantize), params.q_norm, text.rms_norm_eps)
    query = linear(latent, params.wq_b, quantize_input=quantize)
    query = query.reshape(*x.shape[:2], text.num_attention_heads, text.head_dim)
    return latent, rotate(query, rope.heads())


@jax.named_scope("attention.window")
@rowwise
def window_keys(
    x: jax.Array, rope: Rotation, *, params: Attention, text: TextConfig, policy: PrecisionPolicy
) -> jax.Array:
    """Window KV (K = V, one head): projected, normed, rotated, FP8-quantised. [batch, time, head_dim]."""
    projected = linear(x, params.wkv, quantize_input=policy.quantize_activations)
    keys = rotate(rms_norm(projected, params.kv_norm, text.rms_norm_eps), rope)
    return fake_quant_fp8(keys) if policy.quantize_cache else keys


def _window(
    x: jax.Array, carry: Carry, rope: Rotation, params: Attention, plan: LayerPlan, context: ForwardContext
) -> tuple[WindowKeys, Carry]:
    """The window that the new tokens see, and the carry with their keys in it (model.md §5.10)."""
    keys = window_keys(x, rope, params=params, text=context.text, policy=context.policy)
    with jax.named_scope("attention.window"):
        window, cache = context.view.window(carry.cache, plan.index, keys)
        if context.kept_from is not None:
            visible = window.positions >= context.kept_from[:, None]
            window = window._replace(positions=jnp.where(visible, window.positions, -1))
    return window, dataclasses.replace(carry, cache=cache)


def _picked(carry: Carry, owner: int, context: ForwardContext) -> tuple[Entries | None, jax.Array | None]:
    """The entries of a KV source, and which of them each new token attends; None if no entry can exist yet."""
    entries, picks = context.view.compressed(carry.cache, owner).entries, carry.picks
    if picks is None or picks.shape[-1] == 0:
        return None, None
    if context.kernels.batch_invariant:
        # Otherwise the width of the picks, and with it the sums over them, would follow the size of the cache.
        missing = context.text.index_topk - picks.shape[-1]
        picks = jnp.pad(picks, [(0, 0), (0, 0), (0, missing)], constant_values=-1)
    return entries, picks


@jax.named_scope("attention.sparse")
def attend(
    query: jax.Array,
    window: WindowKeys,
    entries: Entries | None,
    picks: jax.Array | None,
    horizon: jax.Array,
    sink: jax.Array,
    text: TextConfig,
    policy: PrecisionPolicy,
    kernels: KernelChoice,
) -> jax.Array:
    """Softmax over window, picked entries and sink (model.md §5.3); arrays as of `sparse_attention`.

    horizon: position up to which each query sees, −1 for padding. int32 [batch, time].
    """
    return sparse_attention(
        query,
        window.keys,
        window.positions,
        entries,
        picks,
        horizon,
        sink,
        sliding_window=text.sliding_window,
        scale=text.head_dim**-0.5,
        round_probabilities=policy.is_low,
        banded=window.banded,
        choice=kernels,
    )


@jax.named_scope("attention.output")
def output_projection(
    heads: jax.Array, params: Attention, rope: Rotation, text: TextConfig, policy: PrecisionPolicy
) -> jax.Array:
    """De-rotates (T13), projects each group of heads with wo_a, then wo_b (model.md §5.4).

    heads: [batch, time, heads, head_dim] -> [batch, time, hidden].
    """
    wo_a = dequantize(params.wo_a, policy.dtype).reshape(text.o_groups, text.o_lora_rank, -1)
    return _project_heads(heads, rope, wo_a=wo_a, wo_b=params.wo_b, policy=policy)


@rowwise
def _project_heads(
    heads: jax.Array, rope: Rotation, *, wo_a: jax.Array, wo_b: Weight, policy: PrecisionPolicy
) -> jax.Array:
    """wo_a: [groups, o_lora, heads·head_dim / groups]; wo_b: [hidden, groups·o_lora]."""
    batch, time = heads.shape[:2]
    grouped = rotate(heads, rope.inverse().heads()).reshape(batch * time, len(wo_a), -1)
    # Groups lead: XLA:CPU cannot run a bf16 product whose batch axis is not the first (jax.md §1.3).
    latent = policy.round(jnp.swapaxes(batched_matmul(jnp.swapaxes(grouped, 0, 1), wo_a), 0, 1))
    return linear(latent.reshape(batch, time, -1), wo_b, quantize_input=policy.quantize_activations)
