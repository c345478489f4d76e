"""Batch invariance: rows whose results depend on no other row, to the bit (design.md §7, JX §0.9).

For every shape XLA picks its own order of sums, and whether a product and a sum become one fused multiply-add. So
where batch invariance is asked for, rows go through functions of one fixed shape, walled off from their surroundings;
what is left between them (moving, comparing and selecting numbers, the quantisers of formats.py) is exact in any shape.
"""

import contextlib
import contextvars
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

TILE_ROWS = 16
"""Rows that are computed together: enough for an efficient product, few enough to pad a single row to."""

_enabled: contextvars.ContextVar[bool] = contextvars.ContextVar("batch_invariant", default=False)


@contextlib.contextmanager
def batch_invariant(enabled: bool) -> Iterator[None]:
    """A scope of tracing, as that of `jax.default_matmul_precision`, in which `rowwise` and `isolated` take effect.

    To be entered inside a jitted function, from a static argument of it: the compiled program then always is the one
    that was asked for.
    """
    token = _enabled.set(enabled)
    try:
        yield
    finally:
        _enabled.reset(token)


def is_batch_invariant() -> bool:
    """Whether what is being traced has to be batch invariant."""
    return _enabled.get()


def rowwise[**P, T](function: Callable[P, T], *, lead: int = 2) -> Callable[P, T]:
    """`function`, which treats every row by itself; in a scope, in tiles of `TILE_ROWS` rows. Also as a decorator.

    Args:
        function: from arrays [*leading, ...] to a tree of arrays [*leading, ...].
        lead: how many axes number the rows.

    Returns:
        A function of the same arguments, with the same results up to rounding. Positional ones are trees of arrays with
        the same `lead` leading axes, which `function` sees as (1, …, 1, TILE_ROWS). What all rows share (weights,
        settings) comes by keyword or is closed over; whatever is computed outside and differs between shapes must be
        among the rows.
    """

    @functools.wraps(function)
    def of_all_rows(*rows: P.args, **shared: P.kwargs) -> T:
        if not _enabled.get():
            return function(*rows, **shared)
        leading = jax.tree.leaves(rows)[0].shape[:lead]
        count = math.prod(leading)
        tiles = -(-count // TILE_ROWS)

        def split(array: jax.Array) -> jax.Array:
            rest = array.shape[lead:]
            padding = [(0, tiles * TILE_ROWS - count)] + [(0, 0)] * len(rest)
            padded = jnp.pad(array.reshape(count, *rest), padding)
            return padded.reshape(tiles, *[1] * (lead - 1), TILE_ROWS, *rest)

        def join(array: jax.Array) -> jax.Array:
            rest = array.shape[1 + lead :]
            return array.reshape(tiles * TILE_ROWS, *rest)[:count].reshape(*leading, *rest)

        of_tile = functools.partial(function, **shared)
        tiled = lax.map(lambda tile: isolated(of_tile, *tile), jax.tree.map(split, rows))
        result: T = jax.tree.map(join, tiled)
        return result

    return of_all_rows


def isolated[T](function: Callable[..., T], *arrays: Any) -> T:
    """`function(*arrays)`; in a scope, compiled as if it stood alone.

    XLA unrolls a loop of one round and would then fuse its body with what comes before and after.
    """
    if not _enabled.get():
        return function(*arrays)
    with batch_invariant(False):  # what the function calls is within one shape already
        result: T = lax.optimization_barrier(function(*lax.optimization_barrier(arrays)))
    return result
