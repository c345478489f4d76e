"""Attention of one layer: projections, window, compressed branch, output projection (model.md §5)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from deepinfer_jax.cache.dense import View
from deepinfer_jax.config.layer_plan import LayerPlan
from deepinfer_jax.config.model_config import TextConfig
from deepinfer_jax.config.precision import PrecisionPolicy
from deepinfer_jax.kernels.choice import KernelChoice
from deepinfer_jax.kernels.dot import batched_matmul
from deepinfer_jax.kernels.formats import fake_quant_fp8
from deepinfer_jax.kernels.quantized_linear import dequantize, linear
from deepinfer_jax.kernels.rowwise import rowwise
from deepinfer_jax.kernels.sparse_attention import Entries, sparse_attention
from deepinfer_jax.kernels.tiling import map_time
from deepinfer_jax.model.compressor import compress, entries_and_index_keys
from deepinfer_jax.model.indexer import (
    candidate_blocks,
    entries_of_blocks,
    index_query,
    index_scores,
    pick,
    score_rows,
)
from deepinfer_jax.model.norm import rms_norm
from deepinfer_jax.model.probe import Probe
from deepinfer_jax.model.rope import Rotation, rotate, rotation
from deepinfer_jax.weights.params import Attention


@dataclasses.dataclass
class LayerCarry:
    """What earlier layers of one forward pass left for later ones (model.md §5.8).

    Attributes:
        picks: entries chosen by the last index source. int32 [batch, time, k].
        candidates: the candidate blocks, bool [batch, time, blocks]; while they are captured or edited, the entries
            inside them, bool [batch, time, entries].
    """

    picks: jax.Array | None = None
    candidates: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class ForwardContext:
    """What every layer of one forward pass shares.

    Attributes:
        view: the cache.
        rotations: of the new tokens, for ratio-0 layers and for compressed layers.
        published: picks and candidates so far.
        probe: captures and edits.
        kernels: which implementation of each kernel runs.
        kept_from: first position that windows may show under bounded replay; None: any. int32 [batch].
        entries_are_stored: the KV source among the layers to come has stored its entries already.
    """

    text: TextConfig
    policy: PrecisionPolicy
    view: View
    rotations: dict[bool, Rotation]
    published: LayerCarry
    probe: Probe
    kernels: KernelChoice
    kept_from: jax.Array | None = None
    entries_are_stored: bool = False

    @classmethod
    def start(
        cls, text: TextConfig, policy: PrecisionPolicy, view: View, probe: Probe, kernels: KernelChoice
    ) -> "ForwardContext":
        rotations = {kind: rotation(text, view.positions, compressed=kind) for kind in (False, True)}
        return cls(text, policy, view, rotations, LayerCarry(), probe, kernels)


def query_projection(
    x: jax.Array, params: Attention, rope: Rotation, text: TextConfig, policy: PrecisionPolicy
) -> tuple[jax.Array, jax.Array]:
    """qr (normed q-lora vector) [batch, time, q_lora] and q [batch, time, heads, head_dim], rotated; no per-head
    norm (T2)."""
    quantize = policy.quantize_activations

    def project(x: jax.Array, rope: Rotation) -> tuple[jax.Array, jax.Array]:
        latent = rms_norm(linear(x, params.wq_a, quantize_input=quantize), params.q_norm, text.rms_norm_eps)
        query = linear(latent, params.wq_b, quantize_input=quantize)
        query = query.reshape(*x.shape[:2], text.num_attention_heads, text.head_dim)
        return latent, rotate(query, rope.heads())

    return rowwise(project, x, rope)


def window_keys(
    x: jax.Array, params: Attention, rope: Rotation, text: TextConfig, policy: PrecisionPolicy
) -> jax.Array:
    """Window KV (K = V, one head): projected, normed, rotated, FP8-quantised. [batch, time, head_dim]."""

    def project(x: jax.Array, rope: Rotation) -> jax.Array:
        projected = linear(x, params.wkv, quantize_input=policy.quantize_activations)
        keys = rotate(rms_norm(projected, params.kv_norm, text.rms_norm_eps), rope)
        return fake_quant_fp8(keys) if policy.quantize_cache else keys

    return rowwise(project, x, rope)


def output_projection(
    heads: jax.Array, params: Attention, rope: Rotation, text: TextConfig, policy: PrecisionPolicy
) -> jax.Array:
    """De-rotates (T13), projects each group of heads with wo_a, then wo_b (model.md §5.4).

    heads: [batch, time, heads, head_dim] -> [batch, time, hidden].
    """
    wo_a = dequantize(params.wo_a, policy.dtype).reshape(text.o_groups, text.o_lora_rank, -1)

    def project(heads: jax.Array, rope: Rotation) -> jax.Array:
        batch, time = heads.shape[:2]
        grouped = rotate(heads, rope.inverse().heads()).reshape(batch * time, text.o_groups, -1)
        # Groups lead: XLA:CPU cannot run a bf16 product whose batch axis is not the first (jax.md §1.3).
        latent = policy.round(jnp.swapaxes(batched_matmul(jnp.swapaxes(grouped, 0, 1), wo_a), 0, 1))
        return linear(latent.reshape(batch, time, -1), params.wo_b, quantize_input=policy.quantize_activations)

    return rowwise(project, heads, rope)


def attention(x: jax.Array, params: Attention, plan: LayerPlan, step: ForwardContext) -> jax.Array:
    """One backbone layer's attention.

    Args:
        x: normed collapse of the streams. [batch, time, hidden].

    Returns:
        [batch, time, hidden].
    """
    text, policy, view = step.text, step.policy, step.view
    rope = step.rotations[plan.ratio > 0]
    latent, query = query_projection(x, params, rope, text, policy)
    keys, positions, banded = view.window(plan.index, window_keys(x, params, rope, text, policy))
    if step.kept_from is not None:
        positions = jnp.where(positions >= step.kept_from[:, None], positions, -1)
    entries: Entries | None = None
    picks: jax.Array | None = None
    if plan.kv_owner is not None:
        if plan.is_kv_source and not step.entries_are_stored:
            store_entries(x, params, plan, step)
        if plan.is_index_source:
            _publish_picks(latent, x, params, plan, step)
        entries, picks = view.entries(plan.kv_owner), step.published.picks
        if picks is None or picks.shape[-1] == 0:
            entries = picks = None  # no entry can exist yet
        elif step.kernels.batch_invariant:
            # Otherwise the width of the picks, and with it the sums over them, would follow the size of the cache.
            missing = text.index_topk - picks.shape[-1]
            picks = jnp.pad(picks, [(0, 0), (0, 0), (0, missing)], constant_values=-1)
    heads = sparse_attention(
        query,
        keys,
        positions,
        entries,
        picks,
        view.positions,
        params.attn_sink,
        sliding_window=text.sliding_window,
        scale=text.head_dim**-0.5,
        round_probabilities=policy.is_low,
        banded=banded,
        choice=step.kernels,
    )
    return output_projection(heads, params, rope, text, policy)


def store_entries(x: jax.Array, params: Attention, plan: LayerPlan, step: ForwardContext) -> None:
    """Compresses a KV source's normed input [batch, time, hidden] into entries and index keys."""
    view = step.view
    assert params.compressor is not None and params.index_key is not None
    groups = compress(
        x,
        params.compressor,
        plan.ratio,
        view.start,
        view.lengths,
        functools.partial(view.extend_open_group, plan.index),
        step.text,
        step.policy,
    )
    entries, index_keys = entries_and_index_keys(groups, params.index_key, plan.ratio, step.text)
    view.write_entries(plan.index, groups, entries, index_keys)


def _publish_picks(latent: jax.Array, x: jax.Array, params: Attention, plan: LayerPlan, step: ForwardContext) -> None:
    """Picks, and candidates of the layer that chooses them, some query rows at a time: the scores of all rows with all
    entries of a long context exist only where they are captured or edited."""
    assert params.indexer is not None and plan.kv_owner is not None
    text, probe, published = step.text, step.probe, step.published
    name = f"layers.{plan.index}.attention"
    names = f"{name}.index_scores", f"{name}.candidates"
    visible = jnp.maximum(step.view.positions + 1, 0) // plan.ratio  # entries whose last token is not later
    index_keys = step.view.index_keys(plan.kv_owner)
    entries = index_keys.count
    query, weights = index_query(latent, x, params.indexer, step.rotations[True], text, step.policy)

    def choose(
        query: jax.Array, weights: jax.Array, visible: jax.Array, candidates: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None]:
        scores = index_scores(query, weights, index_keys, visible, step.policy)
        if candidates is not None:
            if candidates.shape[-1] != entries:
                candidates = entries_of_blocks(candidates, entries, text)
            scores = jnp.where(candidates, scores, -jnp.inf)
        scores = probe(names[0], scores)
        chosen = None
        if plan.is_candidate_source:
            chosen = candidate_blocks(scores, visible, text)
            if probe.watches(names[1]):
                chosen = probe(names[1], entries_of_blocks(chosen, entries, text))
        if entries <= text.index_topk and not probe.has_edits:
            # Every visible entry is picked and is a candidate (model.md §1.3): nothing depends on the scores, which
            # are then computed only where they are captured.
            scores = jnp.where(jnp.arange(entries) < visible[..., None], 0.0, -jnp.inf)
        return pick(scores, text.index_topk), chosen

    batch, time = visible.shape
    rows = time if any(map(probe.watches, names)) else score_rows(batch, entries)
    earlier = published.candidates if plan.uses_candidates else None
    picks, chosen = map_time(choose, query, weights, visible, earlier, size=rows)
    if plan.is_candidate_source:
        published.candidates = chosen
    published.picks = probe(f"{name}.index_picks", picks)
