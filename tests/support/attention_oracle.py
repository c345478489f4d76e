"""Sparse attention by brute force: model.md §5.3 in float64, one query row, one head, one key at a time."""

from typing import Any

import ml_dtypes
import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def unpack(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """uint8 [..., dim / 2] and [..., dim / 16] -> float64 [..., dim] (model.md §2.4)."""
    values = np.zeros((*codes.shape[:-1], 2 * codes.shape[-1]))
    for half, nibbles in enumerate((codes & 15, codes >> 4)):
        values[..., half::2] = np.where(nibbles < 8, 1, -1) * E2M1[nibbles & 7]
    return values * np.repeat(scales.view(ml_dtypes.float8_e4m3fn).astype(np.float64), 16, axis=-1)


def in_order(entries: Any) -> Any:
    """Paged entries, page by page, as dense ones of every row."""
    tables = np.asarray(entries.tables)
    data, rows, _ = tables.shape

    def rows_of(pool: np.ndarray) -> np.ndarray:
        parts = [np.concatenate([pool[d, page] for page in tables[d, row]]) for d in range(data) for row in range(rows)]
        return np.stack(parts)

    if isinstance(entries.pages, tuple):
        return type(entries.pages)(*(rows_of(np.asarray(pool)) for pool in entries.pages))
    return rows_of(np.asarray(entries.pages))


def brute_force(
    arguments: tuple[Any, ...],
    *,
    sliding_window: int,
    scale: float,
    round_probabilities: bool,
    absolute: bool = False,
    **_: Any,
) -> np.ndarray:
    """float64 [batch, time, heads, dim]; with `absolute`, Σ_j e_j·|k_j| / (…) instead, to bound rounding errors."""
    query, window, positions, entries, picks, horizon, sink = arguments
    query, window, sink = (np.asarray(a).astype(np.float64) for a in (query, window, sink))
    positions, horizon = np.asarray(positions), np.asarray(horizon)
    if hasattr(entries, "tables"):
        entries = in_order(entries)
    if entries is not None:
        packed = isinstance(entries, tuple)
        entries = unpack(*map(np.asarray, entries)) if packed else np.asarray(entries).astype(np.float64)
        picks = np.asarray(picks)
    result = np.zeros(query.shape)
    for b, t, n in np.ndindex(query.shape[:3]):
        if horizon[b, t] < 0:
            continue
        keys = [
            window[b, slot]
            for slot, position in enumerate(positions[b])
            if position >= 0 and horizon[b, t] - sliding_window < position <= horizon[b, t]
        ]
        if entries is not None:
            keys += [entries[b, pick] for pick in picks[b, t] if pick >= 0]
        if not keys:
            continue
        logits = np.array([query[b, t, n] @ key * scale for key in keys])
        highest = logits.max()
        weights = np.exp(logits - highest)
        with np.errstate(over="ignore"):
            denominator = weights.sum() + np.exp(sink[n] - highest)
        if round_probabilities:
            weights = weights.astype(ml_dtypes.bfloat16).astype(np.float64)
        for weight, key in zip(weights, keys, strict=True):
            result[b, t, n] += weight * (np.abs(key) if absolute else key) / denominator
    return result
