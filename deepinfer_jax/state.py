"""What a model keeps of its sequences on the device, as a declaration (design.md §3, §6).

A model declares a pytree with a `StateSpec` for each array; the pools are the same pytree with the arrays in their
places. What makes and moves state knows the declaration alone, so no kind of state can be forgotten.

What grows with a sequence lies in blocks of `tokens_per_block` tokens, which its block table names. What does not lies
in its slot, as rings over its last tokens: the row of position p lies at place p % length of the ring. The state of a
sequence of n tokens is the rows of its last `reach` positions, n - reach … n - 1. A ring has `rollback` more places, so
that a sequence may be shortened by as many tokens: it needs no work, since the rows beyond its end push none out that
it still needs, and are overwritten later.
"""

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from deepinfer_jax.sharding import over_data


@dataclasses.dataclass(frozen=True)
class CacheShape:
    """Sizes of the pools; each data index has so many blocks and slots of its own.

    Attributes:
        rollback: tokens by which a sequence may be shortened.
    """

    data: int
    slots: int
    blocks: int
    tokens_per_block: int
    rollback: int = 0


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
        """[data, blocks, *shape], or [data, slots, reach + rollback, *shape]."""
        if self.per == "block":
            return shape.data, shape.blocks, *self.shape
        return shape.data, shape.slots, self.reach + shape.rollback, *self.shape

    def nbytes(self, rollback: int = 0) -> int:
        """Bytes of one block or slot; with a rollback of 0 those of a slot are its sequence's state alone."""
        rows = 1 if self.per == "block" else self.reach + rollback
        return rows * math.prod(self.shape) * self.dtype.itemsize


def init_pools(declared: Any, shape: CacheShape, mesh: Mesh | None = None) -> Any:
    """Pools of zeros; with a mesh each data index lies on its own devices."""
    placement = over_data(mesh)
    return jax.tree.map(lambda spec: jnp.zeros(spec.pool_shape(shape), spec.dtype, device=placement), declared)
