"""What the forward pass asks of a cache (model.md Appendix A; design.md §6). `dense.py` and `paged_view.py` answer.

A view knows where the new tokens of one step stand and nothing that changes: it takes the cache as a value and returns
the cache with what it wrote. So a layer is a function, and whoever calls it decides which cache goes on.
"""

from typing import NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp
from flax import struct

from deepinfer_jax.cache.rings import positions_before
from deepinfer_jax.kernels.sparse_attention import Entries


class NewTokens(NamedTuple):
    """The tokens that one step adds to each row.

    Attributes:
        start: position of each row's first new token. int32 [batch].
        lengths: new tokens of each row. int32 [batch].
        positions: of each new token, −1 for padding. int32 [batch, time].
    """

    start: jax.Array
    lengths: jax.Array
    positions: jax.Array

    @classmethod
    def at(cls, start: jax.Array, lengths: jax.Array, time: int) -> Self:
        """`lengths` tokens from `start` on, int32 [batch] each, in `time` columns."""
        offsets = jnp.arange(time, dtype=jnp.int32)
        return cls(start, lengths, jnp.where(offsets < lengths[:, None], start[:, None] + offsets, -1))

    @property
    def time(self) -> int:
        """Columns of the step."""
        return self.positions.shape[1]

    def last(self, lengths: jax.Array, time: int) -> "NewTokens":
        """Each row's last `lengths` of them, int32 [batch], in `time` columns."""
        return NewTokens.at(self.start + self.lengths - lengths, lengths, time)


class WindowKeys(NamedTuple):
    """The keys of a layer that its new tokens may see in their window.

    Attributes:
        keys: [batch, slots, head_dim].
        positions: of each key, −1: none. int32 [batch, slots].
        banded: they lie as [previous window | new tokens] (`banded` of `sparse_attention`).
    """

    keys: jax.Array
    positions: jax.Array
    banded: bool


class IndexKeys(Protocol):
    """Index keys of one KV source.

    Attributes:
        count: places for keys per row; which of them exist follows from positions alone.
        block: `part` takes multiples of it.
    """

    @property
    def count(self) -> int: ...

    @property
    def block(self) -> int: ...

    def part(self, first: jax.Array, size: int) -> jax.Array:
        """Keys first … first + size − 1 of every row, [batch, size, index_dim]; any numbers beyond `count`."""


class Compressed(NamedTuple):
    """All that one KV source has compressed so far; which entries exist follows from positions alone."""

    entries: Entries
    index_keys: IndexKeys


@struct.dataclass
class OpenGroup:
    """Tokens in order of position, of which the last may belong to an unfinished group.

    Attributes:
        kv: κ, fp32 [batch, tokens, head_dim].
        gate: γ, fp32 [batch, tokens, head_dim].
    """

    kv: jax.Array
    gate: jax.Array


@struct.dataclass
class Groups:
    """Groups that may have been completed by the new tokens, by absolute parity (T14).

    Attributes:
        latents: RMS-normed, unrotated. [batch, groups, head_dim].
        numbers: entry number of each. int32 [batch, groups].
        complete: bool [batch, groups].
    """

    latents: jax.Array
    numbers: jax.Array
    complete: jax.Array


class View[C](Protocol):
    """Where the new tokens of one step stand in a cache of type C, and its three kinds of memory:

    * windows, of every layer and of every draft layer: `window`, `write_draft_window`;
    * what KV sources compressed, and the open group that is still to be: `extend_open_group`, `write_entries`,
      `compressed`;
    * the compressed ids of the last tokens: `extend_ngrams`.

    Each method returns what it read, then the cache with what it wrote.

    Attributes:
        new: the new tokens.
    """

    @property
    def new(self) -> NewTokens: ...

    def last(self, lengths: jax.Array, time: int) -> Self:
        """The view of each row's last `lengths` new tokens, int32 [batch], in `time` columns."""

    def window(self, cache: C, layer: int, keys: jax.Array) -> tuple[WindowKeys, C]:
        """Writes the new keys of a layer; gives those that its new tokens may see.

        keys: quantised as the cache keeps them. [batch, time, head_dim].
        """

    def write_draft_window(self, cache: C, layer: int, keys: jax.Array) -> C:
        """Writes a draft layer's context keys of the new tokens, [batch, time, head_dim]."""

    def extend_open_group(self, cache: C, owner: int, new: OpenGroup) -> tuple[OpenGroup, C]:
        """Appends the new tokens of a KV source; gives the last ratio − 1 before them and them."""

    def write_entries(self, cache: C, owner: int, groups: Groups, entries: jax.Array, index_keys: jax.Array) -> C:
        """Quantises and writes completed groups of a KV source. entries, index_keys: [batch, groups, dim]."""

    def compressed(self, cache: C, owner: int) -> Compressed:
        """What a KV source has compressed (T1: the owner's, also on steps that complete no group)."""

    def extend_ngrams(self, cache: C, compressed: jax.Array) -> tuple[jax.Array, C]:
        """Appends the new tokens' compressed ids; gives history and new ids, int32 [batch, ngram - 1 + time]."""


def ordered_window(before: jax.Array, keys: jax.Array, new: NewTokens) -> WindowKeys:
    """[previous window | new keys] in order of position.

    before: [batch, window, dim], of the positions before the new tokens; keys: [batch, time, dim].
    """
    earlier = jnp.maximum(positions_before(new.start, before.shape[1]), -1)
    together = jnp.concatenate([before, keys], axis=1)
    return WindowKeys(together, jnp.concatenate([earlier, new.positions], axis=1), banded=True)


def with_item[T](items: tuple[T, ...], index: int, item: T) -> tuple[T, ...]:
    """The tuple with another item at `index` ≥ 0."""
    return (*items[:index], item, *items[index + 1 :])
