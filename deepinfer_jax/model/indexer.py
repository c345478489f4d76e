"""Two-level indexer: which compressed entries each query attends (model.md §5.6, §5.7)."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from deepinfer_jax.cache.view import IndexKeys
from deepinfer_jax.config.layer_plan import LayerPlan
from deepinfer_jax.config.model_config import TextConfig
from deepinfer_jax.config.precision import PrecisionPolicy
from deepinfer_jax.kernels.dot import contract
from deepinfer_jax.kernels.formats import fake_quant_fp4_index
from deepinfer_jax.kernels.quantized_linear import linear
from deepinfer_jax.kernels.rowwise import TILE_ROWS, is_batch_invariant, isolated, rowwise
from deepinfer_jax.kernels.tiling import map_time, pad_time
from deepinfer_jax.model.carry import Carry
from deepinfer_jax.model.context import ForwardContext
from deepinfer_jax.model.rope import Rotation, rotate
from deepinfer_jax.weights.params import Attention, Indexer

PRODUCT_BYTES = 1 << 23
"""Of the fp32 products of one tile of query rows and keys."""
SCORE_BYTES = 1 << 26
"""Of the scores of one tile of query rows with all entries, counted as fp32."""
_TILE_KEYS = 64  # per tile under batch invariance


@jax.named_scope("attention.index")
def pick_entries(
    latent: jax.Array, x: jax.Array, carry: Carry, params: Attention, plan: LayerPlan, context: ForwardContext
) -> Carry:
    """The carry with the picks of an index source, and with candidates if the layer chooses them.

    Some query rows at a time: the scores of all rows with all entries of a long context exist only where they are
    captured or edited.

    Args:
        latent: normed q-lora vector. [batch, time, q_lora].
        x: normed input of the layer. [batch, time, hidden].
    """
    assert params.indexer is not None and plan.kv_owner is not None
    name, probe, new = f"layers.{plan.index}.attention", context.probe, context.view.new
    visible = jnp.maximum(new.positions + 1, 0) // plan.ratio  # entries whose last token is not later
    index_keys = context.view.compressed(carry.cache, plan.kv_owner).index_keys
    query, weights = index_query(
        latent, x, context.rotations.compressed, params=params.indexer, text=context.text, policy=context.policy
    )
    watched = any(probe.watches(f"{name}.{tensor}") for tensor in ("index_scores", "candidates"))
    choice = map_time(
        functools.partial(_choose, index_keys=index_keys, name=name, plan=plan, context=context),
        query,
        weights,
        visible,
        carry.candidates if plan.uses_candidates else None,
        size=new.time if watched else score_rows(len(visible), index_keys.count),
    )
    carry = dataclasses.replace(carry, captured={**carry.captured, **choice.captured})
    if plan.is_candidate_source:
        carry = dataclasses.replace(carry, candidates=choice.candidates)
    picks, carry = probe(f"{name}.index_picks", choice.picks, carry)
    return dataclasses.replace(carry, picks=picks)


class _Choice(NamedTuple):
    """Of some query rows: picks, candidates as in `Carry` (None where the layer chooses none), captured tensors."""

    picks: jax.Array
    candidates: jax.Array | None
    captured: dict[str, jax.Array]


def _choose(
    query: jax.Array,
    weights: jax.Array,
    visible: jax.Array,
    candidates: jax.Array | None,
    *,
    index_keys: IndexKeys,
    name: str,
    plan: LayerPlan,
    context: ForwardContext,
) -> _Choice:
    """What some query rows choose among all entries; candidates: those that they are restricted to."""
    text, probe, entries = context.text, context.probe, index_keys.count
    scores = index_scores(query, weights, index_keys, visible, context.policy)
    if candidates is not None:
        if candidates.shape[-1] != entries:
            candidates = entries_of_blocks(candidates, entries, text)
        scores = jnp.where(candidates, scores, -jnp.inf)
    scores, captured = probe.observe(f"{name}.index_scores", scores)
    chosen = None
    if plan.is_candidate_source:
        chosen = candidate_blocks(scores, visible, text)
        if probe.watches(f"{name}.candidates"):
            chosen, seen = probe.observe(f"{name}.candidates", entries_of_blocks(chosen, entries, text))
            captured = captured | seen
    if entries <= text.index_topk and not probe.has_edits:
        # Every visible entry is picked and is a candidate (model.md §1.3): nothing depends on the scores, which
        # are then computed only where they are captured.
        scores = jnp.where(jnp.arange(entries) < visible[..., None], 0.0, -jnp.inf)
    return _Choice(pick(scores, text.index_topk), chosen, captured)


@rowwise
def index_query(
    latent: jax.Array, x: jax.Array, rope: Rotation, *, params: Indexer, text: TextConfig, policy: PrecisionPolicy
) -> tuple[jax.Array, jax.Array]:
    """Queries q_n, quantised as the cache quantises keys, and head weights w_n.

    Args:
        latent: normed q-lora vector. [batch, time, q_lora].
        x: normed input of the layer. [batch, time, hidden].

    Returns:
        [batch, time, heads, index_dim] and [batch, time, heads] in the precision's dtype.
    """
    heads, dim = text.index_n_heads, text.index_head_dim
    query = linear(latent, params.wq_b, quantize_input=policy.quantize_activations)
    query = rotate(query.reshape(*x.shape[:2], heads, dim), rope.heads())
    if policy.quantize_cache:
        query = fake_quant_fp4_index(query)
    return query, policy.round(linear(x, params.weights_proj).astype(jnp.float32) * (dim**-0.5 * heads**-0.5))


def index_scores(
    query: jax.Array, weights: jax.Array, index_keys: IndexKeys, visible: jax.Array, policy: PrecisionPolicy
) -> jax.Array:
    """score(p, j) = Σ_n relu(q_n·I_j)·w_n, −∞ where j is not visible to p.

    Args:
        query, weights: of `index_query`.
        index_keys: of the KV owner, `entries` places.
        visible: entries visible to each query, a count. int32 [batch, time].

    Returns:
        [batch, time, entries] in the precision's dtype.
    """
    batch, time, heads, _ = query.shape
    entries = index_keys.count
    # Tiles of keys too, so that neither products nor keys of all entries of a long context exist at once.
    blocks = PRODUCT_BYTES // (batch * heads * index_keys.block * 4) if entries else 0
    size = max(1, blocks) * index_keys.block
    if size >= entries:
        scores = _scores_of(query, weights, index_keys.part(jnp.int32(0), entries), policy)
    else:
        tiles = math.ceil(entries / size)
        parts = lax.map(
            lambda number: _scores_of(query, weights, index_keys.part(number * size, size), policy), jnp.arange(tiles)
        )
        scores = jnp.moveaxis(parts, 0, 2).reshape(batch, time, tiles * size)[..., :entries]
    return jnp.where(jnp.arange(entries) < visible[..., None], scores, -jnp.inf)


def _scores_of(query: jax.Array, weights: jax.Array, keys: jax.Array, policy: PrecisionPolicy) -> jax.Array:
    """Scores of some keys [batch, keys, index_dim], [batch, time, keys], some query rows at a time."""
    score = functools.partial(_score_tile, policy=policy)
    if is_batch_invariant():
        return _map_fixed_tiles(score, query, weights, keys)
    batch, _, heads, _ = query.shape
    # No entry can exist yet: no bytes.
    rows = max(1, PRODUCT_BYTES // max(1, batch * heads * keys.shape[1] * 4))
    return map_time(lambda query, weights: score(query, weights, keys), query, weights, size=rows)


def _score_tile(query: jax.Array, weights: jax.Array, keys: jax.Array, *, policy: PrecisionPolicy) -> jax.Array:
    """The formula, [batch, time, keys] of query [batch, time, heads, dim] and keys [batch, keys, dim], in any sizes.

    relu comes before the head sum and head weights keep their sign (T16). In bf16 every product and the sum are
    rounded as the reference does, fp32 accumulation inside each.
    """
    batch, time, heads, dim = query.shape
    products = contract("bqd,bkd->bqk", query.reshape(batch, time * heads, dim), keys)
    products = policy.round(products).reshape(batch, time, heads, -1)
    terms = policy.round(jax.nn.relu(products).astype(jnp.float32) * weights[..., None].astype(jnp.float32))
    return policy.round(jnp.sum(terms, axis=2, dtype=jnp.float32))


def _map_fixed_tiles(
    function: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    query: jax.Array,
    weights: jax.Array,
    keys: jax.Array,
) -> jax.Array:
    """`function` of `TILE_ROWS` rows and `_TILE_KEYS` keys of one sequence at a time: [batch, time, keys]."""
    (batch, time), count = query.shape[:2], keys.shape[1]
    row_tiles, key_tiles = math.ceil(time / TILE_ROWS), math.ceil(count / _TILE_KEYS)
    if key_tiles == 0:
        return jnp.zeros((batch, time, 0), query.dtype)
    query = pad_time(query, row_tiles * TILE_ROWS - time, 0)
    weights = pad_time(weights, row_tiles * TILE_ROWS - time, 0)
    keys = pad_time(keys, key_tiles * _TILE_KEYS - count, 0)

    def one(number: jax.Array) -> jax.Array:
        sequence, number = number // (row_tiles * key_tiles), number % (row_tiles * key_tiles)

        def part(array: jax.Array, tile: jax.Array, size: int) -> jax.Array:
            array = lax.dynamic_slice_in_dim(array, sequence, 1)
            return lax.dynamic_slice_in_dim(array, tile * size, size, axis=1)

        row_tile, key_tile = number // key_tiles, number % key_tiles
        rows = (part(array, row_tile, TILE_ROWS) for array in (query, weights))
        return isolated(function, *rows, part(keys, key_tile, _TILE_KEYS))

    scores = lax.map(one, jnp.arange(batch * row_tiles * key_tiles))
    scores = jnp.swapaxes(scores.reshape(batch, row_tiles, key_tiles, TILE_ROWS, _TILE_KEYS), 2, 3)
    return scores.reshape(batch, row_tiles * TILE_ROWS, key_tiles * _TILE_KEYS)[:, :time, :count]


def score_rows(batch: int, entries: int) -> int:
    """How many query rows of each of `batch` sequences are scored at once, at least one."""
    return max(1, SCORE_BYTES // max(1, batch * entries * 4))


def candidate_blocks(scores: jax.Array, visible: jax.Array, text: TextConfig) -> jax.Array:
    """The kept blocks of each query, bool [batch, time, blocks] (model.md §5.7).

    A block scores its best entry; the block of the newest visible entry always stays; blocks that score −∞ never do.
    """
    batch, time, entries = scores.shape
    size = text.candidate_block_size
    blocks = math.ceil(entries / size)
    padded = jnp.pad(scores, [(0, 0), (0, 0), (0, blocks * size - entries)], constant_values=-jnp.inf)
    best = jnp.max(padded.reshape(batch, time, blocks, size), axis=-1)
    newest = jnp.where(visible > 0, (visible - 1) // size, -1)
    best = jnp.where(jnp.arange(blocks) == newest[..., None], jnp.inf, best)
    return _largest(best, min(text.candidate_topk_blocks, blocks))


def entries_of_blocks(blocks: jax.Array, entries: int, text: TextConfig) -> jax.Array:
    """The entries inside the blocks: bool [batch, time, blocks] -> [batch, time, entries]."""
    return jnp.repeat(blocks, text.candidate_block_size, axis=-1)[..., :entries]


def _largest(scores: jax.Array, k: int) -> jax.Array:
    """Mask of the k largest scores of each row, lowest index first on ties, −∞ never (T30)."""
    finite = scores > -jnp.inf
    if k >= scores.shape[-1]:
        return finite
    threshold = lax.top_k(scores, k)[0][..., -1:]
    above = scores > threshold
    tied = scores == threshold
    room = k - jnp.sum(above, axis=-1, keepdims=True, dtype=jnp.int32)
    return (above | (tied & (jnp.cumsum(tied, axis=-1, dtype=jnp.int32) <= room))) & finite


def pick(scores: jax.Array, topk: int) -> jax.Array:
    """The largest scores' entries, ascending, −1 last for what does not exist (T30, T43).

    scores: [batch, time, entries] -> int32 [batch, time, min(topk, entries)].
    """
    entries = scores.shape[-1]
    if entries <= topk:
        chosen = jnp.where(scores > -jnp.inf, jnp.arange(entries, dtype=jnp.int32), entries)
    else:
        values, chosen = lax.top_k(scores, topk)
        chosen = jnp.where(values > -jnp.inf, chosen, entries)
    ordered = jnp.sort(chosen, axis=-1)
    return jnp.where(ordered < entries, ordered, -1)
