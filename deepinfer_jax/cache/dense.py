"""The cache of `forward`: a pytree of plain arrays, and its view (model.md Appendix A). `paged.py` has the engine's.

Each row of the batch has its own length, so rows of different ages share one cache.
"""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
from flax import struct

from deepinfer_jax.cache.rings import positions_before, ring_positions
from deepinfer_jax.cache.view import (
    Compressed,
    Groups,
    NewTokens,
    OpenGroup,
    WindowKeys,
    ordered_window,
    with_item,
)
from deepinfer_jax.config.layer_plan import layer_plans
from deepinfer_jax.config.model_config import ModelConfig
from deepinfer_jax.config.precision import PrecisionPolicy, precision_policy
from deepinfer_jax.kernels.formats import fake_quant_fp4_index, fake_quant_fp4_kv, pack_fp4_kv
from deepinfer_jax.kernels.sparse_attention import PackedEntries
from deepinfer_jax.tokenization.engram_hash import DEAD


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


def with_lengths_after(cache: Cache, lengths: jax.Array) -> Cache:
    """The cache with `lengths` more tokens in each row, int32 [batch]; one that would overflow ends at `max_length`."""
    return dataclasses.replace(cache, lengths=jnp.minimum(cache.lengths + lengths, cache.max_length))


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


@dataclasses.dataclass(frozen=True)
class DenseView:
    """`View` of a `Cache`; the cache's lengths stay those before the step.

    Attributes:
        new: the new tokens.
        sliding_window: keys that a ring holds.
        owners: the KV sources, in the order of the cache's tuples.
        quantize: entries and index keys are quantised.
        in_order: window keys always come in order of position, also in steps of one token.
    """

    new: NewTokens
    sliding_window: int
    owners: tuple[int, ...]
    quantize: bool
    in_order: bool

    @classmethod
    def of(
        cls,
        cache: Cache,
        lengths: jax.Array,
        time: int,
        config: ModelConfig,
        policy: PrecisionPolicy,
        *,
        in_order: bool = False,
    ) -> Self:
        """The view of `lengths` tokens, int32 [batch], behind those in the cache, in `time` columns."""
        new, text = NewTokens.at(cache.lengths, lengths, time), config.text
        return cls(new, text.sliding_window, text.kv_source_layer_ids, policy.quantize_cache, in_order)

    def last(self, lengths: jax.Array, time: int) -> Self:
        return dataclasses.replace(self, new=self.new.last(lengths, time))

    def window(self, cache: Cache, layer: int, keys: jax.Array) -> tuple[WindowKeys, Cache]:
        before, new = cache.windows[layer], self.new
        ring = self._write_ring(before, keys)
        cache = dataclasses.replace(cache, windows=with_item(cache.windows, layer, ring))
        if new.time == 1 and not self.in_order:
            # The one new key takes the place of the only key that it pushes out of the window.
            return WindowKeys(ring, ring_positions(new.start + new.lengths, self.sliding_window), banded=False), cache
        places = positions_before(new.start, self.sliding_window) % self.sliding_window
        return ordered_window(jnp.take_along_axis(before, places[..., None], axis=1), keys, new), cache

    def write_draft_window(self, cache: Cache, layer: int, keys: jax.Array) -> Cache:
        ring = self._write_ring(cache.draft_windows[layer], keys)
        return dataclasses.replace(cache, draft_windows=with_item(cache.draft_windows, layer, ring))

    def extend_open_group(self, cache: Cache, owner: int, new: OpenGroup) -> tuple[OpenGroup, Cache]:
        source = self.owners.index(owner)
        before = cache.open_groups[source]
        assert before is not None
        together = jax.tree.map(lambda old, new: jnp.concatenate([old, new], axis=1), before, new)
        left = jax.tree.map(self._last_rows, before, together)
        return together, dataclasses.replace(cache, open_groups=with_item(cache.open_groups, source, left))

    def write_entries(
        self, cache: Cache, owner: int, groups: Groups, entries: jax.Array, index_keys: jax.Array
    ) -> Cache:
        source = self.owners.index(owner)
        own, own_keys = cache.entries[source], cache.index_keys[source]
        rows = jnp.arange(groups.numbers.shape[0])[:, None]
        # An unfinished group goes out of range and is dropped; a negative index would wrap (A19).
        places = jnp.where(groups.complete, groups.numbers, own_keys.shape[1])
        if isinstance(own, PackedEntries):
            codes, scales = pack_fp4_kv(entries)
            own = PackedEntries(
                own.codes.at[rows, places].set(codes, mode="drop"),
                own.scales.at[rows, places].set(scales, mode="drop"),
            )
        else:
            own = own.at[rows, places].set(fake_quant_fp4_kv(entries) if self.quantize else entries, mode="drop")
        index_keys = fake_quant_fp4_index(index_keys) if self.quantize else index_keys
        own_keys = own_keys.at[rows, places].set(index_keys, mode="drop")
        return dataclasses.replace(
            cache,
            entries=with_item(cache.entries, source, own),
            index_keys=with_item(cache.index_keys, source, own_keys),
        )

    def compressed(self, cache: Cache, owner: int) -> Compressed:
        source = self.owners.index(owner)
        return Compressed(cache.entries[source], DenseIndexKeys(cache.index_keys[source]))

    def extend_ngrams(self, cache: Cache, compressed: jax.Array) -> tuple[jax.Array, Cache]:
        before = cache.ngrams
        assert before is not None
        together = jnp.concatenate([before, compressed], axis=1)
        return together, dataclasses.replace(cache, ngrams=self._last_rows(before, together))

    def _last_rows(self, before: jax.Array, together: jax.Array) -> jax.Array:
        """The last of [before | new tokens] after this step, as many as there were before."""
        last = self.new.lengths[:, None] + jnp.arange(before.shape[1], dtype=jnp.int32)
        return jnp.take_along_axis(together, last.reshape(*last.shape, *[1] * (before.ndim - 2)), axis=1)

    def _write_ring(self, ring: jax.Array, keys: jax.Array) -> jax.Array:
        new, window = self.new, self.sliding_window
        if new.time == 1:
            place = jnp.where(new.lengths > 0, new.start % window, window)
            return ring.at[jnp.arange(ring.shape[0]), place].set(keys[:, 0], mode="drop")
        # Of each place's newest token.
        offset = ring_positions(new.start + new.lengths, window) - new.start[:, None]
        taken = jnp.take_along_axis(keys, jnp.clip(offset, 0, new.time - 1)[..., None], axis=1)
        return jnp.where((offset >= 0)[..., None], taken, ring)
