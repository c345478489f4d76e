"""Compressed KV entries: a float array, or the cache's own packed FP4."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from deepinfer_jax.kernels.formats import unpack_fp4_kv


class PackedEntries(NamedTuple):
    """Compressed KV in storage format, 0.5625 bytes per value (model.md §2.4, §5.9).

    Attributes:
        codes: uint8 [batch, entries, dim / 2]: two e2m1 codes per byte, the even channel in the low nibble.
        scales: uint8 [batch, entries, dim / 16]: the bits of one e4m3 scale per 16 channels.
    """

    codes: jax.Array
    scales: jax.Array


type Entries = jax.Array | PackedEntries


def entry_count(entries: Entries) -> int:
    """Number of entries per sequence, unused ones included."""
    return (entries.codes if isinstance(entries, PackedEntries) else entries).shape[1]


def unpack_entries(entries: Entries, dtype: DTypeLike) -> jax.Array:
    """All entries as `dtype` [batch, ..., dim]; exact for bfloat16 and float32 (model.md §2.4)."""
    if isinstance(entries, PackedEntries):
        return unpack_fp4_kv(entries.codes, entries.scales, dtype)
    return entries.astype(dtype)


def take_entries(entries: Entries, numbers: jax.Array) -> Entries:
    """The entries with these `numbers` [batch, rows, k] (all in range), in the same format [batch, rows, k, ...]."""
    return jax.tree.map(lambda array: _take_rows(array, numbers), entries)


def _take_rows(array: jax.Array, numbers: jax.Array) -> jax.Array:
    batch = jnp.arange(array.shape[0])[:, None, None]
    return array.at[batch, numbers].get(mode="promise_in_bounds")
