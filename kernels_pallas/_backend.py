"""The Pallas dialect: the only file that names it, so that a move to another one touches only this file.

Pallas-Triton is deprecated since jax 0.11 but is the one dialect whose single source compiles for A100, H100 and
B200 alike and is interpreted on CPU (JX §0.3); `pyproject.toml` therefore keeps jax below 0.13.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

load = pltriton.load
store = pltriton.store
program_id = pl.program_id
when = pl.when

# Offsets into a one-byte array are computed in 32 signed bits unless the array exceeds 2^32 bytes (jax 0.12).
WRAPPING_BYTES = range(2**31 + 1, 2**32 + 1)


def inline_ptx(ptx: str, arguments: list[jax.Array], constraints: str, *, pack: int) -> jax.Array:
    """`pack` elements at a time through some PTX: bfloat16 of the arguments' shape. Not for the interpreter."""
    result = jax.ShapeDtypeStruct(arguments[0].shape, jnp.bfloat16)
    [value] = pltriton.elementwise_inline_asm(
        ptx, args=arguments, constraints=constraints, pack=pack, result_shape_dtypes=[result]
    )
    return value


def load_rows(ref: Any, lead: tuple[jax.Array, ...], rows: jax.Array, real: jax.Array, columns: range) -> jax.Array:
    """`ref[*lead, rows, columns]` as [rows, columns]; a row that is not `real` is not read and gives 0."""
    return pltriton.load(_part(ref, lead, rows, columns), mask=real[:, None], other=0)


def store_rows(
    ref: Any,
    lead: tuple[jax.Array, ...],
    rows: jax.Array,
    real: jax.Array,
    columns: range,
    values: jax.Array,
) -> None:
    """`ref[*lead, rows, columns] = values` for the rows that are `real`."""
    pltriton.store(_part(ref, lead, rows, columns), values, mask=real[:, None])


def _part(ref: Any, lead: tuple[jax.Array, ...], rows: jax.Array, columns: range) -> Any:
    # Index arrays for both axes: the interpreter of jax 0.12 takes no mixture of index arrays and slices.
    return ref.at[(*lead, rows[:, None], (columns.start + jnp.arange(len(columns)))[None, :])]


def whole_array_call(
    kernel: Callable[..., None],
    *,
    name: str,
    grid: tuple[int, ...],
    out_shape: jax.ShapeDtypeStruct,
    num_warps: int,
    num_stages: int,
    interpret: bool,
) -> Callable[..., Any]:
    """A `pallas_call` whose references cover whole arrays: the kernel itself computes what it loads and stores.

    `compiler_params` is always given: without it the dialect differs between jax versions (JX §1.2).
    """
    return pl.pallas_call(
        kernel,
        name=name,
        grid=grid,
        out_shape=out_shape,
        compiler_params=pltriton.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
    )
