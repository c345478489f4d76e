"""What the device remembers of each running sequence between steps, besides the cache.

The next step takes what it needs of the last one from here (lengths, last tokens), so the host may launch it without
having read any result. Block tables and sampling parameters lie here too: a step sends only what changed.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array
from jax.sharding import Mesh

from deepinfer_jax.kernels.pools import read_pool, write_pool
from deepinfer_jax.sampling import SamplingRows
from deepinfer_jax.sharding import over_data
from deepinfer_jax.state import CacheShape


@struct.dataclass
class SlotTable:
    """One row per slot of each data index; the slot of an idle row is out of range, so its writes are dropped.

    Attributes:
        lengths: tokens of the sequence that the cache holds. int32 [data, slots].
        last_token: the newest token, at position `lengths`. int32 [data, slots].
        blocks: block tables; the number of blocks where there is none. int32 [data, slots, width].
        temperature, top_p: float32 [data, slots].
        top_k: int32 [data, slots].
        greedy: bool [data, slots].
        seed: uint32 [data, slots, 2], low and high word of `seq_seed`.
    """

    lengths: Array
    last_token: Array
    blocks: Array
    temperature: Array
    top_p: Array
    top_k: Array
    greedy: Array
    seed: Array


def init_slot_table(shape: CacheShape, width: int, mesh: Mesh | None = None) -> SlotTable:
    """All slots empty, block tables of `width` blocks."""
    placement = over_data(mesh)

    def filled(value: float, dtype: jax.typing.DTypeLike, *more: int) -> Array:
        return jnp.full((shape.data, shape.slots, *more), value, dtype, device=placement)

    return SlotTable(
        lengths=filled(0, jnp.int32),
        last_token=filled(0, jnp.int32),
        blocks=filled(shape.blocks, jnp.int32, width),
        temperature=filled(1, jnp.float32),
        top_p=filled(1, jnp.float32),
        top_k=filled(-1, jnp.int32),
        greedy=filled(True, jnp.bool_),
        seed=filled(0, jnp.uint32, 2),
    )


def grow_blocks(blocks: Array, slots: Array, first: Array, new: Array) -> Array:
    """Block tables [data, slots, width] with new blocks int32 [data, rows, k] (−1: none) from place `first` on."""
    places = first[..., None] + jnp.arange(new.shape[2], dtype=jnp.int32)
    places = jnp.where(new >= 0, places, blocks.shape[2])  # out of range and dropped; −1 would wrap (A19)

    return write_pool(blocks, (slots[..., None], places), new)


def with_sampling(table: SlotTable, slots: Array, column: dict[str, Array]) -> SlotTable:
    """The slot table with the sampling parameters of some rows: slots int32 [data, rows], a column for each of them."""
    return dataclasses.replace(
        table,
        temperature=write_pool(table.temperature, (slots,), column["temperature"]),
        top_p=write_pool(table.top_p, (slots,), column["top_p"]),
        top_k=write_pool(table.top_k, (slots,), column["top_k"]),
        greedy=write_pool(table.greedy, (slots,), column["greedy"] != 0),
        seed=write_pool(table.seed, (slots,), jnp.stack([column["seed_low"], column["seed_high"]], axis=-1)),
    )


def sampling_rows(table: SlotTable, slots: Array, position: Array, banned: Array, forced: Array) -> SamplingRows:
    """What the rows int32 [data, rows] sample by, in one row axis [data · rows]."""

    def of(array: Array) -> Array:
        rows = read_pool(array, slots)
        return rows.reshape(-1, *rows.shape[2:])

    return SamplingRows(
        temperature=of(table.temperature),
        greedy=of(table.greedy) | (slots.reshape(-1) >= table.greedy.shape[1]),  # an idle row draws nothing
        top_p=of(table.top_p),
        top_k=of(table.top_k),
        seed=of(table.seed),
        position=position.reshape(-1),
        banned=banned.reshape(-1),
        forced=forced.reshape(-1),
    )
