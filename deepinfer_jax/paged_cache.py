"""What running sequences keep on the device, in pools (model.md §5.9, Appendix A; design.md §6).

What grows with a sequence (compressed entries, index keys) lies in blocks of `tokens_per_block` tokens, found through
the sequence's block table; what does not (window rings, open groups, n-gram tails) lies in the sequence's slot. Every
array leads with the data index, [data, blocks or slots, ...]: each index has pools of its own, so that they can lie
on devices of their own.

Stored packed, a released entry takes 288 bytes, an index key 68, a window row 528; unpacked, each value takes the
dtype of the arithmetic. Both hold the same numbers, so results are equal bit for bit.
"""

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jax.typing import DTypeLike

from deepinfer_jax.arithmetic import arithmetic
from deepinfer_jax.cache import OpenGroup
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.kernels.formats import (
    FP4_INDEX_GROUP,
    FP4_KV_GROUP,
    FP8_GROUP,
)
from deepinfer_jax.kernels.sparse_attention import PackedEntries
from deepinfer_jax.layer_plan import layer_plans
from deepinfer_jax.sharding import over_data


class PackedWindow(NamedTuple):
    """Window keys in FP8. codes: e4m3 bits, uint8 [..., dim]; scales: E8M0 bytes, uint8 [..., dim / 32]."""

    codes: Any
    scales: Any


class PackedIndexKeys(NamedTuple):
    """Index keys in FP4. codes: two e2m1 a byte, uint8 [..., dim / 2]; scales: E8M0 bytes, uint8 [..., dim / 32]."""

    codes: Any
    scales: Any


@dataclasses.dataclass(frozen=True)
class StateSpec:
    """One array of the cache: what a block or a slot holds of it.

    Attributes:
        name: path in `PagedCache`, e.g. "windows.3.codes".
        per: whether it grows with the tokens ("block") or belongs to a running sequence ("slot").
        shape: of one block or slot.
        dtype: as stored.
    """

    name: str
    per: Literal["block", "slot"]
    shape: tuple[int, ...]
    dtype: jnp.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of one block or slot."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class CacheShape:
    """Sizes of the pools; each data index has so many blocks and slots of its own."""

    data: int
    slots: int
    blocks: int
    tokens_per_block: int


@struct.dataclass
class PagedCache:
    """State of all running sequences. Every array leads with [data, blocks] or [data, slots].

    Attributes:
        entries: per KV source, compressed KV. [.., tokens_per_block // ratio, head_dim], or `PackedEntries`.
        index_keys: per KV source. [.., tokens_per_block // ratio, index_dim], or `PackedIndexKeys`.
        windows: per backbone layer, the last `sliding_window` keys as a ring, place = position % window.
            [.., window, head_dim], or `PackedWindow`.
        open_groups: per KV source, fp32 [.., ratio - 1, head_dim]; None at ratio 1.
        ngrams: compressed ids of the last n-gram − 1 tokens. int32 [.., ngram - 1]; None without Engram layers.
        draft_windows: per draft layer, context keys, like `windows`.
    """

    entries: tuple[Any, ...]
    index_keys: tuple[Any, ...]
    windows: tuple[Any, ...]
    open_groups: tuple[OpenGroup | None, ...]
    ngrams: Any
    draft_windows: tuple[Any, ...]


def _declaration(config: ModelConfig, precision: str, tokens_per_block: int, packed: bool) -> PagedCache:
    """The cache's tree with a `StateSpec` for each array."""
    text, arith = config.text, arithmetic(config, precision)
    ratios = [plan.ratio for plan in layer_plans(text) if plan.is_kv_source]
    for ratio in ratios:
        if tokens_per_block < 1 or tokens_per_block % ratio:
            raise ValueError(f"tokens_per_block {tokens_per_block} must be a positive multiple of the ratio {ratio}")
    packed = packed and arith.quantize_cache

    def array(per: Literal["block", "slot"], *shape: int, dtype: DTypeLike = arith.dtype) -> StateSpec:
        return StateSpec("", per, shape, jnp.dtype(dtype))

    def codes(per: Literal["block", "slot"], rows: int, width: int) -> StateSpec:
        return array(per, rows, width, dtype=jnp.uint8)

    def entries(count: int) -> Any:
        dim = text.head_dim
        if packed:
            specs = codes("block", count, dim // 2), codes("block", count, dim // FP4_KV_GROUP)
            return PackedEntries(*specs)  # type: ignore[arg-type]  # a tree of specs in place of arrays
        return array("block", count, dim)

    def index_keys(count: int) -> Any:
        dim = text.index_head_dim
        if packed:
            return PackedIndexKeys(codes("block", count, dim // 2), codes("block", count, dim // FP4_INDEX_GROUP))
        return array("block", count, dim)

    def window() -> Any:
        rows, dim = text.sliding_window, text.head_dim
        if packed:
            return PackedWindow(codes("slot", rows, dim), codes("slot", rows, dim // FP8_GROUP))
        return array("slot", rows, dim)

    def open_group(ratio: int) -> OpenGroup | None:
        if ratio == 1:
            return None
        kv, gate = (array("slot", ratio - 1, text.head_dim, dtype=jnp.float32) for _ in range(2))
        return OpenGroup(kv, gate)  # type: ignore[arg-type]  # a tree of specs in place of arrays

    tree = PagedCache(
        entries=tuple(entries(tokens_per_block // ratio) for ratio in ratios),
        index_keys=tuple(index_keys(tokens_per_block // ratio) for ratio in ratios),
        windows=tuple(window() for _ in range(text.num_hidden_layers)),
        open_groups=tuple(open_group(ratio) for ratio in ratios),
        ngrams=array("slot", text.engram_max_ngram_size - 1, dtype=jnp.int32) if text.engram_layer_ids else None,
        draft_windows=tuple(window() for _ in range(text.num_nextn_predict_layers)),
    )
    return jax.tree_util.tree_map_with_path(
        lambda path, spec: dataclasses.replace(spec, name=jax.tree_util.keystr(path, simple=True, separator=".")), tree
    )


def state_specs(
    config: ModelConfig, precision: str, *, tokens_per_block: int, packed: bool = True
) -> tuple[StateSpec, ...]:
    """Every array of the cache. In "float32_exact" nothing is quantised, so `packed` has no effect.

    Raises:
        ValueError: a block does not hold whole groups of every compressed layer, or there is no such precision.
    """
    return tuple(jax.tree.leaves(_declaration(config, precision, tokens_per_block, packed)))


def init_paged_cache(
    config: ModelConfig,
    shape: CacheShape,
    *,
    precision: str = "reference",
    packed: bool = True,
    mesh: Mesh | None = None,
) -> PagedCache:
    """Empty pools; with a mesh each data index lies on its own devices.

    What a block or slot held before is never read by its next owner: every read is bounded by the reader's position.
    """
    placement = over_data(mesh)
    counts = {"block": shape.blocks, "slot": shape.slots}

    def empty(spec: StateSpec) -> jax.Array:
        return jnp.zeros((shape.data, counts[spec.per], *spec.shape), spec.dtype, device=placement)

    return jax.tree.map(empty, _declaration(config, precision, shape.tokens_per_block, packed))
