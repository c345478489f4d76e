"""The packed int32 array that the host hands to a step program, or to the one that restores sequences."""

from collections.abc import Mapping

import jax
import numpy as np
import numpy.typing as npt
from jax import Array

from deepinfer_jax.runtime.slot_sampling import COLUMN_DTYPES
from deepinfer_jax.scheduler import Bucket, DecodeStep, PrefillStep, blocks_for, blocks_per_decode

# One column per field, in this order; then the new blocks and the tokens: those of a prefill step, and of a decode step
# the ids that its rows must produce (−1: none). Where a prefill step takes images, the places of its tokens
# (`StepBatch`) come last. Floats and unsigned words travel as their bits. next_token is the
# prompt's token after the new ones: the target of the last new token's log-probability; kept_from is that of
# `StepBatch`; bit j of masked says whether the slot's mask j is that of the j-th token that the row may give; budget is
# that of `DecodeStep` on the row's dp rank.
DECODE_COLUMNS = ("slot", "masked", "wants_top", "first_new_block", "budget")
PREFILL_COLUMNS = (
    "slot",
    "forced",
    "masked",
    "wants_top",
    "first_new_block",
    "start",
    "num_new_tokens",
    "completes",
    "limit",
    *COLUMN_DTYPES,
    "next_token",
    "wants_prompt_logprobs",
    "kept_from",
)
# Then the whole block table.
RESTORE_COLUMNS = ("slot", "length", "limit", "last_token", *COLUMN_DTYPES)


def decode_width(bucket: Bucket, tokens_per_block: int) -> int:
    """Words that a decode step sends per row; bucket.time is 1 + drafts."""
    return len(DECODE_COLUMNS) + blocks_per_decode(tokens_per_block, bucket.time - 1) + bucket.time


def prefill_width(bucket: Bucket, tokens_per_block: int, *, images: bool = False) -> int:
    """Words that a prefill step sends per row; images: whether it sends places."""
    return len(PREFILL_COLUMNS) + blocks_for(bucket.time, tokens_per_block) + (1 + images) * bucket.time


def pack_decode(
    step: DecodeStep,
    data: int,
    num_slots: int,
    forced: npt.NDArray[np.int32] | None,
    masked: npt.NDArray[np.int32] | None,
    wants_top: bool,
) -> npt.NDArray[np.int32]:
    """int32 [data, bucket.rows, decode_width]; forced: int32 [n, bucket.time] or None for no forced token; masked:
    int32 [n] or None for no mask."""
    if forced is None:
        forced = np.full((len(step.sequences), step.bucket.time), -1, np.int32)
    columns: dict[str, npt.ArrayLike] = {
        "slot": step.slots,
        "masked": 0 if masked is None else masked,
        "wants_top": wants_top,
        "first_new_block": step.first_new_block,
        "budget": 0 if step.budget is None else step.budget[step.dp_rank],
    }
    return _pack(step, data, num_slots, DECODE_COLUMNS, columns, np.hstack([step.new_blocks, forced]))


def full_decode(bucket: Bucket, data: int, tokens_per_block: int) -> npt.NDArray[np.int32]:
    """A decode step of as many sequences as a program takes, in the first slots, and as many drafts; to measure it."""
    packed = np.full((data, bucket.rows, decode_width(bucket, tokens_per_block)), -1, np.int32)
    packed[:, :, : len(DECODE_COLUMNS)] = 0
    packed[:, :, DECODE_COLUMNS.index("slot")] = np.arange(bucket.rows)
    packed[:, :, DECODE_COLUMNS.index("budget")] = bucket.tokens - bucket.rows
    return packed


def pack_prefill(
    step: PrefillStep,
    data: int,
    num_slots: int,
    sampling: Mapping[str, npt.ArrayLike],
    places: npt.NDArray[np.int32] | None = None,
) -> npt.NDArray[np.int32]:
    """int32 [data, bucket.rows, prefill_width].

    sampling: the columns that the scheduler does not know, each [n] of its natural type; places: int32
    [n, bucket.time] for a program that takes images, else None.
    """
    columns = {
        **sampling,
        "slot": step.slots,
        "first_new_block": step.first_new_block,
        "start": step.starts,
        "num_new_tokens": step.num_new_tokens,
        "completes": step.completes,
    }
    rest = [step.new_blocks, step.tokens] + ([] if places is None else [places])
    return _pack(step, data, num_slots, PREFILL_COLUMNS, columns, np.hstack(rest))


def _pack(
    step: DecodeStep | PrefillStep,
    data: int,
    num_slots: int,
    names: tuple[str, ...],
    columns: Mapping[str, npt.ArrayLike],
    rest: npt.NDArray[np.int32],
) -> npt.NDArray[np.int32]:
    """Always a fresh array: JAX on CPU reads the host's buffer while the step runs (K11)."""
    packed = np.zeros((data, step.bucket.rows, len(names) + rest.shape[1]), np.int32)
    packed[:, :, 0] = num_slots  # an idle row: a slot out of range, no tokens, no blocks
    packed[:, :, len(names) :] = -1
    packed[step.dp_rank, step.row] = pack_rows(len(step.sequences), names, columns, rest)
    return packed


def pack_rows(
    count: int, names: tuple[str, ...], columns: Mapping[str, npt.ArrayLike], rest: npt.NDArray[np.int32]
) -> npt.NDArray[np.int32]:
    """The columns `names`, each one value or [count] of its natural type, and rest int32 [count, k], side by side."""
    rows = np.empty((count, len(names) + rest.shape[1]), np.int32)
    for column, name in enumerate(names):
        rows[:, column] = _bits(name, columns[name])
    rows[:, len(names) :] = rest
    return rows


def unpack(packed: Array, names: tuple[str, ...], num_blocks: int) -> tuple[dict[str, Array], Array, Array]:
    """Columns [data, rows] of their natural types (flags: int32), new blocks [data, rows, num_blocks], and the rest."""
    column = {name: packed[:, :, index] for index, name in enumerate(names)}
    for name, dtype in COLUMN_DTYPES.items():
        if name in column and dtype in (np.float32, np.uint32):
            column[name] = jax.lax.bitcast_convert_type(column[name], dtype)
    first = len(names)
    return column, packed[:, :, first : first + num_blocks], packed[:, :, first + num_blocks :]


def _bits(name: str, values: npt.ArrayLike) -> npt.NDArray[np.int32]:
    dtype = COLUMN_DTYPES.get(name, np.int32)
    return np.asarray(values, np.int32 if dtype is np.bool_ else dtype).view(np.int32)
