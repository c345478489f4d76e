"""Sparse attention in plain XLA: the definition (model.md §5.3) and the path of every backend without a kernel."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from deepinfer_jax.kernels.dot import contract
from deepinfer_jax.kernels.rounding import round_to
from deepinfer_jax.kernels.tiling import join_time, pad_time, split_time

from .entries import Entries, entry_count, take_entries, unpack_entries

# Query rows computed together. The temporaries of a long prefill are those of one tile: never [time, k, dim].
TILE_ROWS = 32
# Floor of the maximum: an empty key set has a finite maximum (model.md §5.3).
LOGIT_FLOOR = -1e30
# exp(88) is about the largest float32. Beyond it the quotient is 0 in float32 with or without this ceiling, but
# an infinite denominator would make the gradient of an empty key set 0 * inf.
SINK_CEILING = 88.0


def sparse_attention_reference(
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
    """`sparse_attention` (see the package) on any backend; differentiable in query, window, float entries, sink."""
    time = query.shape[1]
    keys, broken = _separate_broken(window)
    slots = (keys, broken, window_positions)
    # With at most k entries, one masked product over all of them moves less than a gather per row; at 4 k the
    # gather is already two to four times faster on CPU. Static: shapes decide.
    shared = None
    if entries is not None and picks is not None and entry_count(entries) <= picks.shape[-1]:
        shared = _separate_broken(unpack_entries(entries, query.dtype))

    def attend(
        query: jax.Array,
        horizon: jax.Array,
        picks: jax.Array | None,
        slots: tuple[jax.Array, jax.Array, jax.Array],
    ) -> jax.Array:
        """Some rows [batch, rows, heads, dim] against the slots that hold all their window keys."""
        query = jnp.where((horizon >= 0)[..., None, None], query, 0)
        branches = [_window_branch(query, *slots, horizon, scale, sliding_window)]
        if entries is not None and picks is not None:
            picked = (horizon >= 0)[..., None] & (picks >= 0) & (picks < entry_count(entries))
            if shared is not None:
                branches.append(_dense_branch(query, *shared, picks, picked, scale))
            else:
                branches.append(_gather_branch(query, entries, picks, picked, scale))
        return round_to(_softmax_product(branches, sink, round_probabilities), query.dtype)

    if time <= TILE_ROWS:
        return attend(query, horizon, picks, slots)

    tiles = -(-time // TILE_ROWS)
    padding = tiles * TILE_ROWS - time
    rows = (
        split_time(query, TILE_ROWS, 0),
        split_time(horizon, TILE_ROWS, -1),
        None if picks is None else split_time(picks, TILE_ROWS, -1),
    )
    slots = (pad_time(keys, padding, 0), pad_time(broken, padding, False), pad_time(window_positions, padding, -1))

    def attend_tile(number: jax.Array, rows: tuple[jax.Array, jax.Array, jax.Array | None]) -> jax.Array:
        keys, broken, positions = slots
        if banded:
            near = functools.partial(
                jax.lax.dynamic_slice_in_dim,
                start_index=number * TILE_ROWS,
                slice_size=TILE_ROWS + sliding_window,
                axis=1,
            )
            keys, broken, positions = near(keys), near(broken), near(positions)
        return attend(*rows, (keys, broken, positions))

    # checkpoint: a backward pass recomputes one tile at a time instead of keeping every tile's probabilities.
    attend_tile = jax.checkpoint(attend_tile, prevent_cse=False)
    result = jax.lax.map(lambda tile: attend_tile(*tile), (jnp.arange(tiles), rows))
    return join_time(result, time)


@dataclass(frozen=True)
class _Branch:
    """Some keys of every row.

    Attributes:
        logits: float32 [batch, rows, heads, keys]: -inf where key j is invisible, NaN where visible and broken.
        keys: their values, all finite, [batch, keys, dim] or, gathered per row, [batch, rows, keys, dim].
    """

    logits: jax.Array
    keys: jax.Array


def _window_branch(
    query: jax.Array,
    keys: jax.Array,
    broken: jax.Array,
    positions: jax.Array,
    horizon: jax.Array,
    scale: float,
    sliding_window: int,
) -> _Branch:
    position, last = positions[:, None, :], horizon[:, :, None]
    visible = (position >= 0) & (position <= last) & (position > last - sliding_window)
    return _branch(query, keys, visible, broken[:, None, :], scale)


def _gather_branch(query: jax.Array, entries: Entries, picks: jax.Array, picked: jax.Array, scale: float) -> _Branch:
    taken = take_entries(entries, jnp.where(picked, picks, 0))
    keys, broken = _separate_broken(unpack_entries(taken, query.dtype))
    return _branch(query, keys, picked, broken, scale)


def _dense_branch(
    query: jax.Array,
    keys: jax.Array,
    broken: jax.Array,
    picks: jax.Array,
    picked: jax.Array,
    scale: float,
) -> _Branch:
    batch = jnp.arange(picks.shape[0])[:, None, None]
    row = jnp.arange(picks.shape[1])[None, :, None]
    entries = keys.shape[1]
    numbers = jnp.where(picked, picks, entries)  # out of range and dropped; -1 would wrap (A19)
    visible = jnp.zeros((*picks.shape[:2], entries), bool).at[batch, row, numbers].set(True, mode="drop")
    return _branch(query, keys, visible, broken[:, None, :], scale)


def _branch(query: jax.Array, keys: jax.Array, visible: jax.Array, broken: jax.Array, scale: float) -> _Branch:
    logits = contract(f"brhd,{_axes(keys)}->brhk", query, keys) * scale
    logits = jnp.where(broken[:, :, None, :], jnp.nan, logits)
    return _Branch(jnp.where(visible[:, :, None, :], logits, -jnp.inf), keys)


def _softmax_product(branches: list[_Branch], sink: jax.Array, round_probabilities: bool) -> jax.Array:
    """o_n = Σ_j e_j·k_j / (Σ_j e_j + exp(sink_n − M)) over all branches, float32 [batch, rows, heads, dim]."""
    highest = functools.reduce(jnp.maximum, [branch.logits.max(axis=-1, initial=LOGIT_FLOOR) for branch in branches])
    highest = jax.lax.stop_gradient(highest)  # M cancels in the quotient
    denominator = jnp.exp(jnp.minimum(sink - highest, SINK_CEILING))
    numerator = jnp.zeros((), jnp.float32)
    for branch in branches:
        weights = jnp.exp(branch.logits - highest[..., None])
        denominator += weights.sum(axis=-1)
        if round_probabilities:  # only before the product: the denominator keeps float32 e_j
            weights = round_to(weights, jnp.bfloat16)
        numerator += contract(f"brhk,{_axes(branch.keys)}->brhd", weights, branch.keys)
    return numerator / denominator[..., None]


def _axes(keys: jax.Array) -> str:
    """The axes of keys, [batch, keys, dim] if all rows share them, else [batch, rows, keys, dim]."""
    return "bkd" if keys.ndim == 3 else "brkd"


def _separate_broken(keys: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Finite keys [..., dim], and which keys [...] held NaN or infinity.

    0 * NaN is NaN: a broken key must reach the rows that see it and no other, neither through their sums nor
    through their gradients.
    """
    finite = jnp.isfinite(keys)
    return jnp.where(finite, keys, 0), ~finite.all(axis=-1)
