"""What the device remembers of each running sequence between steps, besides the cache.

The next step takes what it needs of the last one from here (lengths, last tokens), so the host may launch it without
having read any result. Block tables and sampling parameters lie here too: a step sends only what changed.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array
from jax.sharding import Mesh

from deepinfer_jax.cache.pools import CacheShape
from deepinfer_jax.kernels.pools import write_pool
from deepinfer_jax.runtime.slot_drafts import SlotDrafts, init_slot_drafts
from deepinfer_jax.runtime.slot_sampling import SlotSampling, init_adjustments, init_slot_sampling
from deepinfer_jax.sampling import Adjustments
from deepinfer_jax.weights.sharding import over_data


@struct.dataclass
class SlotTable:
    """One row per slot of each dp rank; the slot of an idle row is out of range, so its writes are dropped.

    Attributes:
        lengths: tokens of the sequence that the cache holds. int32 [data, slots].
        limit: the most tokens that the cache may hold of it. int32 [data, slots].
        last_token: the newest token, at position `lengths`. int32 [data, slots].
        blocks: block tables; the number of blocks where there is none. int32 [data, slots, width].
        sampling: how each slot's sequence samples.
        adjustments: what changes its logits; see `init_adjustments`.
        drafts: behind the last token, for the next step to verify; None without drafts.
    """

    lengths: Array
    limit: Array
    last_token: Array
    blocks: Array
    sampling: SlotSampling
    adjustments: Adjustments
    drafts: SlotDrafts | None


def init_slot_table(shape: CacheShape, width: int, vocab_size: int, mesh: Mesh | None = None) -> SlotTable:
    """All slots empty, block tables of `width` blocks; `shape.num_drafts` drafts each."""
    placement = over_data(mesh)

    def filled(value: float, dtype: jax.typing.DTypeLike, *more: int) -> Array:
        return jnp.full((shape.data, shape.slots, *more), value, dtype, device=placement)

    return SlotTable(
        lengths=filled(0, jnp.int32),
        limit=filled(0, jnp.int32),
        last_token=filled(0, jnp.int32),
        blocks=filled(shape.blocks, jnp.int32, width),
        sampling=init_slot_sampling(filled),
        adjustments=init_adjustments(filled, vocab_size, 1 + shape.num_drafts),
        drafts=init_slot_drafts(filled, shape.num_drafts, vocab_size) if shape.num_drafts else None,
    )


def grow_blocks(blocks: Array, slots: Array, first: Array, new: Array) -> Array:
    """Block tables [data, slots, width] with new blocks int32 [data, rows, k] (−1: none) from place `first` on."""
    places = first[..., None] + jnp.arange(new.shape[2], dtype=jnp.int32)
    places = jnp.where(new >= 0, places, blocks.shape[2])  # out of range and dropped; −1 would wrap (A19)

    return write_pool(blocks, (slots[..., None], places), new)
