"""Routed experts as two grouped Pallas-Triton kernels that read FP4 weights as they are stored.

One program multiplies the rows of one tile (all of one expert, `plan.py`) with some output columns of its matrices;
programs of idle tiles leave at once. The first kernel gives z = swiglu(w1 x, w3 x; weight), the second w2 z.

Channel 4 j + i stands in nibble i of 16-bit word j of a packed row. Interleaving the four would cost more than decoding
them, so there are four products instead, over words: product i takes the channels i, 4 + i, 8 + i, … of the
activations, which are stored in that order (`by_nibble`). Every row is summed over the words in one order, whatever its
tile, its neighbours and their number.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from deepinfer_jax.kernels import _backend as backend
from deepinfer_jax.kernels.formats import fake_quant_fp8
from deepinfer_jax.kernels.weights import Fp4Weight, Weight

from .decode import CODES_PER_WORD, NARROW_SCALES, decoded, scale_factors
from .plan import plan_tiles
from .reference import ascending, gated, ordered_sum, routed_experts_reference

Array = jax.Array

# Input channels of one round of a program's loop. One number for all sizes: it is the order of every sum.
_ROUND_CHANNELS = 128
_GROUP = 32  # channels that share one scale
_GROUP_WORDS = _GROUP // CODES_PER_WORD


@dataclass(frozen=True)
class ProgramSizes:
    """What one program of a kernel computes.

    Attributes:
        columns: output columns, a multiple of 32.
        warps, stages: what the compiler makes of it: groups of 32 threads, and rounds that are loaded ahead.
    """

    columns: int
    warps: int
    stages: int


@dataclass(frozen=True)
class TileSizes:
    """Rows of a tile, at least 16 for a matrix unit, and the programs of the two kernels."""

    rows: int
    gate_up: ProgramSizes
    down: ProgramSizes


_FEW_PAIRS = TileSizes(16, ProgramSizes(64, warps=4, stages=4), ProgramSizes(128, warps=4, stages=4))
_SOME_PAIRS = TileSizes(16, ProgramSizes(128, warps=4, stages=4), ProgramSizes(128, warps=4, stages=4))
_MANY_PAIRS = TileSizes(32, ProgramSizes(128, warps=8, stages=3), ProgramSizes(128, warps=4, stages=4))


def tile_sizes(pairs: int, experts: int) -> TileSizes:
    """Sizes for so many (token, expert) pairs; they fit the shared memory of every GPU that is compiled for.

    Few pairs are few tiles: their programs are narrow, so that one token of a released model makes at least as many as
    an H100 has cores (132). Many pairs take tiles as large as what an expert gets, to decode its weights once.
    """
    if pairs < 16:
        return _FEW_PAIRS
    return _SOME_PAIRS if pairs <= 16 * experts else _MANY_PAIRS


def refusal(x: Array, w1: Weight, w3: Weight, w2: Weight) -> str | None:
    """Why the kernels cannot take these arguments, or None when they can."""
    if x.dtype != jnp.bfloat16:
        return f"activations are {x.dtype}, not bfloat16"
    if not x.shape[0]:
        return "there are no tokens"
    for weight in (w1, w3, w2):
        if not isinstance(weight, Fp4Weight):
            kind = weight.dtype if isinstance(weight, jax.Array) else type(weight).__name__
            return f"weights are {kind}, not packed FP4"
        if weight.codes.shape[-1] % (_GROUP // 2):
            return f"{2 * weight.codes.shape[-1]} inputs are not whole groups of {_GROUP}"
        if weight.scales.size in backend.WRAPPING_BYTES:
            return f"offsets into {weight.scales.size} bytes of scales would wrap in 32 bits"
    return None


def routed_experts_triton(
    x: Array,
    w1: Fp4Weight,
    w3: Fp4Weight,
    w2: Fp4Weight,
    expert_ids: Array,
    weights: Array,
    *,
    limit: float,
    quantize_input: bool,
    interpret: bool,
) -> Array:
    """`routed_experts` (see the package) for arguments that `refusal` accepts.

    Differentiable in x and weights, in reverse mode: a backward pass is that of the reference, computed anew.
    """

    @jax.custom_vjp
    def routed(x: Array, w1: Fp4Weight, w3: Fp4Weight, w2: Fp4Weight, expert_ids: Array, weights: Array) -> Array:
        pairs = ascending(expert_ids, weights)
        outputs = functools.partial(_expert_outputs, limit=limit, quantize_input=quantize_input, interpret=interpret)
        return ordered_sum(outputs(x, w1, w3, w2, *pairs))

    def forward(*arguments: Any) -> tuple[Array, tuple[Any, ...]]:
        return routed(*arguments), arguments

    def backward(arguments: tuple[Any, ...], cotangent: Array) -> tuple[Array | None, ...]:
        x, w1, w3, w2, expert_ids, weights = arguments

        def reference(x: Array, weights: Array) -> Array:
            return routed_experts_reference(
                x, w1, w3, w2, expert_ids, weights, limit=limit, quantize_input=quantize_input
            )

        of_x, of_weights = jax.vjp(reference, x, weights)[1](cotangent)
        return of_x, None, None, None, None, of_weights

    routed.defvjp(forward, backward)
    return routed(x, w1, w3, w2, expert_ids, weights)


def _expert_outputs(
    x: Array,
    w1: Fp4Weight,
    w3: Fp4Weight,
    w2: Fp4Weight,
    expert_ids: Array,
    weights: Array,
    *,
    limit: float,
    quantize_input: bool,
    interpret: bool,
) -> Array:
    """`expert_outputs` of the reference."""
    tokens, k = expert_ids.shape
    experts, inner = w1.codes.shape[:2]
    hidden = x.shape[1]
    sizes = tile_sizes(expert_ids.size, experts)
    plan = plan_tiles(expert_ids, experts, sizes.rows)
    tiles, tile_rows = plan.pair.shape
    if quantize_input:
        x = fake_quant_fp8(x)  # once per row, for both projections and all experts

    def call(kernel: Callable[..., None], name: str, sizes: ProgramSizes, rows: int, columns: int) -> Any:
        return backend.whole_array_call(
            functools.partial(kernel, tile_rows=tile_rows, sizes=sizes, interpret=interpret),
            name=name,
            grid=(tiles, -(-columns // sizes.columns)),
            out_shape=jax.ShapeDtypeStruct((rows, columns), x.dtype),
            num_warps=sizes.warps,
            num_stages=sizes.stages,
            interpret=interpret,
        )

    gate_up_kernel = functools.partial(_gate_up_kernel, k=k, limit=limit, quantize=quantize_input)
    gate_up = call(gate_up_kernel, "expert_gate_up", sizes.gate_up, tiles * tile_rows, inner)
    down = call(_down_kernel, "expert_down", sizes.down, tokens * k, hidden)
    order = plan.expert, plan.pair.reshape(-1)
    z = gate_up(by_nibble(x), *order, weights.reshape(-1), *_stored(w1), *_stored(w3))
    out = down(z, *order, *_stored(w2)).reshape(tokens, k, hidden)
    return jnp.where((expert_ids < experts)[..., None], out, 0)  # nothing wrote the rows of pairs not computed


def by_nibble(x: Array) -> Array:
    """[..., channels] with channel 4 j + i at i · channels / 4 + j."""
    return jnp.swapaxes(x.reshape(*x.shape[:-1], -1, CODES_PER_WORD), -1, -2).reshape(x.shape)


def _stored(weight: Fp4Weight) -> tuple[Array, Array]:
    """Codes as 16-bit words, which XLA does without moving them, and scales.

    Bytes of released codes would be more than a 32-bit offset can count.
    """
    codes = weight.codes
    return lax.bitcast_convert_type(codes.reshape(*codes.shape[:-1], -1, 2), jnp.uint16), weight.scales


def _gate_up_kernel(
    x_ref: Any,
    expert_ref: Any,
    pair_ref: Any,
    weight_ref: Any,
    gate_codes_ref: Any,
    gate_scales_ref: Any,
    up_codes_ref: Any,
    up_scales_ref: Any,
    z_ref: Any,
    *,
    k: int,
    limit: float,
    quantize: bool,
    tile_rows: int,
    sizes: ProgramSizes,
    interpret: bool,
) -> None:
    tile, block = backend.program_id(0), backend.program_id(1)
    pairs, inner = weight_ref.shape[0], z_ref.shape[1]

    @backend.when(pair_ref[tile * tile_rows] < pairs)
    def compute() -> None:
        places = tile * tile_rows + jnp.arange(tile_rows)
        pair = backend.load(pair_ref.at[places])
        # Columns are computed in the order of `by_nibble` within each 32, so that stores and groups are runs.
        column = jnp.arange(sizes.columns)
        nibble, word = column % _GROUP // _GROUP_WORDS, column // _GROUP * _GROUP_WORDS + column % _GROUP_WORDS
        channel = block * sizes.columns + CODES_PER_WORD * word + nibble
        matrices = ((gate_codes_ref, gate_scales_ref), (up_codes_ref, up_scales_ref))
        gate, up = (
            total.astype(z_ref.dtype)
            for total in _products(x_ref, pair // k, pair < pairs, matrices, expert_ref[tile], channel, interpret)
        )
        weight = backend.load(weight_ref.at[pair], mask=pair < pairs, other=0)
        z = gated(gate, up, weight, limit).astype(z_ref.dtype)
        if quantize:
            z = fake_quant_fp8(z)
        place = nibble * (inner // CODES_PER_WORD) + channel // CODES_PER_WORD
        place = jnp.where(channel < inner, place, inner)  # or it would be the place of another channel
        backend.store(z_ref.at[places[:, None], place[None, :]], z, mask=(channel < inner)[None, :])


def _down_kernel(
    z_ref: Any,
    expert_ref: Any,
    pair_ref: Any,
    codes_ref: Any,
    scales_ref: Any,
    out_ref: Any,
    *,
    tile_rows: int,
    sizes: ProgramSizes,
    interpret: bool,
) -> None:
    tile, block = backend.program_id(0), backend.program_id(1)
    pairs, hidden = out_ref.shape

    @backend.when(pair_ref[tile * tile_rows] < pairs)
    def compute() -> None:
        places = tile * tile_rows + jnp.arange(tile_rows)
        pair = backend.load(pair_ref.at[places])
        channel = block * sizes.columns + jnp.arange(sizes.columns)
        matrices = ((codes_ref, scales_ref),)
        (out,) = _products(z_ref, places, pair < pairs, matrices, expert_ref[tile], channel, interpret)
        mask = (pair < pairs)[:, None] & (channel < hidden)[None, :]
        backend.store(out_ref.at[pair[:, None], channel[None, :]], out.astype(out_ref.dtype), mask=mask)


def _products(
    x_ref: Any,
    rows: Array,
    real: Array,
    matrices: tuple[tuple[Any, Any], ...],
    expert: Array,
    columns: Array,
    interpret: bool,
) -> tuple[Array, ...]:
    """Rows of x times columns of one expert's matrices.

    Args:
        x_ref: [rows, channels], ordered `by_nibble`.
        rows: int32 [rows]; those that are not `real` are not read and count as 0.
        matrices: (codes, scales) of each: uint16 [experts, columns, channels / 4], uint8 [experts, columns, channels /
            32].
        columns: int32 [columns]; those beyond the matrix count as 0.

    Returns:
        float32 [rows, columns] for each matrix.
    """
    channels, all_columns = x_ref.shape[1], matrices[0][0].shape[1]
    all_words, step_words = channels // CODES_PER_WORD, _ROUND_CHANNELS // CODES_PER_WORD
    stored = (columns < all_columns)[:, None]

    def run(wide: bool) -> tuple[tuple[Array, ...], Array]:
        def step(number: Array, state: tuple[tuple[Array, ...], Array]) -> tuple[tuple[Array, ...], Array]:
            totals, seen = state
            words = (number * step_words + jnp.arange(step_words))[None, :]
            groups = (number * (step_words // _GROUP_WORDS) + jnp.arange(step_words // _GROUP_WORDS))[None, :]
            inside = words < all_words
            parts = [
                backend.load(x_ref.at[rows[:, None], nibble * all_words + words], mask=real[:, None] & inside, other=0)
                for nibble in range(CODES_PER_WORD)
            ]
            results = []
            for (codes_ref, scales_ref), total in zip(matrices, totals, strict=True):
                at = expert, columns[:, None]
                codes = backend.load(codes_ref.at[*at, words], mask=stored & inside, other=0)
                present = stored & (groups < all_words // _GROUP_WORDS)
                scales = backend.load(scales_ref.at[*at, groups], mask=present, other=0)
                seen = seen | scales
                factors = scale_factors(scales, wide=wide, interpret=interpret)
                factors = jnp.broadcast_to(factors[:, :, None], (*scales.shape, _GROUP_WORDS)).reshape(codes.shape)
                for nibble, part in enumerate(parts):
                    values = decoded(codes, factors, nibble, wide=wide, interpret=interpret)
                    total = total + jnp.dot(part, values.T, preferred_element_type=jnp.float32)
                results.append(total)
            return tuple(results), seen

        zeros = jnp.zeros((len(rows), len(columns)), jnp.float32)
        seen = jnp.zeros((len(columns), step_words // _GROUP_WORDS), jnp.uint8)
        return lax.fori_loop(0, -(-all_words // step_words), step, ((zeros,) * len(matrices), seen))

    totals, seen = run(wide=False)
    if interpret:
        return totals  # which decodes any scale
    # No released weight is as large as that; one that is costs its programs their time again.
    any_wide = jnp.max(seen.astype(jnp.int32)) >= NARROW_SCALES
    return lax.cond(any_wide, lambda: run(wide=True)[0], lambda: totals)
