"""The one forward pass (model.md Appendix A) and its public entry (design.md §4)."""

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy.typing as npt
from flax import struct

from deepinfer_jax.cache.dense import Cache, CacheView, View, init_cache
from deepinfer_jax.config.layer_plan import LayerPlan, layer_plans
from deepinfer_jax.config.model_config import ModelConfig
from deepinfer_jax.config.precision import PrecisionPolicy, precision_policy
from deepinfer_jax.kernels.choice import KernelChoice
from deepinfer_jax.kernels.dot import matmul
from deepinfer_jax.kernels.rowwise import batch_invariant, rowwise
from deepinfer_jax.model.attention import ForwardContext, attention
from deepinfer_jax.model.block import block, initial_streams
from deepinfer_jax.model.bounded_replay import KeptRows, first_consumer, run_consumers
from deepinfer_jax.model.checks import check_inputs
from deepinfer_jax.model.dspark import store_context, tap
from deepinfer_jax.model.embedding import TEXT_PLACE, embed_tokens, merge_images, places_of
from deepinfer_jax.model.engram import compressed_ids, engram
from deepinfer_jax.model.engram_hash import engram_rows
from deepinfer_jax.model.hyper_connections import collapse
from deepinfer_jax.model.norm import rms_norm
from deepinfer_jax.model.probe import Edit, Probe, resolve_captures, resolve_edits
from deepinfer_jax.weights.params import Params
from deepinfer_jax.weights.sharding import shard_rows

IntArray = jax.Array | npt.NDArray[Any]


@struct.dataclass
class ForwardOutput:
    """Result of `forward`.

    Attributes:
        logits: float32 [batch, time, vocab]; None with return_logits=False.
        hidden: normed final states, what the head reads. [batch, time, hidden].
        cache: the cache after these tokens; None when none was given.
        captured: the captured tensors by name, each [batch, time, ...].
    """

    logits: jax.Array | None
    hidden: jax.Array
    cache: Cache | None
    captured: dict[str, jax.Array]


def forward(
    params: Params,
    config: ModelConfig,
    tokens: IntArray,
    *,
    cache: Cache | None = None,
    lengths: IntArray | None = None,
    token_types: IntArray | None = None,
    image_embeds: jax.Array | None = None,
    precision: str = "reference",
    capture: Iterable[str] = (),
    edit: Mapping[str, Edit] | None = None,
    return_logits: bool = True,
    kernels: KernelChoice = KernelChoice(),  # noqa: B008 (frozen, so one shared default is safe)
) -> ForwardOutput:
    """The exact model on a batch of token rows. Pure, jittable, differentiable; runs on any backend.

    Called eagerly it checks its inputs and runs an internally jitted body; under an outer `jax.jit` it nests and
    checks shapes and dtypes only.

    Args:
        params: from `load_params` or `init_params`, in the same precision. With Engram layers they hold one integer
            array (`token_map`): `jax.grad(..., allow_int=True)` differentiates the whole tree.
        config: the model.
        tokens: any integer dtype [batch, time].
        cache: continue after what it holds (each row has its own length); None starts at position 0.
        lengths: tokens of each row, the rest is padding on the right. int [batch]; None: all of them.
        token_types: roles, −1 text, 0 image start, 1 image, 2 new line, 3 image end. int [batch, time]; None: text.
        image_embeds: aligner rows [features, hidden] for the image positions in batch-major order.
        precision: "reference", "bf16", "float32" or "float32_exact" (design.md §4).
        capture: names or `*` patterns of tensors to return (`model.probe.capture_names` lists them).
        edit: name or pattern -> function of one array; its result takes the tensor's place. The function is static:
            another function object, be it the same lambda made again, compiles another program. To vary numbers
            inside it, close over traced arrays under an outer `jax.jit`, `jax.vmap` or `jax.grad`.
        return_logits: False leaves the head out.
        kernels: implementation of each kernel, e.g. `KernelChoice.for_devices(jax.devices())`; the default is plain
            XLA, which is differentiable and runs on meshes. With `batch_invariant` a row's results and its cached
            state have the same bits for any batch, chunks and cache length.

    Returns:
        `ForwardOutput`. Logits at padding positions mean nothing. Under tracing, rows that overflow the cache have
        NaN logits and hidden states.

    Raises:
        ValueError: wrong shape or dtype, an id or role out of range, a precision other than that of params or cache,
            an unknown capture or edit name, a cache that would overflow, image data that do not fit.
    """
    captures = resolve_captures(config, capture)
    edits = resolve_edits(config, edit)
    tokens, lengths, token_types = check_inputs(
        params, config, tokens, cache, lengths, token_types, image_embeds, precision
    )
    return _forward(
        params,
        tokens,
        cache,
        lengths,
        token_types,
        image_embeds,
        config=config,
        precision=precision,
        captures=captures,
        edits=edits,
        return_logits=return_logits,
        kernels=kernels,
    )


def compute_logits(
    params: Params,
    hidden: jax.Array,
    kernels: KernelChoice = KernelChoice(),  # noqa: B008 (frozen, so one shared default is safe)
) -> jax.Array:
    """The head on normed final states (model.md §11). [..., hidden] -> float32 [..., vocab]."""
    with batch_invariant(kernels.batch_invariant):
        return matmul(hidden, params.head)


@functools.partial(jax.jit, static_argnames=("config", "precision", "captures", "edits", "return_logits", "kernels"))
def _forward(
    params: Params,
    tokens: jax.Array,
    cache: Cache | None,
    lengths: jax.Array | None,
    token_types: jax.Array | None,
    image_embeds: jax.Array | None,
    *,
    config: ModelConfig,
    precision: str,
    captures: tuple[str, ...],
    edits: tuple[tuple[str, Edit], ...],
    return_logits: bool,
    kernels: KernelChoice,
) -> ForwardOutput:
    batch, time = tokens.shape
    policy = precision_policy(config, precision)
    lengths = jnp.full(batch, time, jnp.int32) if lengths is None else lengths
    before = init_cache(config, batch, time, precision=precision) if cache is None else cache
    view = CacheView(before, lengths, time, config, policy, in_order=kernels.batch_invariant)
    probe = Probe(captures, edits)
    places = None if token_types is None else places_of(jnp.where(view.positions >= 0, token_types, -1))
    hidden = hidden_states(params, tokens, view, config, policy, probe, kernels, places=places, features=image_embeds)
    overflow = (view.start + lengths > before.max_length)[:, None, None]
    hidden = jnp.where(overflow, jnp.nan, hidden)
    logits = compute_logits(params, hidden, kernels) if return_logits else None
    return ForwardOutput(logits, hidden, None if cache is None else view.finish(), probe.captured)


def hidden_states(
    params: Params,
    tokens: jax.Array,
    view: View,
    config: ModelConfig,
    policy: PrecisionPolicy,
    probe: Probe,
    kernels: KernelChoice,
    *,
    places: jax.Array | None = None,
    features: jax.Array | None = None,
    kept: KeptRows | None = None,
) -> jax.Array:
    """Runs the new tokens int32 [batch, time] of the view's rows through the model and into the view's cache.

    Args:
        places: where images are and what stands there (`embedding.py`), `TEXT_PLACE` at padding. int32 [batch, time];
            None: all is text.
        features: aligner rows [features, hidden] that places name; None: they name none.
        kept: bounded replay of consumer layers; None: the exact model.

    Returns normed final states, what the head reads, [batch, time, hidden]; those of padding mean nothing. Of kept rows
    they are min(time, keep) columns where mode is "compact", and each row's first `kept.lengths(view)` count. The
    probe must be empty then.
    """
    with batch_invariant(kernels.batch_invariant):
        text = config.text
        image_mask = None if places is None else places != TEXT_PLACE
        embedded = embed_tokens(tokens, params, policy)
        if places is not None and params.vision is not None:
            embedded = merge_images(embedded, places, features, params.vision, policy)
        streams, pre = initial_streams(shard_rows(probe("embed", embedded), params.mesh), text)
        rows = None
        if params.token_map is not None:
            history = view.extend_ngrams(compressed_ids(tokens, params.token_map, image_mask))
            rows = engram_rows(history, params.token_map[text.engram_pad_token_id], text)

        step = ForwardContext.start(text, policy, view, probe, kernels)
        run = functools.partial(_run_layers, engram_rows=rows, params=params)
        plans, first = layer_plans(text), first_consumer(text)
        if kept is None or first is None:
            return _final_norm(*run(plans, streams, pre, image_mask, step), params, step)

        def run_last(
            streams: jax.Array, pre: jax.Array, image_mask: jax.Array | None, step: ForwardContext
        ) -> jax.Array:
            return _final_norm(*run(plans[first:], streams, pre, image_mask, step), params, step)

        streams, pre = run(plans[:first], streams, pre, image_mask, step)
        return run_consumers(streams, pre, image_mask, params.layers[first], plans[first], step, kept, run_last)


def _run_layers(
    plans: tuple[LayerPlan, ...],
    streams: jax.Array,
    pre: jax.Array,
    image_mask: jax.Array | None,
    step: ForwardContext,
    *,
    engram_rows: jax.Array | None,
    params: Params,
) -> tuple[jax.Array, jax.Array]:
    """Streams and pre after some of the layers; the drafts' context is stored if their target layers are among them."""
    text, policy, probe = step.text, step.policy, step.probe
    taps: dict[int, jax.Array] = {}
    for plan in plans:
        name, layer = f"layers.{plan.index}", params.layers[plan.index]
        with jax.named_scope(name):
            if plan.engram is not None and layer.engram is not None and engram_rows is not None:
                layer_rows = probe(f"{name}.engram.rows", engram_rows[:, :, plan.engram])
                streams = engram(streams, layer_rows, layer.engram, image_mask, text, policy)
                streams = probe(f"{name}.engram.streams", streams)
            if plan.tap:
                taps[plan.index] = rowwise(tap, streams)
            streams, pre = block(
                streams,
                pre,
                layer,
                functools.partial(attention, params=layer.attn, plan=plan, step=step),
                name=name,
                experts_per_token=text.num_experts_per_tok,
                image_mask=image_mask,
                valid=step.view.positions >= 0,
                text=text,
                policy=policy,
                probe=probe,
                mesh=params.mesh,
                kernels=step.kernels,
            )
    if taps and params.draft is not None:
        gathered = probe("taps", jnp.concatenate([taps[i] for i in text.dspark_target_layer_ids], axis=-1))
        store_context(gathered, params.draft, step)
    return streams, pre


def _final_norm(streams: jax.Array, pre: jax.Array, params: Params, step: ForwardContext) -> jax.Array:
    """What the head reads, [batch, time, hidden]."""

    def normed(streams: jax.Array, pre: jax.Array) -> jax.Array:
        return rms_norm(collapse(streams, pre), params.norm, step.text.rms_norm_eps)

    return step.probe("final_norm", rowwise(normed, streams, pre))
