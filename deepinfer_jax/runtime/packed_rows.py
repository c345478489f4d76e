"""Packed decode rows: the tokens of all sequences one behind the other, if not every draft has room."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from deepinfer_jax.kernels.pools import read_pool
from deepinfer_jax.runtime.paged_model import StepBatch


class PackedRows(NamedTuple):
    """Where each packed row is from, and where each sequence's rows are; a sequence's rows stand side by side.

    Attributes:
        sequence, offset: the row's sequence, and rows of it before this one. int32 [data, packed].
        used: bool [data, packed].
        first: each sequence's first row. int32 [data, sequences].
    """

    sequence: Array
    offset: Array
    used: Array
    first: Array

    def batch(self, beside: StepBatch, no_slot: int) -> StepBatch:
        """The tokens of `beside`, [data, sequences, time], as packed rows."""

        def of_sequence(array: Array) -> Array:
            return read_pool(array, self.sequence)

        return StepBatch(
            tokens=read_pool(beside.tokens, self.sequence, self.offset)[..., None],
            lengths=self.used.astype(jnp.int32),
            starts=of_sequence(beside.starts) + self.offset,
            slots=jnp.where(self.used, of_sequence(beside.slots), no_slot),
            tables=of_sequence(beside.tables),
            offsets=jnp.where(self.used, self.offset, 0),
        )

    def take[Tree](self, rows: Tree, time: int) -> Tree:
        """Arrays [data · sequences · time, ...] -> [data · packed, ...]."""
        data, index = len(self.sequence), self.sequence * time + self.offset

        def gathered(array: Array) -> Array:
            return read_pool(array.reshape(data, -1, *array.shape[1:]), index).reshape(index.size, *array.shape[1:])

        gathered_rows: Tree = jax.tree.map(gathered, rows)
        return gathered_rows

    def spread[Tree](self, rows: Tree, time: int) -> Tree:
        """Arrays [data · packed, ...] -> [data · sequences, time, ...]; anything where a sequence has no more rows."""
        data, sequences = self.first.shape
        index = self.first[..., None] + jnp.arange(time)

        def spread_out(array: Array) -> Array:
            by_rank = array.reshape(data, -1, *array.shape[1:])
            return read_pool(by_rank, index).reshape(data * sequences, time, *array.shape[1:])

        spread_rows: Tree = jax.tree.map(spread_out, rows)
        return spread_rows


def pack_rows(numbers: Array, packed: int) -> PackedRows:
    """numbers: rows of each sequence, int32 [data, sequences]; of each dp rank at most `packed` in all."""
    ends = jnp.cumsum(numbers, axis=1)
    index = jnp.arange(packed, dtype=jnp.int32)
    sequence = jnp.sum(ends[:, None] <= index[:, None], axis=2, dtype=jnp.int32)
    first = ends - numbers
    offset = index - read_pool(first, sequence)
    used = index < ends[:, -1:]
    return PackedRows(sequence, jnp.where(used, offset, 0), used, first)
