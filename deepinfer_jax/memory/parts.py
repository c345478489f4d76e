"""How many bytes each part of an engine takes on one device; counted on shapes, nothing is allocated."""

import functools
import math
from collections import Counter
from typing import Any, NamedTuple, cast

import jax
from jax.sharding import AbstractMesh, Mesh

from deepinfer_jax.cache.paged import state_specs
from deepinfer_jax.cache.pools import CacheShape
from deepinfer_jax.checkpoint.leaves import leaf_form
from deepinfer_jax.config.layer_plan import layer_plans
from deepinfer_jax.config.model_config import ModelConfig
from deepinfer_jax.config.precision import precision_policy
from deepinfer_jax.kernels.experts.reference import LARGEST_TILE
from deepinfer_jax.kernels.sparse_attention.reference import TILE_ROWS
from deepinfer_jax.model.indexer import PRODUCT_BYTES, SCORE_BYTES
from deepinfer_jax.model.vision import SCORE_BYTES as VISION_SCORE_BYTES
from deepinfer_jax.runtime.slot_table import init_slot_table
from deepinfer_jax.runtime.vision_encoder import bucket_features, most_features, patch_buckets
from deepinfer_jax.scheduler.buckets import MAX_PREFILL_ROWS
from deepinfer_jax.weights.layout import DTYPE_BYTES, ParamSpec, param_specs
from deepinfer_jax.weights.sharding import DATA, EXPERT, param_sharding, placed_shape

# What `PagedCache` calls its parts, in words; a part that is not here has its own name.
_STATE_NAMES = {
    "entries": "compressed KV",
    "index_keys": "index keys",
    "windows": "window rings",
    "open_groups": "open groups",
    "ngrams": "n-gram tails",
    "draft_windows": "draft window rings",
}


def checkpoint_bytes(config: ModelConfig) -> int:
    """Payload bytes of all released tensors (released: 510,286,023,000).

    That is what `total_size` of a checkpoint's index counts: the data alone. The files themselves are longer by the
    JSON header of each shard.
    """
    return sum(len(spec.names) * sum(t.nbytes for t in spec.stored(spec.names[0])) for spec in _specs(config))


@functools.cache
def _specs(config: ModelConfig) -> tuple[ParamSpec, ...]:
    return tuple(param_specs(config))


def weight_bytes(config: ModelConfig, precision: str, platform: str, data: int, expert: int) -> dict[str, int]:
    """Bytes per device of each kind of weights, on a mesh of data x expert devices.

    Raises:
        ValueError: a weight whose size the devices cannot share, or there is no such precision.
    """
    mesh = cast(Mesh, AbstractMesh((data, expert), (DATA, EXPERT)))  # the rules read its names and sizes only
    sizes: Counter[str] = Counter()
    for spec in _specs(config):
        is_stored = leaf_form(spec, precision, platform) == "stored"
        sizes[_kind(spec.names[0])] += _spec_bytes(spec, is_stored, mesh)
    if config.text.engram_layer_ids:
        sizes["Engram tables"] += 4 * config.text.vocab_size  # the token map, on every device
    return dict(sizes)


def _kind(name: str) -> str:
    if name.startswith("mtp."):
        return "draft weights"
    if name.startswith(("vision.", "aligner.", "image_")):
        return "vision weights"
    if ".ffn.experts." in name:
        return "routed experts"
    return "Engram tables" if ".engram.embed." in name else "text weights"


def _spec_bytes(spec: ParamSpec, is_stored: bool, mesh: Mesh) -> int:
    sharding = param_sharding(spec, mesh)
    padding = placed_shape(spec, mesh)[0] - spec.full_shape[0]  # of experts and table rows

    def nbytes(shape: tuple[int, ...], itemsize: int) -> int:
        first, *rest = (len(spec.names), *shape) if spec.stacked else shape
        return math.prod(sharding.shard_shape((first + padding, *rest))) * itemsize

    if not is_stored:
        return nbytes(spec.shape, 4)
    scales = 0 if spec.scale_shape is None else nbytes(spec.scale_shape, 1)
    return nbytes(spec.stored_shape, DTYPE_BYTES[spec.dtype]) + scales


def state_bytes(
    config: ModelConfig, precision: str, tokens_per_block: int, packed: bool, num_drafts: int
) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of one block and of one slot, each by kind.

    Raises ValueError as `cache.paged.state_specs`.
    """
    sizes: dict[str, Counter[str]] = {"block": Counter(), "slot": Counter()}
    for spec in state_specs(config, precision, tokens_per_block=tokens_per_block, packed=packed):
        name = spec.name.split(".")[0]
        sizes[spec.per][_STATE_NAMES.get(name, name)] += spec.nbytes(num_drafts)
    return dict(sizes["block"]), dict(sizes["slot"])


class SlotTableBytes(NamedTuple):
    """Of one slot: of a number in its block table, of its drafts, and of all else."""

    slot: int
    block_number: int
    drafts: int


@functools.cache
def slot_table_bytes(vocab_size: int, num_drafts: int) -> SlotTableBytes:
    """Bytes of `init_slot_table`'s arrays."""
    one = CacheShape(data=1, slots=1, blocks=1, tokens_per_block=1, num_drafts=num_drafts)
    table = jax.eval_shape(lambda: init_slot_table(one, 1, vocab_size))
    block_number, drafts = tree_bytes(table.blocks), tree_bytes(table.drafts)
    return SlotTableBytes(tree_bytes(table) - block_number - drafts, block_number, drafts)


def tree_bytes(tree: Any) -> int:
    """Of all arrays of a pytree, or of their descriptions."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def temporary_bytes(
    config: ModelConfig,
    precision: str,
    *,
    decode_rows: int,
    decode_time: int,
    prefill_tokens: int,
    context: int,
) -> int:
    """An estimate of what a step needs besides weights and caches, of the larger of its two programs.

    With t tokens in the step, of an activation type of b bytes (2 in bf16):

    - streams, before and after a layer: t·hc·hidden·(2b + 4);
    - candidate blocks, kept for later layers: one byte for each of t·entries / candidate_block_size;
    - and of these, which do not live at the same time, the largest:
      - attention: query, heads and an fp32 product, t·heads·head_dim·(2b + 4), and one tile of gathered keys,
        32 rows of each sequence·(window + index_topk)·head_dim·(b + 4);
      - experts: rows in and out of their tiles, (t·k + 64·experts)·hidden·2b, and one expert in fp32;
      - index scores of as many tokens as are scored at once (`indexer.score_rows`), before and while the best are
        picked: (2b + 9) bytes for each of their entries, one of these for the candidates; one tile of the products
        of all heads, three times (in fp32, rounded, weighted); and the tile's keys, entries·index_dim·(b + 4);
      - sampling: logits, probabilities and their sums of each sampled row, rows·vocab·4·5.

    Five shapes of small models, compiled for a CPU, took between a half and three quarters of this.

    Args:
        decode_rows, decode_time: of the decode program.
        prefill_tokens: of the prefill program; it samples few rows.
        context: tokens that the widest block table spans.
    """
    text, b = config.text, 2 if precision_policy(config, precision).is_low else 4
    entries = context // min((plan.ratio for plan in layer_plans(text) if plan.is_index_source), default=context + 1)
    sampled = decode_rows * decode_time * text.vocab_size * 4 * 5

    def step(tokens: int, sequences: int) -> int:
        seen = text.sliding_window + text.index_topk
        gathered = min(tokens, TILE_ROWS * sequences) * seen * text.head_dim * (b + 4)
        attention = tokens * text.num_attention_heads * text.head_dim * (2 * b + 4) + gathered
        pairs = tokens * text.num_experts_per_tok
        rows = pairs + LARGEST_TILE * min(pairs, text.n_routed_experts)
        experts = rows * text.hidden_size * 2 * b + 3 * text.moe_intermediate_size * text.hidden_size * 4
        scored = min(tokens * entries, max(SCORE_BYTES // 4, sequences * entries))
        products = min(PRODUCT_BYTES, scored * text.index_n_heads * 4)
        keys = min(PRODUCT_BYTES // (4 * max(1, text.index_n_heads)), sequences * entries)
        scores = scored * (2 * b + 9) + 3 * products + keys * text.index_head_dim * (b + 4)
        candidates = tokens * math.ceil(entries / text.candidate_block_size)
        streams = tokens * text.hc_mult * text.hidden_size * (2 * b + 4)
        return streams + candidates + max(attention, experts, scores, sampled)

    prefill_rows = min(prefill_tokens, decode_rows, MAX_PREFILL_ROWS)
    return max(step(decode_rows * decode_time, decode_rows), step(prefill_tokens, prefill_rows))


def image_rows(
    config: ModelConfig, precision: str, *, cache_bytes: int, data: int, prefill_tokens: int, prefill_rows: int
) -> int:
    """Rows of image features that an engine keeps; 0 without a vision tower.

    As many as `cache_bytes` hold, but always those of one prefill step: at most one for each of its tokens, and those
    of two images for each of its chunks, whose ends may cut one each.

    Args:
        data, prefill_tokens, prefill_rows: dp ranks, and tokens and chunks of each in a prefill step.
    """
    if not config.vision.num_hidden_layers:
        return 0
    needed = data * (prefill_tokens + 2 * prefill_rows * most_features(config.vision))
    return max(needed, cache_bytes // feature_bytes(config, precision))


def feature_bytes(config: ModelConfig, precision: str) -> int:
    """Bytes of one row of image features."""
    return config.text.hidden_size * (2 if precision_policy(config, precision).is_low else 4)


def vision_temporary_bytes(config: ModelConfig, precision: str) -> int:
    """An estimate of what the largest vision program needs besides weights and features; 0 without a vision tower.

    With n patches, f features and an activation type of b bytes, these, of which the last three do not live at the same
    time:

    - patches in fp32 and rounded, n·3·patch²·(4 + b), and the stream and its norm, n·vit·2b;
    - attention: queries, keys and values in fp32 and rounded, n·3·vit·(4 + b), and one tile of scores, three times;
    - MLP: gate and up in fp32 and rounded, n·2·vit_ffn·(4 + b);
    - aligner: squares of patches, twice, f·vit·downsample²·2b, and its rows in fp32 and rounded, f·hidden·(4 + b).
    """
    vision = config.vision
    if not vision.num_hidden_layers:
        return 0
    b, n = 2 if precision_policy(config, precision).is_low else 4, patch_buckets(vision)[-1]
    features, width = bucket_features(n, vision), vision.hidden_size
    scores = min(VISION_SCORE_BYTES, 4 * vision.num_attention_heads * n * n)
    attention = n * 3 * width * (4 + b) + 3 * scores
    mlp = n * 2 * vision.intermediate_size * (4 + b)
    aligner = features * (width * vision.downsample_ratio**2 * 2 * b + config.text.hidden_size * (4 + b))
    return n * (3 * vision.patch_size**2 * (4 + b) + width * 2 * b) + max(attention, mlp, aligner)
