"""A step's reads and writes on the paged cache, if a sequence has several of its rows."""

from typing import Any

import jax
import jax.numpy as jnp

from deepinfer_jax.cache.paged import PackedWindow
from deepinfer_jax.cache.paged_view import PagedView
from deepinfer_jax.kernels.formats import pack_fp8


class PackedView(PagedView):
    """`PagedView` of rows of one token each; those of one sequence stand side by side in order of position.

    Every row writes before any reads, and reads by position. So a row sees those before it as if they had been steps of
    their own; what those behind it wrote lies, in the rings, in the places for drafts that no row of the step may see.
    Only what `_extend_rings` reads was in the rings before the step; of it the step's own tokens take their places.
    """

    def __init__(self, *arguments: Any, offsets: jax.Array, in_order: bool = False) -> None:
        """As of `PagedView`, time being 1; offsets: rows of the same sequence before each row, int32 [data, rows], at
        most `num_drafts`."""
        super().__init__(*arguments, in_order=in_order)
        self._offsets = offsets

    def _extend_rings(self, rings: Any, new: Any) -> tuple[Any, Any]:
        before, rings = super()._extend_rings(rings, new)
        stored = PackedWindow(*pack_fp8(new)) if isinstance(rings, PackedWindow) else new
        return jax.tree.map(self._with_own_step, before, stored), rings

    def _with_own_step(self, before: jax.Array, new: jax.Array) -> jax.Array:
        """The rows before each row [batch, reach, ...], with those of this step, [batch, 1, ...], where they are."""
        reach = before.shape[1]
        by_index = new.reshape(*self._offsets.shape, *new.shape[2:])
        for back in range(1, min(reach, self._num_drafts) + 1):
            # Each dp rank by itself: none looks into another's rows.
            earlier = jnp.roll(by_index, back, axis=1).reshape(len(before), *new.shape[2:])
            in_step = (self._offsets >= back).reshape(len(before), *[1] * (new.ndim - 2))
            before = before.at[:, reach - back].set(jnp.where(in_step, earlier, before[:, reach - back]))
        return before
