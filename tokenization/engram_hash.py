"""Engram's row ids of each position on the host (model.md §7.2): primes, multipliers, n-gram windows, rows.

The host twin of the device hash. Everything is exact int64 (a product reaches 2**63 - 1, so int32 or a
float would be silently wrong), and everything is plain numbers: no configuration object comes in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

DEAD = -1
"""Compressed id of a position without text (before a sequence, inside an image); cuts the n-gram (model.md §7.2)."""

# These bases decide primality exactly for every n < 3.3e24, so for every int64.
_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)


def _is_prime(n: int) -> bool:
    """Deterministic Miller-Rabin."""
    if n < 2:
        return False
    for p in _WITNESSES:
        if n % p == 0:
            return n == p
    odd, twos = n - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in _WITNESSES:
        x = pow(base, odd, n)
        if x in (1, n - 1):
            continue
        for _ in range(twos - 1):
            x = x * x % n
            if x == n - 1:
                break
        else:
            return False
    return True


def _primes_from(start: int) -> Iterator[int]:
    n = start
    while True:
        if _is_prime(n):
            yield n
        n += 1


def engram_primes(layer_ids: Sequence[int], vocab_size: int, max_ngram: int, heads: int) -> npt.NDArray[np.int64]:
    """Table sizes of every hash, int64 `[layers, max_ngram - 1, heads]` (model.md §7.2).

    Layers in the given order, then n-gram sizes 2…max_ngram, then heads; every row searches from
    `vocab_size` upwards and a prime that any earlier layer, row or head took is skipped. The sum over one
    layer is its number of embedding rows (`engram_num_embeddings`).

    Raises:
        ValueError: `max_ngram` < 2, `heads` < 1 or `vocab_size` < 1.
    """
    if max_ngram < 2 or heads < 1 or vocab_size < 1:
        raise ValueError(
            f"Engram needs n-grams of at least 2 tokens, one head and a table size of at least 1; got "
            f"max_ngram={max_ngram}, heads={heads}, vocab_size={vocab_size}"
        )
    # One ascending stream serves all rows: "the next unused prime above vocab_size - 1, restarted for
    # every row, used primes skipped" hands out consecutive primes.
    stream = _primes_from(vocab_size)
    count = len(layer_ids) * (max_ngram - 1) * heads
    primes = np.fromiter((next(stream) for _ in range(count)), dtype=np.int64, count=count)
    return primes.reshape(len(layer_ids), max_ngram - 1, heads)


def engram_multipliers(layer_id: int, max_ngram: int, compressed_vocab_size: int) -> npt.NDArray[np.int64]:
    """Odd multipliers of one Engram layer, int64 `[max_ngram]`; `[r]` belongs to lookback r (model.md §7.2).

    Any compressed id times any multiplier stays below 2**63.

    Raises:
        ValueError: `compressed_vocab_size` < 1.
    """
    if compressed_vocab_size < 1:
        raise ValueError(f"Engram needs a compressed vocabulary of at least one token; got {compressed_vocab_size}")
    bound = max(1, np.iinfo(np.int64).max // compressed_vocab_size // 2)
    rng = np.random.default_rng(10007 * layer_id)
    return rng.integers(0, bound, size=max_ngram, dtype=np.int64) * 2 + 1


def engram_offsets(primes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """First table row of every hash, same shape as `primes`: running sum inside each layer, from 0."""
    flat = primes.reshape(len(primes), -1)
    return (np.cumsum(flat, axis=1) - flat).reshape(primes.shape)


def ngram_windows(
    compressed: npt.NDArray[np.integer],
    *,
    max_ngram: int,
    pad: int,
    tail: npt.NDArray[np.integer] | None = None,
) -> npt.NDArray[np.int64]:
    """What every position looks back at, int64 `[..., time, max_ngram]`; `[..., r]` is lookback r.

    The cut is sticky (model.md §7.2): the first position before the sequence, or the first DEAD one, turns itself
    and everything further back into `pad`.

    Args:
        compressed: integers `[..., time]`, DEAD at image spans.
        pad: the compressed id of `engram_pad_token_id`.
        tail: integers `[..., max_ngram - 1]`, the compressed ids just before `compressed` (DEAD before the
            start of the sequence); None at the start of the sequence.

    Raises:
        ValueError: `tail` has another shape.
    """
    lookback = max_ngram - 1
    tail_shape = (*compressed.shape[:-1], lookback)
    if tail is None:
        tail = np.full(tail_shape, DEAD, np.int64)
    elif tail.shape != tail_shape:
        raise ValueError(f"the n-gram tail must have shape {tail_shape}, it has {tail.shape}")
    ids = np.concatenate([tail, compressed], axis=-1).astype(np.int64)
    time = compressed.shape[-1]
    windows = np.stack([ids[..., lookback - r : lookback - r + time] for r in range(max_ngram)], axis=-1)
    cut = np.logical_or.accumulate(windows == DEAD, axis=-1)
    return np.where(cut, np.int64(pad), windows)


def ngram_rows(
    windows: npt.NDArray[np.int64],
    primes: npt.NDArray[np.int64],
    multipliers: npt.NDArray[np.int64],
) -> npt.NDArray[np.int64]:
    """Embedding rows, int64 `[..., layers, (max_ngram - 1) * heads]`: 2-gram heads first (model.md §7.2).

    Args:
        windows: `[..., max_ngram]` from `ngram_windows`.
        primes: `[layers, max_ngram - 1, heads]` from `engram_primes`.
        multipliers: `[layers, max_ngram]`, `engram_multipliers` of each layer.
    """
    products = windows[..., None, :] * multipliers
    hashes = np.bitwise_xor.accumulate(products, axis=-1)[..., 1:]
    rows = hashes[..., None] % primes + engram_offsets(primes)
    return rows.reshape(*rows.shape[:-2], -1)
