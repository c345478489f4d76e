"""Reads and writes one safetensors file: a mapped reader that trusts no header, a streaming writer (DB §13.1).

The format: 8 bytes of little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then the
bytes. The safetensors library cannot hand F8_E4M3, F8_E8M0 and BF16 to NumPy; here they are ml_dtypes views.
"""

import json
import math
import mmap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from deepinfer_jax.weights.layout import TensorSpec  # which imports jax; the reader itself needs NumPy only

Array = npt.NDArray[Any]

DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "I16": np.dtype(np.int16),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "BOOL": np.dtype(np.bool_),
}
"""Safetensors dtype names and their NumPy types."""

MAX_HEADER_BYTES = 100_000_000
_MAX_DIMENSIONS = 64  # NumPy has no more
_MAX_SIZE = 2**63 - 1  # what NumPy can hold, also beside a zero


@dataclass(frozen=True)
class TensorEntry:
    """What the header says of one tensor, checked.

    Attributes:
        name: as in the file.
        dtype: safetensors name, a key of `DTYPES`.
        shape: in stored elements.
        begin, end: byte range in the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Header of a safetensors file, without touching the tensors.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: truncated file, or a header that is no JSON, too large, or claims an unknown dtype, a bad shape,
            bytes outside the file, bytes of another tensor, or a size other than shape times item size.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or not 0 < length <= min(MAX_HEADER_BYTES, size - 8):
            raise ValueError(
                f"{path}: its first bytes announce a header of {length} bytes, but the file has {size} bytes and a "
                f"header at most {MAX_HEADER_BYTES}; it is truncated or no safetensors file"
            )
        raw = file.read(length)
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:  # bad UTF-8, bad JSON; JSON nested without end
        raise ValueError(f"{path}: the header is not valid JSON: {error}") from error
    if not isinstance(header, dict):
        raise ValueError(f"{path}: the header is a JSON {type(header).__name__}, expected an object")
    header.pop("__metadata__", None)
    start = 8 + length
    entries = {name: _entry(path, name, claim, start, size) for name, claim in header.items()}
    _refuse_overlaps(path, entries.values())
    return entries


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]  # linear: a header may hold millions
        raise ValueError(f"the key {twice!r} occurs twice")
    return result


def _entry(path: Path, name: str, claim: Any, start: int, size: int) -> TensorEntry:
    """One checked header entry; `start` is where the tensors begin and `size` the size of the file."""
    where = f"{path}: tensor {name!r}"
    if not isinstance(claim, dict) or not {"dtype", "shape", "data_offsets"} <= claim.keys():
        raise ValueError(f"{where}: the header entry needs dtype, shape and data_offsets, found {_shown(claim)}")
    dtype, shape, offsets = claim["dtype"], claim["shape"], claim["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{where}: unknown dtype {_shown(dtype)}; known are {', '.join(DTYPES)}")
    if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS or not all(_is_size(n) for n in shape):
        raise ValueError(f"{where}: shape {_shown(shape)} is not a list of at most {_MAX_DIMENSIONS} sizes")
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(type(n) is int and abs(n) <= _MAX_SIZE for n in offsets)
    ):
        raise ValueError(f"{where}: data_offsets {_shown(offsets)} is not a pair of integers")
    begin, end = offsets
    if not 0 <= begin <= end <= size - start:
        raise ValueError(
            f"{where}: its bytes {begin}..{end} lie outside the {size - start} bytes of tensors in the file; "
            "the file is truncated or its header is wrong"
        )
    expected = math.prod(shape) * DTYPES[dtype].itemsize
    if end - begin != expected:
        raise ValueError(f"{where}: {dtype} of shape {shape} takes {expected} bytes, the header gives it {end - begin}")
    return TensorEntry(name, dtype, tuple(shape), start + begin, start + end)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_SIZE


def _shown(value: Any) -> str:
    """What a header claims, cut: it may be a hundred megabytes."""
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "…"


def _refuse_overlaps(path: Path, entries: Iterable[TensorEntry]) -> None:
    occupied = sorted((entry for entry in entries if entry.end > entry.begin), key=lambda entry: entry.begin)
    for left, right in pairwise(occupied):
        if right.begin < left.end:
            raise ValueError(f"{path}: tensors {left.name!r} and {right.name!r} share bytes; the header is wrong")


class SafetensorsFile:
    """One mapped file.

    Attributes:
        path: the file.
        entries: its tensors by name.
    """

    path: Path
    entries: dict[str, TensorEntry]

    def __init__(self, path: Path) -> None:
        """Raises what `read_header` raises."""
        self.path = path
        self.entries = read_header(path)
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def view(self, name: str) -> Array:
        """Read-only view of a tensor's bytes in the page cache; copy what must outlive the file."""
        entry = self.entries[name]
        dtype = DTYPES[entry.dtype]
        count = (entry.end - entry.begin) // dtype.itemsize
        return np.frombuffer(self._map, dtype, count, entry.begin).reshape(entry.shape)

    def release(self, name: str) -> None:
        """Tell the kernel that a tensor's pages are no longer needed, so that they leave this process's RSS.

        Views stay valid: a later read maps the pages again.
        """
        entry = self.entries[name]
        begin = entry.begin - entry.begin % mmap.PAGESIZE
        if entry.end > entry.begin:
            self._map.madvise(mmap.MADV_DONTNEED, begin, entry.end - begin)


def write_safetensors(path: Path, tensors: Sequence["TensorSpec"], arrays: Iterable[Array]) -> None:
    """Write `tensors` with the data of `arrays`, one array in memory at a time.

    Args:
        path: file to write; replaced if it exists.
        tensors: names, dtypes and shapes, in file order.
        arrays: the data of each tensor, in the same order, with the NumPy type of `DTYPES` and the declared shape.

    Raises:
        ValueError: an array of another type or shape, or another number of arrays.
    """
    with path.open("wb") as file:
        file.write(_header(tensors))
        for tensor, array in zip(tensors, arrays, strict=True):
            if array.dtype != DTYPES[tensor.dtype] or array.shape != tensor.shape:
                raise ValueError(
                    f"{path}: tensor {tensor.name!r} is declared {tensor.dtype} {tensor.shape}, "
                    f"its data are {array.dtype} {array.shape}"
                )
            file.write(np.ascontiguousarray(array).view(np.uint8).data)


def _header(tensors: Sequence["TensorSpec"]) -> bytes:
    ends = list(_running_ends(tensors))
    header = {
        tensor.name: {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [end - tensor.nbytes, end]}
        for tensor, end in zip(tensors, ends, strict=True)
    }
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)  # the tensors start on a multiple of 8 bytes, as the safetensors library has it
    return len(raw).to_bytes(8, "little") + raw


def _running_ends(tensors: Sequence["TensorSpec"]) -> Iterator[int]:
    end = 0
    for tensor in tensors:
        end += tensor.nbytes
        yield end
