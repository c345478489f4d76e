"""Sparse attention as one Pallas-Triton kernel: decode rows over a window ring and gathered packed FP4 entries.

One program computes one query row for a block of heads. It walks the window slots, then the picks, in blocks of
keys with an online softmax (running maximum, as the released code, model.md §5.3), so nothing of size
[rows, k, dim] ever reaches memory: an entry is read as 288 bytes and unpacked in registers.

A100 has no FP8 conversion, so e4m3 scales are decoded with integer operations (JX §1.4).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from deepinfer_jax.kernels import _backend as backend
from deepinfer_jax.kernels.formats import FP4_KV_GROUP

from .entries import Entries, PackedEntries, PagedEntries, flat_pages, physical_entries
from .reference import LOGIT_FLOOR, SINK_CEILING

BLOCK_HEADS = 16  # the smallest tensor-core tile; a released layer has four such blocks
BLOCK_KEYS = 32
# Channels are taken in parts of so many bytes (128 channels of bfloat16): a whole query and a whole block of keys
# would spill registers, because every warp holds an operand of a tensor-core product.
PART_BYTES = 256
NUM_WARPS = 8
NUM_STAGES = 2


def refusal(query: jax.Array, entries: Entries | None) -> str | None:
    """Why the kernel cannot take these shapes, or None when it can."""
    dim = query.shape[-1]
    if dim < 32 or dim & (dim - 1):
        return f"head dim {dim} is not a power of two of at least 32"
    stored = entries.pages if isinstance(entries, PagedEntries) else entries
    if isinstance(stored, PackedEntries) and stored.codes.size in backend.WRAPPING_BYTES:
        return f"offsets into {stored.codes.size} bytes of packed entries would wrap in 32 bits"
    return None


def sparse_attention_triton(
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
    interpret: bool,
) -> jax.Array:
    """`sparse_attention` (see the package) for shapes that `refusal` accepts; not differentiable."""
    batch, time, heads, _ = query.shape
    if isinstance(entries, PagedEntries) and picks is not None:
        picks, entries = physical_entries(entries, picks), jax.tree.map(flat_pages, entries.pages)
    kernel = functools.partial(
        _kernel,
        time=time,
        sliding_window=sliding_window,
        scale=scale,
        round_probabilities=round_probabilities,
        packed=isinstance(entries, PackedEntries),
    )
    call = backend.whole_array_call(
        kernel,
        name="sparse_attention",
        grid=(batch * time, -(-heads // BLOCK_HEADS)),
        out_shape=jax.ShapeDtypeStruct(query.shape, query.dtype),
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
        interpret=interpret,
    )
    branch = () if picks is None else (picks, *jax.tree.leaves(entries))
    return call(query, window, window_positions, horizon, sink, *branch)


# Running maximum [heads], denominator [heads], and weighted sum of keys, one [heads, channels] per part of dim.
type _State = tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]


def _kernel(
    query_ref: Any,
    window_ref: Any,
    positions_ref: Any,
    horizon_ref: Any,
    sink_ref: Any,
    *branch_and_out: Any,
    time: int,
    sliding_window: int,
    scale: float,
    round_probabilities: bool,
    packed: bool,
) -> None:
    *branch, out_ref = branch_and_out
    row = backend.program_id(0)
    sequence, step = row // time, row % time
    heads = backend.program_id(1) * BLOCK_HEADS + jnp.arange(BLOCK_HEADS)
    real_heads = heads < query_ref.shape[2]
    horizon = horizon_ref[sequence, step]
    dim = query_ref.shape[3]
    width = min(dim, PART_BYTES // query_ref.dtype.itemsize)
    parts = [range(first, first + width) for first in range(0, dim, width)]

    def add_block(state: _State, keys: list[jax.Array], visible: jax.Array) -> _State:
        """One block of keys, a list of [keys, channels] over the parts, zero where not `visible` [keys]."""
        highest, denominator, total = state
        logits = jnp.zeros((BLOCK_HEADS, BLOCK_KEYS), jnp.float32)
        for part, channels in zip(keys, parts, strict=True):
            query = backend.load_rows(query_ref, (sequence, step), heads, real_heads, channels)
            logits += _dot(query, part.T)
        logits = jnp.where(visible[None, :], logits * scale, -jnp.inf)
        higher = jnp.maximum(highest, logits.max(axis=1))
        weights = jnp.exp(logits - higher[:, None])
        shrink = jnp.exp(highest - higher)
        denominator = denominator * shrink + weights.sum(axis=1)
        if round_probabilities:
            weights = weights.astype(jnp.bfloat16)
        total = tuple(old * shrink[:, None] + _dot(weights, part) for old, part in zip(total, keys, strict=True))
        return higher, denominator, total

    def window_block(block: jax.Array, state: _State) -> _State:
        slots = block * BLOCK_KEYS + jnp.arange(BLOCK_KEYS)
        stored = slots < window_ref.shape[1]
        positions = backend.load(positions_ref.at[sequence, slots], mask=stored, other=-1)
        visible = (positions >= 0) & (positions <= horizon) & (positions > horizon - sliding_window)
        keys = [backend.load_rows(window_ref, (sequence,), slots, visible, channels) for channels in parts]
        return add_block(state, keys, visible)

    def picks_block(block: jax.Array, state: _State) -> _State:
        picks_ref, *entry_refs = branch
        places = block * BLOCK_KEYS + jnp.arange(BLOCK_KEYS)
        real = (places < picks_ref.shape[2]) & (horizon >= 0)
        picks = backend.load(picks_ref.at[sequence, step, places], mask=real, other=-1)
        visible = (picks >= 0) & (picks < entry_refs[0].shape[1])
        read: Callable[..., jax.Array] = _load_packed if packed else backend.load_rows
        pool = sequence // (query_ref.shape[0] // entry_refs[0].shape[0])  # pages serve several sequences
        keys = [
            read(*entry_refs, lead=(pool,), rows=picks, real=visible, columns=channels).astype(query_ref.dtype)
            for channels in parts
        ]
        return add_block(state, keys, visible)

    state: _State = (
        jnp.full((BLOCK_HEADS,), LOGIT_FLOOR, jnp.float32),
        jnp.zeros((BLOCK_HEADS,), jnp.float32),
        tuple(jnp.zeros((BLOCK_HEADS, len(channels)), jnp.float32) for channels in parts),
    )
    state = jax.lax.fori_loop(0, -(-window_ref.shape[1] // BLOCK_KEYS), window_block, state)
    if branch:
        state = jax.lax.fori_loop(0, -(-branch[0].shape[2] // BLOCK_KEYS), picks_block, state)
    highest, denominator, total = state
    sink = backend.load(sink_ref.at[heads], mask=real_heads, other=0)
    denominator = denominator + jnp.exp(jnp.minimum(sink - highest, SINK_CEILING))
    for part, channels in zip(total, parts, strict=True):
        result = (part / denominator[:, None]).astype(out_ref.dtype)
        backend.store_rows(out_ref, (sequence, step), heads, real_heads, channels, result)


def _dot(left: jax.Array, right: jax.Array) -> jax.Array:
    """[m, k] x [k, n] with float32 accumulation; float32 operands are not cut to TF32."""
    if jnp.float32 in (left.dtype, right.dtype):
        left, right = left.astype(jnp.float32), right.astype(jnp.float32)
    return jnp.dot(left, right, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _load_packed(
    codes_ref: Any,
    scales_ref: Any,
    lead: tuple[jax.Array, ...],
    rows: jax.Array,
    real: jax.Array,
    columns: range,
) -> jax.Array:
    """Like `backend.load_rows` for packed entries: float32 [rows, columns] (model.md §2.4)."""
    bytes_ = range(columns.start // 2, columns.stop // 2)
    groups = range(columns.start // FP4_KV_GROUP, columns.stop // FP4_KV_GROUP)
    codes = backend.load_rows(codes_ref, lead, rows, real, bytes_).astype(jnp.int32)
    scales = backend.load_rows(scales_ref, lead, rows, real, groups).astype(jnp.int32)
    # Even channels stand in low nibbles: [rows, bytes, 2] -> [rows, groups, 16].
    nibbles = jnp.stack([codes & 15, codes >> 4], axis=-1).reshape(len(rows), len(groups), FP4_KV_GROUP)
    values = _e2m1(nibbles) * _e4m3(scales)[:, :, None]
    return values.reshape(len(rows), len(columns))


def _e2m1(code: jax.Array) -> jax.Array:
    """float32 values of int32 codes 0…15."""
    exponent, mantissa = (code >> 1) & 3, code & 1
    doubled = jnp.where(exponent == 0, mantissa, (2 + mantissa) << jnp.maximum(exponent - 1, 0))
    return jnp.where(code < 8, doubled, -doubled).astype(jnp.float32) * 0.5


def _e4m3(code: jax.Array) -> jax.Array:
    """float32 values of int32 codes 0…255, subnormals and NaN included, without any FP8 type."""
    magnitude = code & 127
    # Exponent and mantissa move to their float32 places, the bias from 7 to 127; 2^-9 is the subnormal step.
    normal = jax.lax.bitcast_convert_type((magnitude << 20) + (120 << 23), jnp.float32)
    value = jnp.where(magnitude < 8, magnitude.astype(jnp.float32) * 2.0**-9, normal)
    value = jnp.where(magnitude == 127, jnp.nan, value)
    return jnp.where(code < 128, value, -value)
