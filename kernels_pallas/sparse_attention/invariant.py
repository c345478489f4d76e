"""Sparse attention with the same bits for any batch, chunk and capacity: one query row at a time, in one shape."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from deepinfer_jax.kernels.rowwise import batch_invariant, isolated

from .entries import Entries, PagedEntries, entry_count, flat_pages, physical_entries
from .reference import sparse_attention_reference


def sparse_attention_invariant(
    query: jax.Array,
    window: jax.Array,
    window_positions: jax.Array,
    entries: Entries | None,
    picks: jax.Array | None,
    horizon: jax.Array,
    sink: jax.Array,
    *,
    sliding_window: int,
    scale: float,
    round_probabilities: bool,
    banded: bool = False,
) -> jax.Array:
    """`sparse_attention` (see the package).

    A row sees `sliding_window` keys (`banded`) or all slots, and as many entries as it has places for picks. It is
    invariant if these numbers, the order of its window keys and its picks are.
    """
    batch, time, heads, _ = query.shape
    if heads == 1:  # a product of a matrix and a vector would depend on the length of the loop (`dot.matmul`)
        query, sink = jnp.repeat(query, 2, axis=2), jnp.repeat(sink, 2)
    attend = functools.partial(
        sparse_attention_reference, sliding_window=sliding_window, scale=scale, round_probabilities=round_probabilities
    )
    pools, places = (None, None) if entries is None or picks is None else _places(entries, picks)

    def row(number: jax.Array) -> jax.Array:
        sequence, step = number // time, number % time

        def own(array: jax.Array) -> jax.Array:
            return lax.dynamic_slice(array, (sequence, step, *[0] * (array.ndim - 2)), (1, 1, *array.shape[2:]))

        def slots(array: jax.Array) -> jax.Array:
            array = lax.dynamic_slice_in_dim(array, sequence, 1)
            return lax.dynamic_slice_in_dim(array, step + 1, sliding_window, axis=1) if banded else array

        taken = numbers = None
        if places is not None:
            place = own(places)[0]  # [1, k]
            taken = jax.tree.map(lambda pool: pool[sequence * pool.shape[0] // batch, jnp.maximum(place, 0)], pools)
            numbers = jnp.where(place >= 0, jnp.arange(place.shape[1]), -1)[None]
        arguments = own(query), slots(window), slots(window_positions), taken, numbers, own(horizon), sink
        return isolated(attend, *arguments)[0, 0]

    with batch_invariant(True):
        result = lax.map(row, jnp.arange(batch * time))
    return result[:, :heads].reshape(batch, time, heads, -1)


def _places(entries: Entries, picks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Pools [owners, places, ...], batch / owners rows to each, and where in its pool each pick lies, −1 for none."""
    numbers = jnp.where(picks < entry_count(entries), picks, -1)
    if isinstance(entries, PagedEntries):
        return jax.tree.map(flat_pages, entries.pages), physical_entries(entries, numbers)
    return entries, numbers  # type: ignore[return-value]
