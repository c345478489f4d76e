"""Packed FP4 weights in registers: 16-bit words of four codes to bfloat16, exactly, two words at a time.

Shifts and masks move a code `s e e m` to `s 000000ee m000000`, which read as bfloat16 is the value times 2^-126: all
eight magnitudes, zero and the subnormal 0.5 among them. Powers of two then bring it to value · 2^(scale − 127):

* one factor 2^(scale − 1), which bfloat16 has for scales up to 128, or
* `wide`: two factors, 2^126 and 2^(scale − 127), for any scale. Scale 255 is NaN.

What is compiled is PTX, since no Triton operation treats two 16-bit numbers in one register (7.3 instructions for each
value instead of 2.9); the interpreter, which knows no PTX, gets the same function in plain operations.
"""

import jax
import jax.numpy as jnp

from deepinfer_jax.kernels import _backend as backend
from deepinfer_jax.kernels.formats import decode_e8m0

Array = jax.Array

CODES_PER_WORD = 4
NARROW_SCALES = 128
"""Scale bytes below this one need no `wide` factors. (128 itself would not either; one bit tells both apart.)"""

_SIGN_AND_MAGNITUDE = "and.b32 t, t, 0x81C081C0;"
# A product by 2^a + 2^b copies every masked code twice: its sign bit to its place, and its magnitude.
_SPREAD = (
    f"and.b32 t, $1, 0x000F000F; mul.lo.u32 t, t, 0x1040; {_SIGN_AND_MAGNITUDE}",
    f"and.b32 t, $1, 0x00F000F0; mul.lo.u32 t, t, 0x0104; {_SIGN_AND_MAGNITUDE}",
    f"shr.u32 t, $1, 8; and.b32 t, t, 0x000F000F; mul.lo.u32 t, t, 0x1040; {_SIGN_AND_MAGNITUDE}",
    f"and.b32 t, $1, 0xF000F000; shr.u32 u, t, 6; or.b32 t, t, u; {_SIGN_AND_MAGNITUDE}",
)
# a · b as a · b − 0, because A100 has no bfloat16 product.
_TIMES_2_126 = "mov.b32 u, 0x7E807E80; mov.b32 v, 0x80008000; fma.rn.bf16x2 t, t, u, v;"
TIMES = "{ .reg .b32 v; mov.b32 v, 0x80008000; fma.rn.bf16x2 $0, $1, $2, v; }"


def codes_ptx(nibble: int, wide: bool) -> str:
    """Two words $1 to two values $0, times 2^-126 unless `wide`."""
    return f"{{ .reg .b32 t, u, v; {_SPREAD[nibble]} {_TIMES_2_126 if wide else ''} mov.b32 $0, t; }}"


def scales_ptx(wide: bool) -> str:
    """Four scale bytes $2 to four factors $0, $1: 2^(scale − 1), or 2^(scale − 127) if `wide`."""

    def half(result: str, selection: str) -> str:
        if not wide:
            return f"prmt.b32 t, $2, z, {selection}; shl.b32 t, t, 7; add.u32 {result}, t, 0x3F003F00;"
        # Scale 0 is the subnormal 2^-127; infinity times zero makes NaN of 255.
        power = f"prmt.b32 t, $2, z, {selection}; shl.b32 t, t, 7; max.bf16x2 t, t, u;"
        return f"{power} fma.rn.bf16x2 {result}, t, z, t;"

    halves = f"{half('$0', '0x4140')} {half('$1', '0x4342')}"
    return f"{{ .reg .b32 t, u, z; mov.b32 z, 0; mov.b32 u, 0x00400040; {halves} }}"


def scale_factors(scales: Array, *, wide: bool, interpret: bool) -> Array:
    """uint8 [...] -> what `decoded` multiplies with: bfloat16 [...], in the interpreter float32."""
    if interpret:
        return decode_e8m0(scales)
    return backend.inline_ptx(
        scales_ptx(wide), [scales], "=&r,=&r,r", pack=4
    )  # & as $0 is written before $2 is read again


def decoded(words: Array, factors: Array, nibble: int, *, wide: bool, interpret: bool) -> Array:
    """The values of one nibble of each word. uint16 [...], factors of the same shape -> bfloat16 [...]."""
    if interpret:
        code = (words >> (4 * nibble)).astype(jnp.int32) & 15
        doubled = (jnp.int32(0xC8643210 - 2**32) >> ((code & 7) * 4)) & 15
        return (jnp.where(code < 8, doubled, -doubled).astype(jnp.float32) * 0.5 * factors).astype(jnp.bfloat16)
    values = backend.inline_ptx(codes_ptx(nibble, wide), [words], "=r,r", pack=2)
    return backend.inline_ptx(TIMES, [values, factors], "=r,r,r", pack=2)
