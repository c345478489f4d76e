"""Text -> int32 ids, ids -> text, and what the model derives from ids (model.md §7, DB §3). Never jax."""

from .engram_hash import (
    DEAD,
    engram_multipliers,
    engram_offsets,
    engram_primes,
    ngram_rows,
    ngram_windows,
)

__all__ = [
    "DEAD",
    "engram_multipliers",
    "engram_offsets",
    "engram_primes",
    "ngram_rows",
    "ngram_windows",
]
