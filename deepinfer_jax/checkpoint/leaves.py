"""The form of each parameter on the device by precision and platform, and the arrays of that form."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import ml_dtypes
import numpy as np
import numpy.typing as npt

from deepinfer_jax.checkpoint.folder import CheckpointFolder
from deepinfer_jax.checkpoint.host_formats import decode
from deepinfer_jax.weights.layout import Format, ParamSpec
from deepinfer_jax.weights.params import Fp4Weight, Fp8Rows, Fp8Weight

Array = npt.NDArray[Any]
Leaf = jax.Array | Fp8Weight | Fp4Weight | Fp8Rows
Form = Literal["float32", "stored"]

_CODES: dict[Format, np.dtype[Any]] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "FP8": np.dtype(ml_dtypes.float8_e4m3fn),
    "FP8_ROWS": np.dtype(ml_dtypes.float8_e4m3fn),
    "FP4": np.dtype(np.uint8),  # two codes a byte: kernels read packed FP4 as uint8 (jax.md §1.4)
}
_QUANTIZED: dict[Format, type[Fp8Weight] | type[Fp4Weight] | type[Fp8Rows]] = {
    "FP8": Fp8Weight,
    "FP8_ROWS": Fp8Rows,
    "FP4": Fp4Weight,
}


def leaf_form(spec: ParamSpec, precision: str, platform: str) -> Form:
    """How a parameter is kept on devices of `platform` ("cpu", "gpu", …).

    The float32 precisions hold float32 everywhere, so that every weight has a gradient. The others keep the storage
    format, except that a CPU multiplies float32 several times faster than it decodes or widens (jax.md §6.6): there
    all but the routed FP4 experts and the Engram tables are decoded once, exactly.
    """
    if precision in ("float32", "float32_exact"):
        return "float32"
    return "float32" if platform == "cpu" and spec.format not in ("FP4", "FP8_ROWS") else "stored"


@dataclass(frozen=True)
class HostArray:
    """One device array to be: its shape and type, and where its data come from.

    Attributes:
        shape: of the whole array, with the expert axis when `stacked`.
        dtype: NumPy type.
        stacked: tensor i is `array[i]`; otherwise tensor 0 is the array.
        tensor: i -> data of tensor i.
        release: tensor i has been copied; its mapped pages may go.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    stacked: bool
    tensor: Callable[[int], Array]
    release: Callable[[int], None]

    def read(self, index: tuple[slice, ...] | None = None) -> Array:
        """`array[index]`, or all of it, in fresh memory (JAX aliases NumPy buffers on CPU, jax.md §0.8).

        One tensor is in memory at a time.
        """
        index = index or (slice(None),) * len(self.shape)
        if not self.stacked:
            data = self.tensor(0)[index]
            data = np.ascontiguousarray(data) if data.flags.writeable else np.array(data)  # copies what is mapped
            self.release(0)
            return data
        numbers = range(self.shape[0])[index[0]]
        extents = (len(range(size)[cut]) for size, cut in zip(self.shape[1:], index[1:], strict=True))
        out = np.empty((len(numbers), *extents), self.dtype)
        for row, number in enumerate(numbers):
            out[row] = self.tensor(number)[index[1:]]
            self.release(number)
        return out

    def read_padded(self, index: tuple[slice, ...], rows: int) -> Array:
        """`array[index]` as if the first axis were filled up with zeros to `rows` (`sharding.placed_shape`)."""
        begin, end, _ = index[0].indices(rows)
        data = self.read((slice(begin, min(end, self.shape[0])), *index[1:]))
        missing = end - begin - len(data)
        return np.concatenate([data, np.zeros((missing, *data.shape[1:]), data.dtype)]) if missing else data


def build_leaf(spec: ParamSpec, form: Form, folder: CheckpointFolder, place: Callable[[HostArray], jax.Array]) -> Leaf:
    """The leaf of one parameter; `place` puts one array on the device(s)."""

    def weight(i: int) -> Array:
        return folder.view(spec.names[i])

    def scale(i: int) -> Array:
        return folder.view(spec.scale_name(spec.names[i]))

    def exact(i: int) -> Array:
        return decode(spec, weight(i), scale(i) if spec.scale_shape else None)

    def release(i: int) -> None:
        folder.release(spec.names[i])
        if spec.scale_shape:
            folder.release(spec.scale_name(spec.names[i]))

    def array(shape: tuple[int, ...], dtype: np.dtype[Any], tensor: Callable[[int], Array]) -> jax.Array:
        shape = (len(spec.names), *shape) if spec.stacked else shape
        return place(HostArray(shape, dtype, spec.stacked, tensor, release))

    if form == "float32":
        return array(spec.shape, np.dtype(np.float32), exact)
    dtype = _CODES[spec.format]
    codes = array(spec.stored_shape, dtype, lambda i: weight(i).view(dtype))
    if spec.scale_shape is None:
        return codes
    scales = array(spec.scale_shape, np.dtype(np.uint8), lambda i: scale(i).view(np.uint8))
    return _QUANTIZED[spec.format](codes=codes, scales=scales)
