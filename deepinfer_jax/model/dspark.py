"""DSpark: the draft model that proposes a block of tokens (model.md §9)."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy.typing as npt
from flax import struct

from deepinfer_jax.arithmetic import arithmetic
from deepinfer_jax.cache import Cache, ring_positions
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.kernels.choice import KernelChoice
from deepinfer_jax.kernels.dot import matmul
from deepinfer_jax.kernels.quantized_linear import linear
from deepinfer_jax.kernels.rounding import round_to
from deepinfer_jax.kernels.rowwise import batch_invariant, rowwise
from deepinfer_jax.kernels.sparse_attention import sparse_attention
from deepinfer_jax.model.attention import Step, output_projection, query_projection, window_keys
from deepinfer_jax.model.block import block, initial_streams
from deepinfer_jax.model.checks import check_drafting
from deepinfer_jax.model.embedding import embed_tokens
from deepinfer_jax.model.hyper_connections import collapse
from deepinfer_jax.model.norm import rms_norm
from deepinfer_jax.model.probe import Probe
from deepinfer_jax.model.rope import rotation
from deepinfer_jax.params import Attention, Draft, Params


@struct.dataclass
class DraftOutput:
    """A block of drafts.

    Attributes:
        tokens: drafts for the positions after the given token. int32 [batch, block].
        logits: with the Markov term. float32 [batch, block, vocab].
        confidence: raw logit that each draft is accepted. float32 [batch, block].
    """

    tokens: jax.Array
    logits: jax.Array
    confidence: jax.Array


def tap(streams: jax.Array) -> jax.Array:
    """Mean of a layer's input streams (T20). [batch, time, streams, hidden] -> [batch, time, hidden]."""
    return round_to(jnp.mean(streams.astype(jnp.float32), axis=2), streams.dtype)


def store_context(taps: jax.Array, params: Draft, step: Step) -> None:
    """Writes the draft layers' context keys of the new tokens; the taps feed wkv without any hyper-connection (T20).

    taps: [batch, time, targets·hidden].
    """
    text, arith = step.text, step.arith

    def project(taps: jax.Array) -> jax.Array:
        projected = linear(taps, params.main_proj, quantize_input=arith.quantize_activations)
        return rms_norm(projected, params.main_norm, text.rms_norm_eps)

    context = rowwise(project, taps)
    for i, layer in enumerate(params.layers):
        keys = window_keys(context, layer.attn, step.rotations[False], text, arith)
        step.view.write_draft_window(i, keys)


def draft(
    params: Params,
    config: ModelConfig,
    cache: Cache,
    tokens: jax.Array | npt.NDArray[Any],
    *,
    precision: str = "reference",
    kernels: KernelChoice = KernelChoice(),  # noqa: B008 (frozen, so one shared default is safe)
) -> DraftOutput:
    """Drafts one block after each row's newest sampled token, greedily.

    The block is always `dspark_block_size` wide: another width changes its bidirectional context (T19). Position 0
    is conditioned on the given token, later ones on the drafted ids (T44).

    Args:
        cache: after the target's forward pass; the given token is not in it yet.
        tokens: newest sampled token of each row, at position `cache.lengths`. int [batch].
        kernels: as for `forward`.

    Raises:
        ValueError: the model has no draft layers, shapes or precisions do not fit.
    """
    tokens = check_drafting(params, config, cache, tokens, precision)
    return _draft(params, cache, tokens, config=config, precision=precision, kernels=kernels)


@functools.partial(jax.jit, static_argnames=("config", "precision", "kernels"))
def _draft(
    params: Params, cache: Cache, tokens: jax.Array, *, config: ModelConfig, precision: str, kernels: KernelChoice
) -> DraftOutput:
    with batch_invariant(kernels.batch_invariant):
        return _draft_block(params, cache, tokens, config, precision, kernels)


def _draft_block(
    params: Params, cache: Cache, tokens: jax.Array, config: ModelConfig, precision: str, kernels: KernelChoice
) -> DraftOutput:
    text, arith = config.text, arithmetic(config, precision)
    weights = params.draft
    assert weights is not None
    batch, width = tokens.shape[0], text.dspark_block_size
    noise = jnp.full((batch, width - 1), text.dspark_noise_token_id, jnp.int32)
    ids = jnp.concatenate([tokens[:, None], noise], axis=1)
    by = rotation(text, cache.lengths[:, None] + jnp.arange(width, dtype=jnp.int32), compressed=False)
    # Every query of the block sees the window that ends at the last context token a, and the whole block
    # (bidirectional): for visibility, the block stands at a.
    horizon = jnp.broadcast_to(cache.lengths[:, None] - 1, (batch, width))
    positions = jnp.concatenate([ring_positions(cache.lengths, text.sliding_window), horizon], axis=1)

    def attend(x: jax.Array, params: Attention, context: jax.Array) -> jax.Array:
        _, query = query_projection(x, params, by, text, arith)
        keys = jnp.concatenate([context, window_keys(x, params, by, text, arith)], axis=1)
        heads = sparse_attention(
            query,
            keys,
            positions,
            None,
            None,
            horizon,
            params.attn_sink,
            sliding_window=text.sliding_window,
            scale=text.head_dim**-0.5,
            round_probabilities=arith.is_low,
            choice=kernels,
        )
        return output_projection(heads, params, by, text, arith)

    streams, pre = initial_streams(embed_tokens(ids, params, arith), text)
    for i, layer in enumerate(weights.layers):
        with jax.named_scope(f"mtp.{i}"):
            streams, pre = block(
                streams,
                pre,
                layer,
                functools.partial(attend, params=layer.attn, context=cache.draft_windows[i]),
                name=f"mtp.{i}",
                experts_per_token=text.dspark_num_experts_per_tok,
                image_mask=None,
                valid=jnp.ones((batch, width), bool),
                text=text,
                arith=arith,
                probe=Probe((), ()),
                mesh=params.mesh,
            )
    final = rowwise(collapse, streams, pre)
    plain = matmul(rowwise(lambda rows: rms_norm(rows, weights.norm, text.rms_norm_eps), final), params.head)
    return _markov_chain(final, plain, tokens, weights)


def _markov_chain(final: jax.Array, plain: jax.Array, tokens: jax.Array, params: Draft) -> DraftOutput:
    """Adds the previous token's Markov term to each position's logits, picks, and goes on with the pick."""
    previous, drafts, logits, confidence = tokens, [], [], []
    for i in range(plain.shape[1]):
        embedded = jnp.take(params.markov_embed, previous, axis=0)
        logits.append(plain[:, i] + matmul(embedded, params.markov_head))
        features = jnp.concatenate([final[:, i].astype(jnp.float32), embedded.astype(jnp.float32)], axis=-1)
        confidence.append(matmul(features, params.confidence)[:, 0])
        previous = jnp.argmax(logits[-1], axis=-1).astype(jnp.int32)
        drafts.append(previous)
    return DraftOutput(jnp.stack(drafts, axis=1), jnp.stack(logits, axis=1), jnp.stack(confidence, axis=1))
