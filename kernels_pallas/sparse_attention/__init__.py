"""Sparse attention: sliding window + picked compressed entries + sinks (model.md §5.3), one dispatcher."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from deepinfer_jax.kernels.choice import KernelChoice

from . import triton
from .entries import Entries, PackedEntries, PagedEntries, entry_count
from .invariant import sparse_attention_invariant
from .reference import sparse_attention_reference

__all__ = ["Entries", "PackedEntries", "PagedEntries", "sparse_attention"]


def sparse_attention(
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
    choice: KernelChoice = KernelChoice(),  # noqa: B008 (frozen, so one shared default is safe)
) -> jax.Array:
    """Attention of each query row over its window keys and its picked entries, K = V, one shared KV head.

    With 𝒦 the keys that a row sees, ℓ_j = scale · q·k_j in float32, M = max(max_j ℓ_j, −1e30), e_j = exp(ℓ_j − M):
    result = Σ_j e_j·k_j / (Σ_j e_j + exp(sink − M)). The sink is neither scaled nor part of M. A row that sees
    no key gives 0. A key that holds NaN or infinity makes exactly the rows that see it NaN.

    Args:
        query: [batch, time, heads, dim], bfloat16 or float32, already rotated.
        window: [batch, slots, dim], dtype of `query`: the window KV, already dequantised, in any order.
        window_positions: int32 [batch, slots]: position of each window key, -1 for an empty slot.
        entries: compressed KV: None, or [batch, entries, dim] of the dtype of `query`, or `PackedEntries`, or either
            in pages (`PagedEntries`).
        picks: int32 [batch, time, k]: the entries of each row, distinct, -1 for none. None without entries.
        horizon: int32 [batch, time]: the row sees window positions in (horizon − sliding_window, horizon];
            -1 for a padding row, whose result is 0.
        sink: float32 [heads].
        sliding_window: W of model.md.
        scale: head_dim^(−1/2).
        round_probabilities: round e_j to bfloat16 before the product with k_j (the sums keep float32 e_j).
        banded: promise that slots == sliding_window + time and that row t sees only slots t + 1 … t +
            sliding_window, as in a prefill over [previous window | new rows]. The result is the same without
            the promise; with it a row costs its window instead of all slots.
        choice: the implementation. The Triton kernel serves rows with windows of any order; a banded prefill,
            and sizes that the kernel does not take (`triton.refusal`), run the reference. With `batch_invariant` a
            row's bits depend on its own window keys in their order, its picks and k alone.

    Returns:
        [batch, time, heads, dim] of the dtype of `query`.

    Raises:
        ValueError: shapes or dtypes disagree (at trace time).
    """
    _check(query, window, window_positions, entries, picks, horizon, sink, sliding_window, banded)
    attend: Callable[..., jax.Array] = functools.partial(sparse_attention_reference, banded=banded)
    if choice.batch_invariant:
        attend = functools.partial(sparse_attention_invariant, banded=banded)
    elif choice.sparse_attention == "triton" and not banded and not triton.refusal(query, entries):
        attend = functools.partial(triton.sparse_attention_triton, interpret=choice.interpret)
    with jax.named_scope("sparse_attention"):
        return attend(
            query,
            window,
            window_positions,
            entries,
            picks,
            horizon,
            sink,
            sliding_window=sliding_window,
            scale=scale,
            round_probabilities=round_probabilities,
        )


def _check(
    query: jax.Array,
    window: jax.Array,
    window_positions: jax.Array,
    entries: Entries | None,
    picks: jax.Array | None,
    horizon: jax.Array,
    sink: jax.Array,
    sliding_window: int,
    banded: bool,
) -> None:
    if query.ndim != 4 or query.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(
            "sparse_attention: query must be bfloat16 or float32 [batch, time, heads, dim], "
            f"not {query.dtype} {list(query.shape)}"
        )
    batch, time, heads, dim = query.shape
    slots = window.shape[1] if window.ndim > 1 else 0
    expected: list[tuple[str, jax.Array, tuple[int, ...], jnp.dtype]] = [
        ("window", window, (batch, slots, dim), query.dtype),
        ("window_positions", window_positions, (batch, slots), jnp.dtype(jnp.int32)),
        ("horizon", horizon, (batch, time), jnp.dtype(jnp.int32)),
        ("sink", sink, (heads,), jnp.dtype(jnp.float32)),
    ]
    if (entries is None) != (picks is None):
        raise ValueError("sparse_attention: entries and picks come together: pass both or neither")
    if entries is not None and picks is not None:
        expected.append(("picks", picks, (batch, time, picks.shape[-1]), jnp.dtype(jnp.int32)))
        stored: Entries = entries
        lead: tuple[int, ...] = (batch, entry_count(entries))
        if isinstance(entries, PagedEntries):
            stored, lead = entries.pages, jax.tree.leaves(entries.pages)[0].shape[:3]
            rows = (lead[0], batch // lead[0], entries.tables.shape[-1])
            expected.append(("entries.tables", entries.tables, rows, jnp.dtype(jnp.int32)))
        if isinstance(stored, PackedEntries):
            byte = jnp.dtype(jnp.uint8)
            expected.append(("entries.codes", stored.codes, (*lead, dim // 2), byte))
            expected.append(("entries.scales", stored.scales, (*lead, dim // 16), byte))
        elif isinstance(stored, jax.Array):
            expected.append(("entries", stored, (*lead, dim), query.dtype))
    for name, array, shape, dtype in expected:
        if array.shape != shape or array.dtype != dtype:
            raise ValueError(
                f"sparse_attention: {name} must be {dtype} {list(shape)} to fit the query {list(query.shape)}, "
                f"not {array.dtype} {list(array.shape)}"
            )
    if banded and slots != sliding_window + time:
        raise ValueError(
            f"sparse_attention: banded needs sliding_window + time = {sliding_window + time} window slots, "
            f"not {slots}: pass banded=False for a window in another layout"
        )
