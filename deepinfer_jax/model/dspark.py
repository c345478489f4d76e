"""DSpark: the draft model that proposes a block of tokens (model.md §9)."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy.typing as npt
from flax import struct

from deepinfer_jax.cache.dense import Cache
from deepinfer_jax.cache.rings import ring_positions
from deepinfer_jax.cache.view import WindowKeys
from deepinfer_jax.config.model_config import ModelConfig, TextConfig
from deepinfer_jax.config.precision import PrecisionPolicy, precision_policy
from deepinfer_jax.kernels.choice import KernelChoice
from deepinfer_jax.kernels.dot import matmul
from deepinfer_jax.kernels.quantized_linear import linear
from deepinfer_jax.kernels.rounding import round_to
from deepinfer_jax.kernels.rowwise import batch_invariant, rowwise
from deepinfer_jax.model.attention import attend, output_projection, query_projection, window_keys
from deepinfer_jax.model.block import block, initial_streams
from deepinfer_jax.model.carry import Carry
from deepinfer_jax.model.checks import check_drafting
from deepinfer_jax.model.context import ForwardContext
from deepinfer_jax.model.embedding import embed_tokens
from deepinfer_jax.model.hyper_connections import collapse
from deepinfer_jax.model.norm import rms_norm
from deepinfer_jax.model.probe import Probe
from deepinfer_jax.model.rope import rotation
from deepinfer_jax.weights.params import Attention, Draft, Params


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


@rowwise
def tap(streams: jax.Array) -> jax.Array:
    """Mean of a layer's input streams (T20). [batch, time, streams, hidden] -> [batch, time, hidden]."""
    return round_to(jnp.mean(streams.astype(jnp.float32), axis=2), streams.dtype)


@jax.named_scope("draft")
def store_context(taps: jax.Array, cache: Any, params: Draft, context: ForwardContext) -> Any:
    """The cache with the draft layers' context keys of the new tokens; the taps feed wkv without any hyper-connection
    (T20).

    taps: [batch, time, targets·hidden].
    """
    text, policy = context.text, context.policy
    x = _project_taps(taps, params=params, eps=text.rms_norm_eps, policy=policy)
    for i, layer in enumerate(params.layers):
        keys = window_keys(x, context.rotations.window, params=layer.attn, text=text, policy=policy)
        cache = context.view.write_draft_window(cache, i, keys)
    return cache


@rowwise
def _project_taps(taps: jax.Array, *, params: Draft, eps: float, policy: PrecisionPolicy) -> jax.Array:
    """[batch, time, targets·hidden] -> [batch, time, hidden]."""
    return rms_norm(linear(taps, params.main_proj, quantize_input=policy.quantize_activations), params.main_norm, eps)


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
    context = DraftContext(
        keys=cache.draft_windows,
        positions=ring_positions(cache.lengths, config.text.sliding_window),
        lengths=cache.lengths,
    )

    def pick(number: int, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), logits

    width = config.text.dspark_block_size
    return DraftOutput(*draft_block(params, context, tokens, pick, width, config, precision, kernels))


class DraftContext(NamedTuple):
    """What the draft layers remember of each row's text.

    Attributes:
        keys: per draft layer, context keys of the last sliding_window tokens in any order. [batch, keys, head_dim].
        positions: of these keys, negative where there is none. int32 [batch, keys].
        lengths: tokens of each row; 0: nothing is drafted for it. int32 [batch].
    """

    keys: Sequence[jax.Array]
    positions: jax.Array
    lengths: jax.Array


Pick = Callable[[int, jax.Array], tuple[jax.Array, jax.Array]]
"""(number of the draft, its logits float32 [batch, vocab]) -> the draft int32 [batch], what is to be kept beside it."""


@jax.named_scope("draft")
def draft_block(
    params: Params,
    context: DraftContext,
    tokens: jax.Array,
    pick: Pick,
    count: int,
    config: ModelConfig,
    precision: str,
    kernels: KernelChoice,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The first drafts after each row's newest token; see `draft`.

    Args:
        tokens: at position `context.lengths`, not in the context. int32 [batch].
        pick: chooses the drafts, one after another.
        count: drafts that are wanted, at most `dspark_block_size`; the block has that width whatever is wanted.

    Returns:
        drafts int32 [batch, count], what `pick` gave beside them [batch, count, ...], confidences float32
        [batch, count].
    """
    with batch_invariant(kernels.batch_invariant):
        final = _final_streams(params, context, tokens, config, precision_policy(config, precision), kernels)
        return _markov_chain(final[:, :count], tokens, params, pick, config.text)


def _final_streams(
    params: Params,
    context: DraftContext,
    tokens: jax.Array,
    config: ModelConfig,
    policy: PrecisionPolicy,
    kernels: KernelChoice,
) -> jax.Array:
    """The collapsed streams behind the last draft layer, [batch, block, hidden]."""
    text, weights, lengths = config.text, params.draft, context.lengths
    assert weights is not None
    batch, width = tokens.shape[0], text.dspark_block_size
    noise = jnp.full((batch, width - 1), text.dspark_noise_token_id, jnp.int32)
    ids = jnp.concatenate([tokens[:, None], noise], axis=1)
    rope = rotation(text, lengths[:, None] + jnp.arange(width, dtype=jnp.int32), compressed=False)
    # Every query of the block sees the window that ends at the last context token a, and the whole block
    # (bidirectional): for visibility, the block stands at a.
    horizon = jnp.broadcast_to(lengths[:, None] - 1, (batch, width))
    positions = jnp.concatenate([context.positions, horizon], axis=1)

    def attend_block(x: jax.Array, carry: Carry, params: Attention, before: jax.Array) -> tuple[jax.Array, Carry]:
        _, query = query_projection(x, rope, params=params, text=text, policy=policy)
        own = window_keys(x, rope, params=params, text=text, policy=policy)
        seen = WindowKeys(jnp.concatenate([before, own], axis=1), positions, banded=False)
        heads = attend(query, seen, None, None, horizon, params.attn_sink, text, policy, kernels)
        return output_projection(heads, params, rope, text, policy), carry

    streams, pre = initial_streams(embed_tokens(ids, params, policy), text)
    carry = Carry(pre=pre)
    for i, layer in enumerate(weights.layers):
        with jax.named_scope(f"mtp.{i}"):
            streams, carry = block(
                streams,
                carry,
                layer,
                functools.partial(attend_block, params=layer.attn, before=context.keys[i]),
                name=f"mtp.{i}",
                experts_per_token=text.dspark_num_experts_per_tok,
                image_mask=None,
                valid=jnp.broadcast_to(lengths[:, None] > 0, (batch, width)),
                text=text,
                policy=policy,
                probe=Probe(),
                mesh=params.mesh,
                kernels=kernels,
            )
    return collapse(streams, carry.pre)


def _markov_chain(
    final: jax.Array, tokens: jax.Array, params: Params, pick: Pick, text: TextConfig
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Adds the previous token's Markov term to each position's logits, picks, and goes on with the pick."""
    weights = params.draft
    assert weights is not None
    plain = matmul(rowwise(rms_norm)(final, weight=weights.norm, eps=text.rms_norm_eps), params.head)
    previous, drafts, kept, confidence = tokens, [], [], []
    for i in range(plain.shape[1]):
        embedded = jnp.take(weights.markov_embed, previous, axis=0)
        features = jnp.concatenate([final[:, i].astype(jnp.float32), embedded.astype(jnp.float32)], axis=-1)
        confidence.append(matmul(features, weights.confidence)[:, 0])
        previous, own = pick(i, plain[:, i] + matmul(embedded, weights.markov_head))
        drafts.append(previous)
        kept.append(own)
    return jnp.stack(drafts, axis=1), jnp.stack(kept, axis=1), jnp.stack(confidence, axis=1)
