"""Two-level indexer: which compressed entries each query attends (model.md §5.6, §5.7)."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from deepinfer_jax.cache.dense import IndexKeys
from deepinfer_jax.config.model_config import TextConfig
from deepinfer_jax.config.precision import PrecisionPolicy
from deepinfer_jax.kernels.dot import dot
from deepinfer_jax.kernels.formats import fake_quant_fp4_index
from deepinfer_jax.kernels.quantized_linear import linear
from deepinfer_jax.kernels.rowwise import TILE_ROWS, is_batch_invariant, isolated, rowwise
from deepinfer_jax.kernels.tiling import map_time, pad_time
from deepinfer_jax.model.rope import Rotation, rotate
from deepinfer_jax.weights.params import Indexer

PRODUCT_BYTES = 1 << 23
"""Of the fp32 products of one tile of query rows and keys."""
SCORE_BYTES = 1 << 26
"""Of the scores of one tile of query rows with all entries, counted as fp32."""
_TILE_KEYS = 64  # per tile under batch invariance


def index_query(
    query_latent: jax.Array, x: jax.Array, params: Indexer, rope: Rotation, text: TextConfig, policy: PrecisionPolicy
) -> tuple[jax.Array, jax.Array]:
    """Queries q_n, quantised as the cache quantises keys, and head weights w_n.

    Args:
        query_latent: normed q-lora vector. [batch, time, q_lora].
        x: normed input of the layer. [batch, time, hidden].

    Returns:
        [batch, time, heads, index_dim] and [batch, time, heads] in the arithmetic's dtype.
    """
    heads, dim = text.index_n_heads, text.index_head_dim

    def project(query_latent: jax.Array, x: jax.Array, rope: Rotation) -> tuple[jax.Array, jax.Array]:
        query = linear(query_latent, params.wq_b, quantize_input=policy.quantize_activations)
        query = rotate(query.reshape(*x.shape[:2], heads, dim), rope.heads())
        if policy.quantize_cache:
            query = fake_quant_fp4_index(query)
        return query, policy.round(linear(x, params.weights_proj).astype(jnp.float32) * (dim**-0.5 * heads**-0.5))

    return rowwise(project, query_latent, x, rope)


def index_scores(
    query: jax.Array, weights: jax.Array, index_keys: IndexKeys, visible: jax.Array, policy: PrecisionPolicy
) -> jax.Array:
    """score(p, j) = Σ_n relu(q_n·I_j)·w_n, −∞ where j is not visible to p.

    relu comes before the head sum and head weights keep their sign (T16). In bf16 every product and the sum are
    rounded as the reference does, fp32 accumulation inside each.

    Args:
        query, weights: of `index_query`.
        index_keys: of the KV owner, `entries` places.
        visible: entries visible to each query, a count. int32 [batch, time].

    Returns:
        [batch, time, entries] in the arithmetic's dtype.
    """
    batch, time, heads, _ = query.shape
    entries = index_keys.count

    def tile(query: jax.Array, weights: jax.Array, keys: jax.Array) -> jax.Array:
        """[batch, time, keys] of query [batch, time, heads, dim], keys [batch, keys, dim], in any sizes."""
        batch, time, heads, dim = query.shape
        products = dot(query.reshape(batch, time * heads, dim), keys, (((2,), (2,)), ((0,), (0,))))
        products = policy.round(products).reshape(batch, time, heads, -1)
        terms = policy.round(jax.nn.relu(products).astype(jnp.float32) * weights[..., None].astype(jnp.float32))
        return policy.round(jnp.sum(terms, axis=2, dtype=jnp.float32))

    def scores_of(keys: jax.Array) -> jax.Array:
        """[batch, time, keys] of keys [batch, keys, index_dim]."""
        if is_batch_invariant():
            return _map_fixed_tiles(tile, query, weights, keys)
        # No entry can exist yet: no bytes.
        rows = max(1, PRODUCT_BYTES // max(1, batch * heads * keys.shape[1] * 4))
        return map_time(lambda query, weights: tile(query, weights, keys), query, weights, size=rows)

    # Tiles of keys too, so that neither products nor keys of all entries of a long context exist at once.
    blocks = PRODUCT_BYTES // (batch * heads * index_keys.block * 4) if entries else 0
    size = max(1, blocks) * index_keys.block
    if size >= entries:
        scores = scores_of(index_keys.part(jnp.int32(0), entries))
    else:
        tiles = math.ceil(entries / size)
        parts = lax.map(lambda number: scores_of(index_keys.part(number * size, size)), jnp.arange(tiles))
        scores = jnp.moveaxis(parts, 0, 2).reshape(batch, time, tiles * size)[..., :entries]
    return jnp.where(jnp.arange(entries) < visible[..., None], scores, -jnp.inf)


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
