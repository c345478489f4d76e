"""What a model keeps of its sequences on the device, as a declaration (design.md §3, §6).

A model declares a pytree with a `StateSpec` for each array; the pools are the same pytree with the arrays in their
places. What makes and moves state knows the declaration alone, so no kind of state can be forgotten.

What grows with a sequence lies in blocks of `tokens_per_block` tokens, which its block table names. What does not lies
in its slot, as rings over its last tokens: the row of position p lies at place p % length of the ring. The state of a
sequence of n tokens is the rows of its last `reach` positions, n - reach … n - 1. A ring has a place more for each
draft of a step, so that a sequence may be shortened by all of them: it needs no work, since the rows beyond its end
push none out that it still needs, and are overwritten later.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from deepinfer_jax.kernels.pools import read_pool, write_pool
from deepinfer_jax.weights.sharding import over_data


@dataclasses.dataclass(frozen=True)
class CacheShape:
    """Sizes of the pools; each dp rank has so many blocks and slots of its own.

    Attributes:
        num_drafts: tokens drafted per step, by as many of which a sequence may be shortened.
    """

    data: int
    slots: int
    blocks: int
    tokens_per_block: int
    num_drafts: int = 0


@dataclasses.dataclass(frozen=True)
class StateSpec:
    """One kind of state.

    Attributes:
        name: unique in its declaration, e.g. "windows.3.codes".
        per: whether it grows with the tokens ("block") or belongs to a running sequence ("slot").
        shape: of what a block holds, or of the row of one token.
        dtype: as stored.
        reach: rows that a slot's state has; 0 for a block.
    """

    name: str
    per: Literal["block", "slot"]
    shape: tuple[int, ...]
    dtype: jnp.dtype
    reach: int = 0

    def pool_shape(self, shape: CacheShape) -> tuple[int, ...]:
        """[data, blocks, *shape], or [data, slots, reach + num_drafts, *shape]."""
        if self.per == "block":
            return shape.data, shape.blocks, *self.shape
        return shape.data, shape.slots, self.reach + shape.num_drafts, *self.shape

    def nbytes(self, num_drafts: int = 0) -> int:
        """Bytes of one block or slot; without drafts those of a slot are its sequence's state alone."""
        rows = 1 if self.per == "block" else self.reach + num_drafts
        return rows * math.prod(self.shape) * self.dtype.itemsize


def init_pools(declared: Any, shape: CacheShape, mesh: Mesh | None = None) -> Any:
    """Pools of zeros; with a mesh each dp rank lies on its own devices."""
    placement = over_data(mesh)
    return jax.tree.map(lambda spec: jnp.zeros(spec.pool_shape(shape), spec.dtype, device=placement), declared)


def slot_bytes(declared: Any) -> int:
    """Bytes of the state of one sequence, as `read_slots` gives them."""
    return sum(spec.nbytes() for spec in jax.tree.leaves(declared) if spec.per == "slot")


def block_bytes(declared: Any) -> int:
    """Bytes of one block, as `read_blocks` gives them."""
    return sum(spec.nbytes() for spec in jax.tree.leaves(declared) if spec.per == "block")


def read_slots(declared: Any, cache: Any, slots: jax.Array, lengths: jax.Array) -> jax.Array:
    """The state of sequences in order of position: the same bytes for any `num_drafts`, whatever lay there before.

    Args:
        slots: where they are. int32 [data, k].
        lengths: tokens that they have. int32 [data, k].

    Returns:
        uint8 [data, k, slot_bytes]; zeros in rows of positions before the sequence.
    """

    def read(spec: StateSpec, ring: jax.Array) -> jax.Array:
        positions = _last_positions(lengths, spec)
        rows = _bytes(_read_alone(ring, slots[..., None], positions % ring.shape[2]), 3)
        return jnp.where(positions[..., None] >= 0, rows, 0)

    return _read("slot", declared, cache, read)


def write_slots(declared: Any, cache: Any, slots: jax.Array, lengths: jax.Array, states: jax.Array) -> Any:
    """The cache with the states uint8 [data, k, slot_bytes] of `read_slots`, of the same lengths, in these slots.

    A slot out of range is dropped. slots, lengths: int32 [data, k].
    """

    def write(spec: StateSpec, ring: jax.Array, state: jax.Array) -> jax.Array:
        positions = _last_positions(lengths, spec)
        slot = jnp.where(positions >= 0, slots[..., None], ring.shape[1])
        rows = _array(state, (*positions.shape, *spec.shape), spec.dtype)
        return write_pool(ring, (slot, positions % ring.shape[2]), rows)

    return _write("slot", declared, cache, states, write)


def read_blocks(declared: Any, cache: Any, blocks: jax.Array) -> jax.Array:
    """Blocks int32 [data, k] -> uint8 [data, k, block_bytes]."""
    return _read("block", declared, cache, lambda spec, pool: _bytes(_read_alone(pool, blocks), 2))


def write_blocks(declared: Any, cache: Any, blocks: jax.Array, contents: jax.Array) -> Any:
    """The cache with contents uint8 [data, k, block_bytes] of `read_blocks` in blocks int32 [data, k].

    A block out of range is dropped.
    """

    def write(spec: StateSpec, pool: jax.Array, content: jax.Array) -> jax.Array:
        return write_pool(pool, (blocks,), _array(content, (*blocks.shape, *spec.shape), spec.dtype))

    return _write("block", declared, cache, contents, write)


def poison(declared: Any, cache: Any, blocks: jax.Array, slots: jax.Array) -> Any:
    """The cache with these blocks and slots, int32 [data, k] each, full of what must never be read.

    Floats are NaN; bytes 0xFF, which is NaN as e4m3 and as e8m0; other integers the least that there is.
    """

    def poisoned(spec: StateSpec, pool: jax.Array) -> jax.Array:
        numbers = blocks if spec.per == "block" else slots
        values = jnp.full((*numbers.shape, *pool.shape[2:]), _poison(spec.dtype), spec.dtype)
        return write_pool(pool, (numbers,), values)

    return jax.tree.map(poisoned, declared, cache)


def _poison(dtype: jnp.dtype) -> Any:
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.nan
    return 0xFF if dtype == jnp.uint8 else np.iinfo(dtype).min


def _last_positions(lengths: jax.Array, spec: StateSpec) -> jax.Array:
    """int32 [data, k] -> [data, k, reach]; negative where the sequence is shorter."""
    return lengths[..., None] - spec.reach + jnp.arange(spec.reach, dtype=jnp.int32)


def _read_alone(pool: jax.Array, *index: jax.Array) -> jax.Array:
    """`read_pool` as an operation of its own: XLA:CPU takes three times as long for one fused with what follows."""
    return jax.lax.optimization_barrier(read_pool(pool, *index))


def _read(per: str, declared: Any, cache: Any, read: Callable[[StateSpec, jax.Array], jax.Array]) -> jax.Array:
    """All that `read` finds in the arrays of one kind, uint8 [data, k, ...] each, as one string of bytes."""
    arrays = zip(jax.tree.leaves(declared), jax.tree.leaves(cache), strict=True)
    found = [read(spec, array) for spec, array in arrays if spec.per == per]
    return jnp.concatenate([part.reshape(*part.shape[:2], -1) for part in found], axis=2)


def _write(
    per: str,
    declared: Any,
    cache: Any,
    content: jax.Array,
    write: Callable[[StateSpec, jax.Array, jax.Array], jax.Array],
) -> Any:
    """The cache with `write` applied to each array of one kind and its part of `content`, uint8 [data, k, n]."""
    specs, (arrays, structure) = jax.tree.leaves(declared), jax.tree.flatten(cache)
    first = 0
    for place, spec in enumerate(specs):
        if spec.per == per:
            arrays[place] = write(spec, arrays[place], content[:, :, first : first + spec.nbytes()])
            first += spec.nbytes()
    return jax.tree.unflatten(structure, arrays)


def _bytes(array: jax.Array, lead: int) -> jax.Array:
    """The bytes of an array; its first `lead` axes stay."""
    return jax.lax.bitcast_convert_type(array, jnp.uint8).reshape(*array.shape[:lead], -1)


def _array(content: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """Inverse of `_bytes`."""
    item = () if dtype.itemsize == 1 else (dtype.itemsize,)
    return jax.lax.bitcast_convert_type(content.reshape(*shape, *item), dtype)
