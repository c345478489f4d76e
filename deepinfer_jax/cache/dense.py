"""What a sequence keeps on the device between steps (model.md Appendix A; design.md §6): the three questions that the
forward pass asks of it (`View`), and its dense form. `paged.py` has the paged one.

Each row of the batch has its own length, so rows of different ages share one cache.
"""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp
from flax import struct

from deepinfer_jax.config.layer_plan import layer_plans
from deepinfer_jax.config.model_config import ModelConfig
from deepinfer_jax.config.precision import PrecisionPolicy, precision_policy
from deepinfer_jax.kernels.formats import fake_quant_fp4_index, fake_quant_fp4_kv, pack_fp4_kv
from deepinfer_jax.kernels.sparse_attention import PackedEntries, PagedEntries
from deepinfer_jax.tokenization.engram_hash import DEAD


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


class View(Protocol):
    """One step's reads and writes; every write is visible to later reads of the same step.

    Attributes:
        start: position of each row's first new token. int32 [batch].
        lengths: new tokens of each row. int32 [batch].
        positions: of each new token, -1 for padding. int32 [batch, time].
    """

    start: jax.Array
    lengths: jax.Array
    positions: jax.Array

    def last(self, lengths: jax.Array, time: int) -> Self:
        """A view of each row's last `lengths` new tokens, int32 [batch], in `time` columns.

        Rings and pools are shared: either view reads what the other writes.
        """

    def run_if[T](self, needed: jax.Array, run: Callable[[Self], T], otherwise: T) -> T:
        """`run` on this view, with all that it writes, if `needed`, bool []; else `otherwise`.

        Of this view `run` may write windows and draft windows only.
        """

    def window(self, layer: int, new: jax.Array) -> tuple[jax.Array, jax.Array, bool]:
        """Writes the new keys of a layer and returns the keys that its rows may see.

        Args:
            new: quantised as the cache keeps them. [batch, time, head_dim].

        Returns:
            keys [batch, slots, head_dim], their positions int32 [batch, slots] (−1: none), and whether they lie as
            [previous window | new tokens] (`banded` of `sparse_attention`).
        """

    def write_entries(self, owner: int, groups: Groups, entries: jax.Array, index_keys: jax.Array) -> None:
        """Quantises and stores completed groups of a KV source. entries, index_keys: [batch, groups, dim]."""

    def entries(self, owner: int) -> jax.Array | PackedEntries | PagedEntries:
        """All compressed entries of a KV source; which of them exist follows from positions alone."""

    def index_keys(self, owner: int) -> IndexKeys:
        """All index keys of a KV source (T1: the owner's, also on steps that complete no group)."""

    def extend_open_group(self, owner: int, new: OpenGroup) -> OpenGroup:
        """Appends this step's tokens of a KV source; returns the last ratio − 1 before them and them."""

    def extend_ngrams(self, compressed: jax.Array) -> jax.Array:
        """Appends this step's compressed ids; returns history and new ids, int32 [batch, ngram - 1 + time]."""

    def write_draft_window(self, layer: int, new: jax.Array) -> None:
        """Stores draft context keys of the new tokens. new: [batch, time, head_dim]."""


@struct.dataclass
class Cache:
    """State of a batch of sequences.

    Attributes:
        lengths: tokens that each row holds. int32 [batch].
        windows: per backbone layer, the last `sliding_window` keys as a ring, slot = position % window.
            [batch, window, head_dim].
        entries: per KV source, compressed KV. [batch, max_length // ratio, head_dim] in the float32 precisions,
            `PackedEntries` (FP4 codes and e4m3 scales) otherwise.
        index_keys: per KV source. [batch, max_length // ratio, index_dim].
        open_groups: per KV source; None at ratio 1.
        ngrams: compressed ids of the last n-gram − 1 tokens, DEAD where there is none. int32 [batch, ngram - 1];
            None without Engram layers.
        draft_windows: per draft layer, context keys as a ring. [batch, window, head_dim].
        max_length: tokens that a row can hold (static).
        precision: the precision that the cache was made for (static).
    """

    lengths: jax.Array
    windows: tuple[jax.Array, ...]
    entries: tuple[jax.Array | PackedEntries, ...]
    index_keys: tuple[jax.Array, ...]
    open_groups: tuple[OpenGroup | None, ...]
    ngrams: jax.Array | None
    draft_windows: tuple[jax.Array, ...]
    max_length: int = struct.field(pytree_node=False)
    precision: str = struct.field(pytree_node=False)


def init_cache(config: ModelConfig, batch: int, max_length: int, *, precision: str = "reference") -> Cache:
    """An empty cache for `batch` sequences of at most `max_length` tokens.

    Raises:
        ValueError: a size is not positive, or there is no such precision.
    """
    if batch < 1 or max_length < 1:
        raise ValueError(f"init_cache needs at least one row and one token, got batch={batch}, max_length={max_length}")
    text, policy = config.text, precision_policy(config, precision)
    window = (batch, text.sliding_window, text.head_dim)
    ratios = [plan.ratio for plan in layer_plans(text) if plan.is_kv_source]
    packed = policy.is_low and policy.quantize_cache

    def entries(count: int) -> jax.Array | PackedEntries:
        if packed:
            return PackedEntries(
                codes=jnp.zeros((batch, count, text.head_dim // 2), jnp.uint8),
                scales=jnp.zeros((batch, count, text.head_dim // 16), jnp.uint8),
            )
        return jnp.zeros((batch, count, text.head_dim), policy.dtype)

    def open_group(ratio: int) -> OpenGroup | None:
        if ratio == 1:
            return None
        shape = (batch, ratio - 1, text.head_dim)
        return OpenGroup(jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32))

    return Cache(
        lengths=jnp.zeros(batch, jnp.int32),
        windows=tuple(jnp.zeros(window, policy.dtype) for _ in range(text.num_hidden_layers)),
        entries=tuple(entries(max_length // ratio) for ratio in ratios),
        index_keys=tuple(
            jnp.zeros((batch, max_length // ratio, text.index_head_dim), policy.dtype) for ratio in ratios
        ),
        open_groups=tuple(open_group(ratio) for ratio in ratios),
        ngrams=jnp.full((batch, text.engram_max_ngram_size - 1), DEAD, jnp.int32) if text.engram_layer_ids else None,
        draft_windows=tuple(jnp.zeros(window, policy.dtype) for _ in range(text.num_nextn_predict_layers)),
        max_length=max_length,
        precision=precision,
    )


@dataclasses.dataclass(frozen=True)
class DenseIndexKeys:
    """`IndexKeys` that lie in order. keys: [batch, count, index_dim]."""

    keys: jax.Array
    block = 1

    @property
    def count(self) -> int:
        return self.keys.shape[1]

    def part(self, first: jax.Array, size: int) -> jax.Array:
        if size == self.count:
            return self.keys
        return jnp.take(self.keys, first + jnp.arange(size), axis=1, mode="clip")


class NewRows:
    """The new tokens of a step as a view knows them; subclasses keep what is written in lists.

    start, lengths: int32 [batch]; time: columns.
    """

    _windows: list[Any]
    _draft_windows: list[Any]

    def __init__(self, start: jax.Array, lengths: jax.Array, time: int) -> None:
        self.start = start
        self.lengths = lengths
        self._time = time
        self.positions = new_positions(start, lengths, time)

    def last(self, lengths: jax.Array, time: int) -> Self:
        view = copy.copy(self)  # not deep: both have the same lists
        NewRows.__init__(view, self.start + self.lengths - lengths, lengths, time)
        return view

    def run_if[T](self, needed: jax.Array, run: Callable[[Self], T], otherwise: T) -> T:
        def run_on(windows: list[Any], draft_windows: list[Any]) -> tuple[T, list[Any], list[Any]]:
            view = copy.copy(self)
            view._windows, view._draft_windows = list(windows), list(draft_windows)
            return run(view), view._windows, view._draft_windows

        before = self._windows, self._draft_windows
        result, self._windows[:], self._draft_windows[:] = jax.lax.cond(
            needed, run_on, lambda *windows: (otherwise, *windows), *before
        )
        return result


class CacheView(NewRows):
    """`View` of a dense cache.

    in_order: window keys always come in order of position, also in steps of one token.
    """

    def __init__(
        self,
        cache: Cache,
        lengths: jax.Array,
        time: int,
        config: ModelConfig,
        policy: PrecisionPolicy,
        *,
        in_order: bool = False,
    ) -> None:
        super().__init__(cache.lengths, lengths, time)
        self._in_order = in_order
        self._cache = cache
        self._arith = policy
        self._window = config.text.sliding_window
        self._owners = config.text.kv_source_layer_ids
        self._windows = list(cache.windows)
        self._entries = list(cache.entries)
        self._index_keys = list(cache.index_keys)
        self._open_groups = list(cache.open_groups)
        self._draft_windows = list(cache.draft_windows)
        self._ngrams = cache.ngrams

    def window(self, layer: int, new: jax.Array) -> tuple[jax.Array, jax.Array, bool]:
        ring = self._windows[layer]
        self._windows[layer] = self._write_ring(ring, new)
        if self._time == 1 and not self._in_order:
            # The one new key takes the slot of the only key that it pushes out of the window.
            return self._windows[layer], ring_positions(self.start + self.lengths, self._window), False
        places = positions_before(self.start, self._window) % self._window
        before = jnp.take_along_axis(ring, places[..., None], axis=1)
        return *ordered_window(before, new, self.start, self.positions), True

    def write_entries(self, owner: int, groups: Groups, entries: jax.Array, index_keys: jax.Array) -> None:
        source = self._owners.index(owner)
        capacity = self._index_keys[source].shape[1]
        rows = jnp.arange(groups.numbers.shape[0])[:, None]
        # An unfinished group goes out of range and is dropped; a negative index would wrap (A19).
        slots = jnp.where(groups.complete, groups.numbers, capacity)
        quantize = self._arith.quantize_cache
        stored = self._entries[source]
        if isinstance(stored, PackedEntries):
            codes, scales = pack_fp4_kv(entries)
            self._entries[source] = PackedEntries(
                stored.codes.at[rows, slots].set(codes, mode="drop"),
                stored.scales.at[rows, slots].set(scales, mode="drop"),
            )
        else:
            entries = fake_quant_fp4_kv(entries) if quantize else entries
            self._entries[source] = stored.at[rows, slots].set(entries, mode="drop")
        index_keys = fake_quant_fp4_index(index_keys) if quantize else index_keys
        self._index_keys[source] = self._index_keys[source].at[rows, slots].set(index_keys, mode="drop")

    def entries(self, owner: int) -> jax.Array | PackedEntries:
        return self._entries[self._owners.index(owner)]

    def index_keys(self, owner: int) -> DenseIndexKeys:
        return DenseIndexKeys(self._index_keys[self._owners.index(owner)])

    def extend_open_group(self, owner: int, new: OpenGroup) -> OpenGroup:
        source = self._owners.index(owner)
        before = self._open_groups[source]
        assert before is not None
        together = jax.tree.map(lambda old, new: jnp.concatenate([old, new], axis=1), before, new)
        self._open_groups[source] = jax.tree.map(self._last_rows, before, together)
        return together

    def extend_ngrams(self, compressed: jax.Array) -> jax.Array:
        assert self._ngrams is not None
        together = jnp.concatenate([self._ngrams, compressed], axis=1)
        self._ngrams = self._last_rows(self._ngrams, together)
        return together

    def write_draft_window(self, layer: int, new: jax.Array) -> None:
        self._draft_windows[layer] = self._write_ring(self._draft_windows[layer], new)

    def finish(self) -> Cache:
        """The cache after this step; rows that would overflow keep their length at `max_length`."""
        return dataclasses.replace(
            self._cache,
            lengths=jnp.minimum(self.start + self.lengths, self._cache.max_length),
            windows=tuple(self._windows),
            entries=tuple(self._entries),
            index_keys=tuple(self._index_keys),
            open_groups=tuple(self._open_groups),
            ngrams=self._ngrams,
            draft_windows=tuple(self._draft_windows),
        )

    def _last_rows(self, before: jax.Array, together: jax.Array) -> jax.Array:
        """The last of [before | new tokens] after this step, as many as there were before."""
        last = self.lengths[:, None] + jnp.arange(before.shape[1], dtype=jnp.int32)
        return jnp.take_along_axis(together, last.reshape(*last.shape, *[1] * (before.ndim - 2)), axis=1)

    def _write_ring(self, ring: jax.Array, new: jax.Array) -> jax.Array:
        if self._time == 1:
            slot = jnp.where(self.lengths > 0, self.start % self._window, self._window)
            return ring.at[jnp.arange(ring.shape[0]), slot].set(new[:, 0], mode="drop")
        # Of each slot's newest token.
        offset = ring_positions(self.start + self.lengths, self._window) - self.start[:, None]
        taken = jnp.take_along_axis(new, jnp.clip(offset, 0, self._time - 1)[..., None], axis=1)
        return jnp.where((offset >= 0)[..., None], taken, ring)


def new_positions(start: jax.Array, lengths: jax.Array, time: int) -> jax.Array:
    """Positions of new tokens from `start` on, −1 for padding. start, lengths: int32 [batch] -> int32 [batch, time]."""
    offsets = jnp.arange(time, dtype=jnp.int32)
    return jnp.where(offsets < lengths[:, None], start[:, None] + offsets, -1)


def ring_positions(end: jax.Array, window: int) -> jax.Array:
    """Position of the newest token in each slot of a ring that holds positions below `end`, −1 if there is none.

    end: int32 [batch] -> int32 [batch, window]. Example: end 5, window 4 -> [4, 1, 2, 3].
    """
    last = end[:, None] - 1
    newest = last - (last - jnp.arange(window, dtype=jnp.int32)) % window
    return jnp.maximum(newest, -1)


def positions_before(start: jax.Array, count: int) -> jax.Array:
    """The positions start − count … start − 1, negative ones included. int32 [batch] -> int32 [batch, count]."""
    return start[:, None] - count + jnp.arange(count, dtype=jnp.int32)


def ordered_window(
    before: jax.Array, new: jax.Array, start: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """[previous window | new keys] in order of position, and their positions (−1: none).

    before: [batch, window, dim], of the positions before `start`; new: [batch, time, dim]; start: int32 [batch], of the
    first new one; positions: int32 [batch, time], −1 for padding -> [batch, window + time, dim], int32 [batch, window +
    time].
    """
    earlier = jnp.maximum(positions_before(start, before.shape[1]), -1)
    return jnp.concatenate([before, new], axis=1), jnp.concatenate([earlier, positions], axis=1)
