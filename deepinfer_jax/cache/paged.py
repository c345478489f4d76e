"""The engine's cache: what running sequences keep on the device, in pools (model.md §5.9, Appendix A; design.md §6).

Compressed entries and index keys grow with a sequence and lie in blocks; window keys, the tokens of open groups and
n-gram tails lie in its slot, as rings over its last tokens (`cache/pools.py`). Every array leads with the dp rank,
[data, blocks or slots, ...]: each rank has pools of its own, so that they can lie on devices of their own.

Stored packed, a released entry takes 288 bytes, an index key 68, a window row 528; unpacked, each value takes the
dtype of the precision. Both hold the same numbers, so results are equal bit for bit.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from deepinfer_jax.cache.pools import StateSpec
from deepinfer_jax.cache.view import OpenGroup
from deepinfer_jax.config.layer_plan import layer_plans
from deepinfer_jax.config.model_config import ModelConfig
from deepinfer_jax.config.precision import precision_policy
from deepinfer_jax.kernels.formats import (
    FP4_INDEX_GROUP,
    FP4_KV_GROUP,
    FP8_GROUP,
)
from deepinfer_jax.kernels.sparse_attention import PackedEntries


class PackedWindow(NamedTuple):
    """Window keys in FP8. codes: e4m3 bits, uint8 [..., dim]; scales: E8M0 bytes, uint8 [..., dim / 32]."""

    codes: Any
    scales: Any


class PackedIndexKeys(NamedTuple):
    """Index keys in FP4. codes: two e2m1 a byte, uint8 [..., dim / 2]; scales: E8M0 bytes, uint8 [..., dim / 32]."""

    codes: Any
    scales: Any


@struct.dataclass
class PagedCache:
    """State of all running sequences, or its declaration: a `StateSpec` in place of each array.

    Every array leads with [data, blocks], or with [data, slots, reach + num_drafts] and is a ring.

    Attributes:
        entries: per KV source, compressed KV. [.., tokens_per_block // ratio, head_dim], or `PackedEntries`.
        index_keys: per KV source. [.., tokens_per_block // ratio, index_dim], or `PackedIndexKeys`.
        windows: per backbone layer, the keys of the last `sliding_window` tokens. [.., head_dim], or `PackedWindow`.
        open_groups: per KV source, of the last ratio − 1 tokens, fp32 [.., head_dim]; None at ratio 1.
        ngrams: compressed ids of the last n-gram − 1 tokens. int32 [..]; None without Engram layers.
        draft_windows: per draft layer, context keys, like `windows`.
    """

    entries: tuple[Any, ...]
    index_keys: tuple[Any, ...]
    windows: tuple[Any, ...]
    open_groups: tuple[OpenGroup | None, ...]
    ngrams: Any
    draft_windows: tuple[Any, ...]


def paged_state(config: ModelConfig, precision: str, *, tokens_per_block: int, packed: bool = True) -> PagedCache:
    """The declaration of the cache. In "float32_exact" nothing is quantised, so `packed` has no effect.

    Raises:
        ValueError: a block does not hold whole groups of every compressed layer, or there is no such precision.
    """
    text, policy = config.text, precision_policy(config, precision)
    ratios = [plan.ratio for plan in layer_plans(text) if plan.is_kv_source]
    for ratio in ratios:
        if tokens_per_block < 1 or tokens_per_block % ratio:
            raise ValueError(f"tokens_per_block {tokens_per_block} must be a positive multiple of the ratio {ratio}")
    packed = packed and policy.quantize_cache
    byte = jnp.uint8

    def block(*shape: int, dtype: DTypeLike = policy.dtype) -> StateSpec:
        return StateSpec("", "block", shape, jnp.dtype(dtype))

    def ring(reach: int, *shape: int, dtype: DTypeLike = policy.dtype) -> StateSpec:
        return StateSpec("", "slot", shape, jnp.dtype(dtype), reach)

    def entries(count: int) -> Any:
        dim = text.head_dim
        if packed:
            specs = block(count, dim // 2, dtype=byte), block(count, dim // FP4_KV_GROUP, dtype=byte)
            return PackedEntries(*specs)  # type: ignore[arg-type]  # a tree of specs in place of arrays
        return block(count, dim)

    def index_keys(count: int) -> Any:
        dim = text.index_head_dim
        if packed:
            return PackedIndexKeys(block(count, dim // 2, dtype=byte), block(count, dim // FP4_INDEX_GROUP, dtype=byte))
        return block(count, dim)

    def window() -> Any:
        reach, dim = text.sliding_window, text.head_dim
        if packed:
            return PackedWindow(ring(reach, dim, dtype=byte), ring(reach, dim // FP8_GROUP, dtype=byte))
        return ring(reach, dim)

    def open_group(ratio: int) -> OpenGroup | None:
        if ratio == 1:
            return None
        kv, gate = (ring(ratio - 1, text.head_dim, dtype=jnp.float32) for _ in range(2))
        return OpenGroup(kv, gate)  # type: ignore[arg-type]  # a tree of specs in place of arrays

    tree = PagedCache(
        entries=tuple(entries(tokens_per_block // ratio) for ratio in ratios),
        index_keys=tuple(index_keys(tokens_per_block // ratio) for ratio in ratios),
        windows=tuple(window() for _ in range(text.num_hidden_layers)),
        open_groups=tuple(open_group(ratio) for ratio in ratios),
        ngrams=ring(text.engram_max_ngram_size - 1, dtype=jnp.int32) if text.engram_layer_ids else None,
        draft_windows=tuple(window() for _ in range(text.num_nextn_predict_layers)),
    )
    return jax.tree_util.tree_map_with_path(
        lambda path, spec: dataclasses.replace(spec, name=jax.tree_util.keystr(path, simple=True, separator=".")), tree
    )


def state_specs(
    config: ModelConfig, precision: str, *, tokens_per_block: int, packed: bool = True
) -> tuple[StateSpec, ...]:
    """Every array of the cache; arguments and errors as `paged_state`."""
    return tuple(jax.tree.leaves(paged_state(config, precision, tokens_per_block=tokens_per_block, packed=packed)))
