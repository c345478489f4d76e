"""Named shapes that the tests, `make gpu-compile` and the benchmarks share."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .entries import PackedEntries, PagedEntries


@dataclass(frozen=True)
class Shape:
    """Sizes of one call of `sparse_attention`.

    Attributes:
        name: what tables call it.
        batch, time, heads, dim: shape of the query.
        sliding_window: keys that one query sees.
        window_slots: places of the window cache; `sliding_window + time` in a banded prefill.
        entries: compressed entries per sequence, 0 when the layer has none.
        k: picks per query.
        packed: entries are packed FP4, else of the query's dtype.
        dtype: "bfloat16" or "float32".
        banded: window keys stand in position order, as in a prefill.
        page: entries of one page, a divisor of `entries`; 0: entries lie in order, per sequence.
    """

    name: str
    batch: int
    time: int
    heads: int
    dim: int
    sliding_window: int
    window_slots: int
    entries: int
    k: int
    packed: bool = True
    dtype: str = "bfloat16"
    banded: bool = False
    page: int = 0

    @property
    def options(self) -> dict[str, Any]:
        """The static arguments of `sparse_attention` as the model sets them (model.md §5.3)."""
        return {
            "sliding_window": self.sliding_window,
            "scale": self.dim**-0.5,
            "round_probabilities": self.dtype == "bfloat16",
            "banded": self.banded,
        }

    @property
    def _lead(self) -> tuple[int, ...]:
        """Leading axes of the stored entries; one pool holds the pages of all sequences."""
        if self.page:
            return 1, self.batch * self.entries // self.page, self.page
        return self.batch, self.entries

    def abstract_arguments(self) -> tuple[Any, ...]:
        """The positional arguments of `sparse_attention` as `jax.ShapeDtypeStruct`s; nothing is allocated."""
        dtype = jnp.dtype(self.dtype)
        entries: Any = None
        picks = None
        if self.entries:
            picks = jax.ShapeDtypeStruct((self.batch, self.time, self.k), jnp.int32)
            if self.packed:
                codes: Any = jax.ShapeDtypeStruct((*self._lead, self.dim // 2), jnp.uint8)
                scales: Any = jax.ShapeDtypeStruct((*self._lead, self.dim // 16), jnp.uint8)
                entries = PackedEntries(codes, scales)
            else:
                entries = jax.ShapeDtypeStruct((*self._lead, self.dim), dtype)
            if self.page:
                tables: Any = jax.ShapeDtypeStruct((1, self.batch, self.entries // self.page), jnp.int32)
                entries = PagedEntries(entries, tables)
        return (
            jax.ShapeDtypeStruct((self.batch, self.time, self.heads, self.dim), dtype),
            jax.ShapeDtypeStruct((self.batch, self.window_slots, self.dim), dtype),
            jax.ShapeDtypeStruct((self.batch, self.window_slots), jnp.int32),
            entries,
            picks,
            jax.ShapeDtypeStruct((self.batch, self.time), jnp.int32),
            jax.ShapeDtypeStruct((self.heads,), jnp.float32),
        )

    def random_arguments(self, seed: int = 0) -> tuple[Any, ...]:
        """Concrete arguments: every sequence at its own length, full windows, `k` distinct picks per row."""
        rng = np.random.default_rng(seed)
        dtype = jnp.dtype(self.dtype)
        first = rng.integers(self.sliding_window, 4 * self.sliding_window, self.batch)
        horizon = first[:, None] + np.arange(self.time)
        if self.banded:
            positions = first[:, None] - self.sliding_window + np.arange(self.window_slots)
        else:  # a ring: slot = position mod slots, holding the newest positions
            newest = horizon[:, -1:]
            positions = newest - (newest - np.arange(self.window_slots)) % self.window_slots

        def normal(*shape: int) -> jax.Array:
            return jnp.asarray(rng.standard_normal(shape, np.float32), dtype)

        entries: Any = None
        picks = None
        if self.entries:
            numbers = np.full((self.batch, self.time, self.k), -1, np.int32)
            used = min(self.k, self.entries)
            for row in numbers.reshape(-1, self.k):
                row[:used] = np.sort(rng.choice(self.entries, used, replace=False))
            picks = jnp.asarray(numbers)
            if self.packed:
                codes = rng.integers(0, 256, (*self._lead, self.dim // 2), np.uint8)
                # e4m3 bits 0x28…0x37: scales between 1/4 and 1, so that values look like a normalised latent's
                scales = rng.integers(0x28, 0x38, (*self._lead, self.dim // 16), np.uint8)
                entries = PackedEntries(jnp.asarray(codes), jnp.asarray(scales))
            else:
                entries = normal(*self._lead, self.dim)
            if self.page:
                pages = rng.permutation(self.batch * self.entries // self.page).reshape(1, self.batch, -1)
                entries = PagedEntries(entries, jnp.asarray(pages, jnp.int32))
        return (
            normal(self.batch, self.time, self.heads, self.dim),
            normal(self.batch, self.window_slots, self.dim),
            jnp.asarray(positions, jnp.int32),
            entries,
            picks,
            jnp.asarray(horizon, jnp.int32),
            jnp.asarray(rng.standard_normal(self.heads), jnp.float32),
        )


# Decode at released sizes: 128 keys in a ring of 128 + 6 rows that speculation may roll back, 512 picks.
RELEASED_DECODE = (
    Shape("decode 1", 1, 1, 64, 512, 128, 134, 65_536, 512),
    Shape("decode 64", 64, 1, 64, 512, 128, 134, 8_192, 512),
    Shape("verify 16x6", 16, 6, 64, 512, 128, 134, 65_536, 512),
    Shape("decode 1M", 1, 1, 64, 512, 128, 134, 1_048_576, 512),
    Shape("decode 64, pages", 64, 1, 64, 512, 128, 134, 8_192, 512, page=64),
    Shape("decode, window only", 64, 1, 64, 512, 128, 134, 0, 0),
    Shape("decode 64, float", 64, 1, 64, 512, 128, 134, 8_192, 512, packed=False),
    Shape("decode 64, float32", 64, 1, 64, 512, 128, 134, 8_192, 512, dtype="float32"),
)

# Small models whose decode and prefill the tests and the CPU benchmark run: tests/golden and benchmarks/mid.json.
SMALL = (
    Shape("golden A decode", 2, 1, 4, 64, 16, 16, 40, 8, dtype="float32"),
    Shape("golden A decode, pages", 2, 1, 4, 64, 16, 16, 40, 8, dtype="float32", page=4),
    Shape("golden B verify", 2, 3, 6, 32, 12, 18, 29, 6, dtype="float32"),
    Shape("golden A prefill", 1, 64, 4, 64, 16, 80, 64, 8, packed=False, dtype="float32", banded=True),
    Shape("mid decode", 8, 1, 8, 128, 128, 134, 512, 128, dtype="float32"),
    Shape("mid prefill", 1, 512, 8, 128, 128, 640, 512, 128, packed=False, dtype="float32", banded=True),
)
