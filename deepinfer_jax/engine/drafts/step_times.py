"""How long the decode programs take: measured when an engine starts, or remembered by an earlier one (DB §6.5)."""

import json
import logging
import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path

from deepinfer_jax.scheduler import Bucket

logger = logging.getLogger(__name__)


def decode_times(
    buckets: Sequence[Bucket], measure: Callable[[Bucket], float], *, key: str, directory: str | None, ttl: float
) -> dict[Bucket, float]:
    """Milliseconds of each decode program.

    They are kept in `directory` in one file for each key; other files there are left alone (DB §15.2 trap 45).

    Args:
        measure: runs a program and tells its milliseconds.
        key: names all that the times depend on beside the buckets: model, device, versions.
        directory: DEEPINFER_DECODE_PERF_CACHE_DIR; None: nothing is read or kept.
        ttl: DEEPINFER_DECODE_PERF_CACHE_TTL_SEC, seconds for which a file counts.
    """
    if directory is None:
        return {bucket: measure(bucket) for bucket in buckets}
    key = f"{key} {[list(vars(bucket).values()) for bucket in buckets]}"
    file = Path(directory) / f"decode-times-{sha256(key.encode()).hexdigest()[:32]}.json"
    known = _read(file, key, len(buckets), ttl)
    if known is None:
        known = [measure(bucket) for bucket in buckets]
        _write(file, {"key": key, "measured_at": time.time(), "milliseconds": known})
    return dict(zip(buckets, known, strict=True))


def _read(file: Path, key: str, count: int, ttl: float) -> list[float] | None:
    """What the file says; None if there is none, it is too old, or it is no such file."""
    try:
        found = json.loads(file.read_text())
        times, age = [float(ms) for ms in found["milliseconds"]], time.time() - found["measured_at"]
        sound = found["key"] == key and len(times) == count and all(0 < ms < math.inf for ms in times)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        logger.warning("%s holds no decode times and is written anew (%s)", file, error)
        return None
    return times if sound and 0 <= age <= ttl else None


def _write(file: Path, content: dict[str, object]) -> None:
    """All or nothing, whoever else writes or reads; a folder that cannot be written costs the next start, no more."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=file.stem, delete=False) as part:
            json.dump(content, part)
        os.replace(part.name, file)
    except OSError as error:
        logger.warning("decode times cannot be kept in %s (%s)", file.parent, error)
