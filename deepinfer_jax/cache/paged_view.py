"""One step's reads and writes on the paged cache, where each row is a sequence of its own."""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from deepinfer_jax.cache.paged import PackedIndexKeys, PackedWindow, PagedCache
from deepinfer_jax.cache.rings import positions_before, ring_positions
from deepinfer_jax.cache.view import (
    Compressed,
    Groups,
    NewTokens,
    OpenGroup,
    WindowKeys,
    ordered_window,
    with_item,
)
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
    """Window keys as they are stored -> [batch, keys, head_dim] of `dtype`."""
    return unpack_fp8(*keys, dtype) if isinstance(keys, PackedWindow) else keys


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedView:
    """`View` of a `PagedCache`. The rows of a step are those of all dp ranks one after another, batch = data · rows.

    An idle row has no tokens and a slot out of range.

    Attributes:
        new: the new tokens.
        tables: blocks of each row. int32 [data, rows, width].
        slots: slot of each row. int32 [data, rows].
        dtype: of the keys that are handed out.
        quantize: entries and index keys are quantised, packed or not.
        num_drafts: places of a ring beyond those that a row may see.
        owners: the KV sources, in the order of the cache's tuples.
        in_order: window keys always come in order of position, also in steps of one token.
    """

    new: NewTokens
    tables: jax.Array
    slots: jax.Array
    dtype: DTypeLike
    quantize: bool
    num_drafts: int
    owners: tuple[int, ...]
    in_order: bool

    @classmethod
    def of(
        cls,
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
        **own: jax.Array,
    ) -> Self:
        """The view of `lengths` tokens from `starts` on, int32 [data, rows] each, in `time` columns.

        own: attributes of a subclass.
        """
        return cls(
            new=NewTokens.at(starts.reshape(-1), lengths.reshape(-1), time),
            tables=tables,
            slots=slots,
            dtype=policy.dtype,
            quantize=policy.quantize_cache,
            num_drafts=jax.tree.leaves(cache.windows)[0].shape[2] - config.text.sliding_window,
            owners=config.text.kv_source_layer_ids,
            in_order=in_order,
            **own,
        )

    def last(self, lengths: jax.Array, time: int) -> Self:
        return dataclasses.replace(self, new=self.new.last(lengths, time))

    def window(self, cache: PagedCache, layer: int, keys: jax.Array) -> tuple[WindowKeys, PagedCache]:
        rings, new = cache.windows[layer], self.new
        if new.time == 1 and not self.in_order:
            # The new key pushes out none that a row may still see: all are read as they lie.
            rings = self._write_rings(rings, keys)
            seen = _unpacked(jax.tree.map(self._slot_rows, rings), self.dtype)
            shown = WindowKeys(seen, ring_positions(new.start + new.lengths, seen.shape[1]), banded=False)
        else:
            before, rings = self._extend_rings(rings, keys)
            shown = ordered_window(_unpacked(before, self.dtype), keys, new)
        return shown, dataclasses.replace(cache, windows=with_item(cache.windows, layer, rings))

    def write_draft_window(self, cache: PagedCache, layer: int, keys: jax.Array) -> PagedCache:
        rings = self._write_rings(cache.draft_windows[layer], keys)
        return dataclasses.replace(cache, draft_windows=with_item(cache.draft_windows, layer, rings))

    def extend_open_group(self, cache: PagedCache, owner: int, new: OpenGroup) -> tuple[OpenGroup, PagedCache]:
        source = self.owners.index(owner)
        before, rings = self._extend_rings(cache.open_groups[source], new)
        together = jax.tree.map(lambda old, new: jnp.concatenate([old, new], axis=1), before, new)
        return together, dataclasses.replace(cache, open_groups=with_item(cache.open_groups, source, rings))

    def write_entries(
        self, cache: PagedCache, owner: int, groups: Groups, entries: jax.Array, index_keys: jax.Array
    ) -> PagedCache:
        source = self.owners.index(owner)
        pages = cache.index_keys[source]
        blocks, size = jax.tree.leaves(pages)[0].shape[1:3]
        column = groups.numbers // size
        block = jnp.take_along_axis(self.tables.reshape(len(column), -1), column, axis=1, mode="clip")
        # An unfinished group goes out of range and is dropped; a negative index would wrap (A19).
        block = jnp.where(groups.complete, block, blocks)
        stored: Any = entries
        keys: Any = index_keys
        if isinstance(pages, PackedIndexKeys):
            stored, keys = PackedEntries(*pack_fp4_kv(entries)), PackedIndexKeys(*pack_fp4_index(index_keys))
        elif self.quantize:
            stored, keys = fake_quant_fp4_kv(entries), fake_quant_fp4_index(index_keys)
        place = groups.numbers % size
        stored = self._scatter(cache.entries[source], block, place, stored)
        keys = self._scatter(pages, block, place, keys)
        return dataclasses.replace(
            cache,
            entries=with_item(cache.entries, source, stored),
            index_keys=with_item(cache.index_keys, source, keys),
        )

    def compressed(self, cache: PagedCache, owner: int) -> Compressed:
        source = self.owners.index(owner)
        index_keys = PagedIndexKeys(cache.index_keys[source], self.tables, self.dtype)
        return Compressed(PagedEntries(cache.entries[source], self.tables), index_keys)

    def extend_ngrams(self, cache: PagedCache, compressed: jax.Array) -> tuple[jax.Array, PagedCache]:
        before, rings = self._extend_rings(cache.ngrams, compressed)
        exist = positions_before(self.new.start, before.shape[1]) >= 0
        together = jnp.concatenate([jnp.where(exist, before, DEAD), compressed], axis=1)
        return together, dataclasses.replace(cache, ngrams=rings)

    def _extend_rings(self, rings: Any, values: Any) -> tuple[Any, Any]:
        """The rows before the new ones, in order of position, [batch, reach, ...], and the rings with the new ones.

        Rows of positions before the sequence are those of a former owner. rings, values: as for `_write_rings`.
        """

        def last_rows(ring: jax.Array) -> jax.Array:
            places = positions_before(self.new.start, ring.shape[2] - self.num_drafts) % ring.shape[2]
            places = places.reshape(*self.slots.shape, -1)
            return read_pool(ring, self.slots[..., None], places).reshape(-1, places.shape[2], *ring.shape[3:])

        # Reading comes first: XLA would keep a copy of the pool for a read that might come later.
        before, rings = jax.lax.optimization_barrier((jax.tree.map(last_rows, rings), rings))
        return before, self._write_rings(rings, values)

    def _write_rings(self, rings: Any, values: Any) -> Any:
        """The rings with the new rows, each at place position % length.

        rings: arrays [data, slots, length, ...] of one length.
        values: the new rows, [batch, time, ...]; of a `PackedWindow` the keys, quantised already: packing is exact.
        """
        slots, length = jax.tree.leaves(rings)[0].shape[1:3]
        offsets = jnp.arange(self.new.time, dtype=jnp.int32)[None]
        if length < self.new.time:  # only the last rows stay
            offsets = positions_before(self.new.lengths, length)
            rows, column = jnp.arange(len(offsets))[:, None], jnp.maximum(offsets, 0)
            values = jax.tree.map(lambda array: array[rows, column], values)
        slot = jnp.where((offsets >= 0) & (offsets < self.new.lengths[:, None]), self.slots.reshape(-1)[:, None], slots)
        stored = PackedWindow(*pack_fp8(values)) if isinstance(rings, PackedWindow) else values
        return self._scatter(rings, slot, (self.new.start[:, None] + offsets) % length, stored)

    def _slot_rows(self, array: jax.Array) -> jax.Array:
        """The rows' slots of array [data, slots, ...] -> [batch, ...]."""
        return read_pool(array, self.slots).reshape(-1, *array.shape[2:])

    def _scatter(self, pools: Any, first: jax.Array, second: jax.Array, values: Any) -> Any:
        """pools [data, n, m, ...] with values [batch, k, ...] at [first, second], int32 [batch, k]; n drops."""
        data = self.slots.shape[0]

        def split(array: jax.Array) -> jax.Array:
            return array.reshape(data, -1, *array.shape[2:])

        index = split(first), split(second)
        return jax.tree.map(lambda pool, value: write_pool(pool, index, split(value)), pools, values)
