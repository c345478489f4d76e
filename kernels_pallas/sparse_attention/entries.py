"""Compressed KV entries: a float array, the cache's own packed FP4, or either in pages."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from deepinfer_jax.kernels.formats import unpack_fp4_kv
from deepinfer_jax.kernels.pools import read_pool


class PackedEntries(NamedTuple):
    """Compressed KV in storage format, 0.5625 bytes per value (model.md §2.4, §5.9).

    Attributes:
        codes: uint8 [batch, entries, dim / 2]: two e2m1 codes per byte, the even channel in the low nibble.
        scales: uint8 [batch, entries, dim / 16]: the bits of one e4m3 scale per 16 channels.
    """

    codes: jax.Array
    scales: jax.Array


class PagedEntries(NamedTuple):
    """Compressed KV in pools of pages, found through page tables. The batch is `data` equal parts, each with a pool
    of its own.

    Attributes:
        pages: [data, pages, entries per page, dim], or `PackedEntries` of such leading axes.
        tables: int32 [data, rows, width], batch = data · rows: entry j of a row lies at place j % page size of page
            tables[..., j // page size]. Numbers out of range are never read for a visible entry.
    """

    pages: jax.Array | PackedEntries
    tables: jax.Array


type Entries = jax.Array | PackedEntries | PagedEntries


def entry_count(entries: Entries) -> int:
    """Number of entries per sequence, unused ones included."""
    if isinstance(entries, PagedEntries):
        return entries.tables.shape[2] * page_size(entries)
    return (entries.codes if isinstance(entries, PackedEntries) else entries).shape[1]


def page_size(entries: PagedEntries) -> int:
    """Entries of one page."""
    return jax.tree.leaves(entries.pages)[0].shape[2]


def unpack_entries(entries: Entries, dtype: DTypeLike) -> jax.Array:
    """All entries as `dtype` [batch, ..., dim]; exact for bfloat16 and float32 (model.md §2.4)."""
    if isinstance(entries, PagedEntries):
        pages = unpack_entries(jax.tree.map(lambda pool: read_pool(pool, entries.tables), entries.pages), dtype)
        return pages.reshape(-1, entry_count(entries), pages.shape[-1])
    if isinstance(entries, PackedEntries):
        return unpack_fp4_kv(entries.codes, entries.scales, dtype)
    return entries.astype(dtype)


def take_entries(entries: Entries, numbers: jax.Array) -> jax.Array | PackedEntries:
    """The entries with these `numbers` [batch, rows, k] (all in range), in storage format [batch, rows, k, ...]."""
    if not isinstance(entries, PagedEntries):
        taken: jax.Array | PackedEntries = jax.tree.map(lambda array: _take_rows(array, numbers), entries)
        return taken
    places = physical_entries(entries, numbers).reshape(entries.tables.shape[0], -1)

    def take(pool: jax.Array) -> jax.Array:
        return read_pool(flat_pages(pool), places).reshape(*numbers.shape, *pool.shape[3:])

    taken = jax.tree.map(take, entries.pages)
    return taken


def physical_entries(entries: PagedEntries, numbers: jax.Array) -> jax.Array:
    """Places in `flat_pages` of entries `numbers` [batch, rows, k] of each row; what is negative becomes −1."""
    size = page_size(entries)
    tables = entries.tables.reshape(-1, entries.tables.shape[2])
    column = jnp.maximum(numbers, 0) // size
    page = jnp.take_along_axis(tables, column.reshape(len(tables), -1), axis=1, mode="clip").reshape(numbers.shape)
    return jnp.where(numbers >= 0, page * size + numbers % size, -1)


def flat_pages(pool: jax.Array) -> jax.Array:
    """[data, pages, entries per page, ...] -> [data, pages · entries per page, ...]."""
    return pool.reshape(pool.shape[0], -1, *pool.shape[3:])


def _take_rows(array: jax.Array, numbers: jax.Array) -> jax.Array:
    batch = jnp.arange(array.shape[0])[:, None, None]
    return array.at[batch, numbers].get(mode="promise_in_bounds")
