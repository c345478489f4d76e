"""Quantised weights as stored on the device: pytrees of codes and scales (model.md §2.2)."""

import dataclasses

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fp8Weight:
    """Matrices in FP8 with one power-of-two scale for each 32 x 32 block.

    Attributes:
        codes: e4m3 values. float8_e4m3fn [..., out, in].
        scales: E8M0 bytes, value 2^(byte - 127). uint8 [..., ceil(out / 32), ceil(in / 32)].
    """

    codes: jax.Array
    scales: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fp4Weight:
    """Matrices in packed FP4 with one power-of-two scale for each row and 32 inputs.

    Attributes:
        codes: two e2m1 values a byte, the even input in the low nibble. uint8 [..., out, in / 2].
        scales: E8M0 bytes. uint8 [..., out, in / 32].
    """

    codes: jax.Array
    scales: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fp8Rows:
    """A table of rows in FP8 with one power-of-two scale for each row and 32 columns (the Engram tables).

    Attributes:
        codes: e4m3 values. float8_e4m3fn [rows, dim].
        scales: E8M0 bytes. uint8 [rows, dim / 32].
    """

    codes: jax.Array
    scales: jax.Array


Weight = jax.Array | Fp8Weight | Fp4Weight
