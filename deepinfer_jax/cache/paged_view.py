"""One step's reads and writes on the paged cache."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from deepinfer_jax.cache.dense import (
    Groups,
    NewRows,
    OpenGroup,
    ordered_window,
    positions_before,
    ring_positions,
)
from deepinfer_jax.cache.paged import PackedIndexKeys, PackedWindow, PagedCache
from deepinfer_jax.config.model_config import ModelConfig
from deepinfer_jax.config.precision import PrecisionPolicy
from deepinfer_jax.kernels.formats import (
    fake_quant_fp4_index,
    fake_quant_fp4_kv,
    pack_fp4_index,
    pack_fp4_kv,
    pack_fp8,
    unpack_fp4_index,
    unpack_fp8,
)
from deepinfer_jax.kernels.pools import read_pool, write_pool
from deepinfer_jax.kernels.sparse_attention import PackedEntries, PagedEntries
from deepinfer_jax.tokenization.engram_hash import DEAD


@dataclasses.dataclass(frozen=True)
class PagedIndexKeys:
    """`IndexKeys` in blocks, found through block tables; batch = data · rows.

    Attributes:
        pages: [data, blocks, entries per block, index_dim], or `PackedIndexKeys`.
        tables: int32 [data, rows, width].
        dtype: of the keys that are handed out.
    """

    pages: Any
    tables: jax.Array
    dtype: DTypeLike

    @property
    def block(self) -> int:
        return jax.tree.leaves(self.pages)[0].shape[2]

    @property
    def count(self) -> int:
        return self.tables.shape[2] * self.block

    def part(self, first: jax.Array, size: int) -> jax.Array:
        columns = first // self.block + jnp.arange(size // self.block)
        blocks = jnp.take(self.tables, columns, axis=2, mode="clip")
        pages = jax.tree.map(lambda array: read_pool(array, blocks), self.pages)
        keys = unpack_fp4_index(*pages, self.dtype) if isinstance(pages, PackedIndexKeys) else pages
        return keys.reshape(-1, size, keys.shape[-1])


def draft_windows(
    cache: PagedCache, slots: jax.Array, lengths: jax.Array, window: int, dtype: DTypeLike
) -> tuple[list[jax.Array], jax.Array]:
    """What the draft layers remember of sequences of these lengths, in order of position; batch = data · rows.

    slots, lengths: int32 [data, rows].

    Returns:
        per draft layer the keys of the last tokens [batch, window, head_dim], and their positions, −1 for none, int32
        [batch, window].
    """
    positions = positions_before(lengths.reshape(-1), window)

    def read(ring: jax.Array) -> jax.Array:
        places = (positions % ring.shape[2]).reshape(*slots.shape, window)
        return read_pool(ring, slots[..., None], places).reshape(-1, window, *ring.shape[3:])

    keys = [_unpacked(jax.tree.map(read, rings), dtype) for rings in cache.draft_windows]
    return keys, jnp.maximum(positions, -1)


def _unpacked(keys: Any, dtype: DTypeLike) -> jax.Array:
    """Window keys as they are stored -> [batch, keys, head_dim] of the arithmetic's dtype."""
    return unpack_fp8(*keys, dtype) if isinstance(keys, PackedWindow) else keys


class PagedView(NewRows):
    """`View` of the pools. The rows of a step are those of all dp ranks one after another, batch = data · rows.

    An idle row has no tokens and a slot out of range.
    """

    def __init__(
        self,
        cache: PagedCache,
        tables: jax.Array,
        slots: jax.Array,
        starts: jax.Array,
        lengths: jax.Array,
        time: int,
        config: ModelConfig,
        policy: PrecisionPolicy,
        *,
        in_order: bool = False,
    ) -> None:
        """tables: int32 [data, rows, width]; slots, starts, lengths: int32 [data, rows].

        in_order: window keys always come in order of position, also in steps of one token.
        """
        super().__init__(starts.reshape(-1), lengths.reshape(-1), time)
        self._tables = tables
        self._slots = slots
        self._arith = policy
        self._num_drafts = jax.tree.leaves(cache.windows)[0].shape[2] - config.text.sliding_window
        self._owners = config.text.kv_source_layer_ids
        self._in_order = in_order
        self._entries = list(cache.entries)
        self._index_keys = list(cache.index_keys)
        self._windows = list(cache.windows)
        self._open_groups = list(cache.open_groups)
        self._ngrams = cache.ngrams
        self._draft_windows = list(cache.draft_windows)

    def window(self, layer: int, new: jax.Array) -> tuple[jax.Array, jax.Array, bool]:
        if self._time == 1 and not self._in_order:
            # The new key pushes out none that a row may still see: all are read as they lie.
            ring = self._windows[layer] = self._write_rings(self._windows[layer], new)
            keys = _unpacked(jax.tree.map(self._slot_rows, ring), self._arith.dtype)
            return keys, ring_positions(self.start + self.lengths, keys.shape[1]), False
        before, self._windows[layer] = self._extend_rings(self._windows[layer], new)
        return *ordered_window(_unpacked(before, self._arith.dtype), new, self.start, self.positions), True

    def write_entries(self, owner: int, groups: Groups, entries: jax.Array, index_keys: jax.Array) -> None:
        source = self._owners.index(owner)
        pages = self._index_keys[source]
        blocks, size = jax.tree.leaves(pages)[0].shape[1:3]
        column = groups.numbers // size
        block = jnp.take_along_axis(self._tables.reshape(len(column), -1), column, axis=1, mode="clip")
        # An unfinished group goes out of range and is dropped; a negative index would wrap (A19).
        block = jnp.where(groups.complete, block, blocks)
        stored: Any = entries
        keys: Any = index_keys
        if isinstance(pages, PackedIndexKeys):
            stored, keys = PackedEntries(*pack_fp4_kv(entries)), PackedIndexKeys(*pack_fp4_index(index_keys))
        elif self._arith.quantize_cache:
            stored, keys = fake_quant_fp4_kv(entries), fake_quant_fp4_index(index_keys)
        place = groups.numbers % size
        self._entries[source] = self._scatter(self._entries[source], block, place, stored)
        self._index_keys[source] = self._scatter(pages, block, place, keys)

    def entries(self, owner: int) -> PagedEntries:
        return PagedEntries(self._entries[self._owners.index(owner)], self._tables)

    def index_keys(self, owner: int) -> PagedIndexKeys:
        return PagedIndexKeys(self._index_keys[self._owners.index(owner)], self._tables, self._arith.dtype)

    def extend_open_group(self, owner: int, new: OpenGroup) -> OpenGroup:
        source = self._owners.index(owner)
        before, self._open_groups[source] = self._extend_rings(self._open_groups[source], new)
        return jax.tree.map(lambda old, new: jnp.concatenate([old, new], axis=1), before, new)

    def extend_ngrams(self, compressed: jax.Array) -> jax.Array:
        before, self._ngrams = self._extend_rings(self._ngrams, compressed)
        exist = positions_before(self.start, before.shape[1]) >= 0
        return jnp.concatenate([jnp.where(exist, before, DEAD), compressed], axis=1)

    def write_draft_window(self, layer: int, new: jax.Array) -> None:
        self._draft_windows[layer] = self._write_rings(self._draft_windows[layer], new)

    def finish(self) -> PagedCache:
        """The pools after this step."""
        return PagedCache(
            entries=tuple(self._entries),
            index_keys=tuple(self._index_keys),
            windows=tuple(self._windows),
            open_groups=tuple(self._open_groups),
            ngrams=self._ngrams,
            draft_windows=tuple(self._draft_windows),
        )

    def _extend_rings(self, rings: Any, new: Any) -> tuple[Any, Any]:
        """The rows before the new ones, in order of position, [batch, reach, ...], and the rings with the new ones.

        Rows of positions before the sequence are those of a former owner. rings, new: as for `_write_rings`.
        """

        def last_rows(ring: jax.Array) -> jax.Array:
            places = positions_before(self.start, ring.shape[2] - self._num_drafts) % ring.shape[2]
            places = places.reshape(*self._slots.shape, -1)
            return read_pool(ring, self._slots[..., None], places).reshape(-1, places.shape[2], *ring.shape[3:])

        # Reading comes first: XLA would keep a copy of the pool for a read that might come later.
        before, rings = jax.lax.optimization_barrier((jax.tree.map(last_rows, rings), rings))
        return before, self._write_rings(rings, new)

    def _write_rings(self, rings: Any, new: Any) -> Any:
        """The rings with the new rows, each at place position % length.

        rings: arrays [data, slots, length, ...] of one length.
        new: their rows, [batch, time, ...]; of a `PackedWindow` the keys, quantised already: packing them is exact.
        """
        slots, length = jax.tree.leaves(rings)[0].shape[1:3]
        offsets = jnp.arange(self._time, dtype=jnp.int32)[None]
        if length < self._time:  # only the last rows stay
            offsets = positions_before(self.lengths, length)
            rows, column = jnp.arange(len(offsets))[:, None], jnp.maximum(offsets, 0)
            new = jax.tree.map(lambda array: array[rows, column], new)
        slot = jnp.where((offsets >= 0) & (offsets < self.lengths[:, None]), self._slots.reshape(-1)[:, None], slots)
        stored = PackedWindow(*pack_fp8(new)) if isinstance(rings, PackedWindow) else new
        return self._scatter(rings, slot, (self.start[:, None] + offsets) % length, stored)

    def _slot_rows(self, array: jax.Array) -> jax.Array:
        """The rows' slots of array [data, slots, ...] -> [batch, ...]."""
        return read_pool(array, self._slots).reshape(-1, *array.shape[2:])

    def _scatter(self, pools: Any, first: jax.Array, second: jax.Array, values: Any) -> Any:
        """pools [data, n, m, ...] with values [batch, k, ...] at [first, second], int32 [batch, k]; n drops."""
        data = self._slots.shape[0]

        def split(array: jax.Array) -> jax.Array:
            return array.reshape(data, -1, *array.shape[2:])

        index = split(first), split(second)
        return jax.tree.map(lambda pool, value: write_pool(pool, index, split(value)), pools, values)
