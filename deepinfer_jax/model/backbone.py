"""Runs new tokens through all layers and into a cache of any kind: `hidden_states`, `layer` (model.md Appendix A)."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from deepinfer_jax.cache.view import View
from deepinfer_jax.config.layer_plan import LayerPlan, layer_plans
from deepinfer_jax.config.model_config import ModelConfig
from deepinfer_jax.config.precision import PrecisionPolicy
from deepinfer_jax.kernels.choice import KernelChoice
from deepinfer_jax.kernels.rowwise import batch_invariant, rowwise
from deepinfer_jax.model.attention import attention
from deepinfer_jax.model.block import block, initial_streams
from deepinfer_jax.model.bounded_replay import KeptRows, first_consumer, run_consumers
from deepinfer_jax.model.carry import Carry
from deepinfer_jax.model.context import ForwardContext
from deepinfer_jax.model.dspark import store_context, tap
from deepinfer_jax.model.embedding import TEXT_PLACE, embed_tokens, merge_images
from deepinfer_jax.model.engram import compressed_ids, engram
from deepinfer_jax.model.engram_hash import engram_rows
from deepinfer_jax.model.hyper_connections import collapse
from deepinfer_jax.model.norm import rms_norm
from deepinfer_jax.model.probe import Probe
from deepinfer_jax.weights.params import Layer, Params
from deepinfer_jax.weights.sharding import shard_rows


def hidden_states(
    params: Params,
    tokens: jax.Array,
    view: View[Any],
    cache: Any,
    config: ModelConfig,
    policy: PrecisionPolicy,
    probe: Probe,
    kernels: KernelChoice,
    *,
    places: jax.Array | None = None,
    features: jax.Array | None = None,
    kept: KeptRows | None = None,
) -> tuple[jax.Array, Carry]:
    """Runs the new tokens int32 [batch, time] of the view's rows through the model and into the cache.

    Args:
        cache: of the view's kind.
        places: where images are and what stands there (`embedding.py`), `TEXT_PLACE` at padding. int32 [batch, time];
            None: all is text.
        features: aligner rows [features, hidden] that places name; None: they name none.
        kept: bounded replay of consumer layers; None: the exact model.

    Returns:
        Normed final states, what the head reads, [batch, time, hidden]; those of padding mean nothing. Of kept rows
        they are min(time, keep) columns where mode is "compact", and each row's first `kept.lengths(view.new)` count;
        the probe must be empty then. And the carry behind the last layer, with the cache and what was captured.
    """
    with batch_invariant(kernels.batch_invariant):
        text, plans = config.text, layer_plans(config.text)
        image_mask = None if places is None else places != TEXT_PLACE
        embedded = embed_tokens(tokens, params, policy)
        if places is not None and params.vision is not None:
            embedded = merge_images(embedded, places, features, params.vision, policy)
        embedded, captured = probe.observe("embed", embedded)
        streams, pre = initial_streams(shard_rows(embedded, params.mesh), text)
        rows = None
        if params.token_map is not None:
            history, cache = view.extend_ngrams(cache, compressed_ids(tokens, params.token_map, image_mask))
            rows = engram_rows(history, params.token_map[text.engram_pad_token_id], text)
        context = ForwardContext.of(text, policy, view, probe, kernels, params.mesh, image_mask, rows)
        carry = Carry(pre=pre, cache=cache, captured=captured)

        first = first_consumer(text)
        if kept is None or first is None:
            return _run_to_the_end(streams, carry, context, params=params, plans=plans)
        streams, carry = _run_layers(streams, carry, context, params=params, plans=plans[:first])
        run_last = functools.partial(_run_to_the_end, params=params, plans=plans[first:])
        return run_consumers(streams, carry, params.layers[first], plans[first], context, kept, run_last)


def layer(
    streams: jax.Array, carry: Carry, params: Layer, plan: LayerPlan, context: ForwardContext
) -> tuple[jax.Array, Carry]:
    """One layer of the backbone. streams: [batch, time, streams, hidden]."""
    name, probe = f"layers.{plan.index}", context.probe
    if plan.engram is not None and params.engram is not None and context.engram_rows is not None:
        rows, carry = probe(f"{name}.engram.rows", context.engram_rows[:, :, plan.engram], carry)
        streams = engram(streams, rows, params.engram, context.image_mask, context.text, context.policy)
        streams, carry = probe(f"{name}.engram.streams", streams, carry)
    if plan.tap:
        carry = dataclasses.replace(carry, taps={**carry.taps, plan.index: tap(streams)})
    return block(
        streams,
        carry,
        params,
        functools.partial(attention, params=params.attn, plan=plan, context=context),
        name=name,
        experts_per_token=context.text.num_experts_per_tok,
        image_mask=context.image_mask,
        valid=context.view.new.positions >= 0,
        text=context.text,
        policy=context.policy,
        probe=probe,
        mesh=context.mesh,
        kernels=context.kernels,
    )


def _run_layers(
    streams: jax.Array, carry: Carry, context: ForwardContext, *, params: Params, plans: tuple[LayerPlan, ...]
) -> tuple[jax.Array, Carry]:
    """Streams and carry behind some of the layers; the drafts' context is stored if they have tapped the streams."""
    for plan in plans:
        with jax.named_scope(f"layers.{plan.index}"):
            streams, carry = layer(streams, carry, params.layers[plan.index], plan, context)
    if carry.taps and params.draft is not None:
        in_order = [carry.taps[index] for index in context.text.dspark_target_layer_ids]
        taps, carry = context.probe("taps", jnp.concatenate(in_order, axis=-1), carry)
        cache = store_context(taps, carry.cache, params.draft, context)
        carry = dataclasses.replace(carry, cache=cache, taps={})
    return streams, carry


def _run_to_the_end(
    streams: jax.Array, carry: Carry, context: ForwardContext, *, params: Params, plans: tuple[LayerPlan, ...]
) -> tuple[jax.Array, Carry]:
    """What the head reads, [batch, time, hidden], and the carry, behind the last of the layers."""
    streams, carry = _run_layers(streams, carry, context, params=params, plans=plans)
    hidden = _final_norm(streams, carry.pre, weight=params.norm, eps=context.text.rms_norm_eps)
    return context.probe("final_norm", hidden, carry)


@jax.named_scope("head")
@rowwise
def _final_norm(streams: jax.Array, pre: jax.Array, *, weight: jax.Array, eps: float) -> jax.Array:
    return rms_norm(collapse(streams, pre), weight, eps)
