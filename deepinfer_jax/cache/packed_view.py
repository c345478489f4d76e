"""A step's reads and writes on the paged cache, where a sequence has several of its rows."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from deepinfer_jax.cache.paged import PackedWindow
from deepinfer_jax.cache.paged_view import PagedView
from deepinfer_jax.kernels.formats import pack_fp8


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedView(PagedView):
    """`PagedView` of rows of one token each; those of one sequence stand side by side in order of position.

    Every row writes before any reads, and reads by position. So a row sees those before it as if they had been steps of
    their own; what those behind it wrote lies, in the rings, in the places for drafts that no row of the step may see.
    Only what `_extend_rings` reads was in the rings before the step; of it the step's own tokens take their places.

    Attributes:
        offsets: rows of the same sequence before each row, at most `num_drafts`. int32 [data, rows].
    """

    offsets: jax.Array

    def _extend_rings(self, rings: Any, values: Any) -> tuple[Any, Any]:
        before, rings = super()._extend_rings(rings, values)
        stored = PackedWindow(*pack_fp8(values)) if isinstance(rings, PackedWindow) else values
        return jax.tree.map(self._with_own_step, before, stored), rings

    def _with_own_step(self, before: jax.Array, values: jax.Array) -> jax.Array:
        """The rows before each row [batch, reach, ...], with those of this step, [batch, 1, ...], where they are."""
        reach = before.shape[1]
        by_index = values.reshape(*self.offsets.shape, *values.shape[2:])
        for back in range(1, min(reach, self.num_drafts) + 1):
            # Each dp rank by itself: none looks into another's rows.
            earlier = jnp.roll(by_index, back, axis=1).reshape(len(before), *values.shape[2:])
            in_step = (self.offsets >= back).reshape(len(before), *[1] * (values.ndim - 2))
            before = before.at[:, reach - back].set(jnp.where(in_step, earlier, before[:, reach - back]))
        return before
