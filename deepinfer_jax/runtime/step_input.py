"""The one packed int32 array that the host hands to a step program."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import Array

from deepinfer_jax.sampling import GREEDY_TEMPERATURE, SamplingRows

# One column per field, in this order; the tokens follow. Floats and unsigned words travel as their bits.
# next_token is the prompt's token after the new ones: the target of the last new token's log-probability.
_COLUMNS = (
    "num_new_tokens",
    "reset",
    "next_token",
    "temperature",
    "greedy",
    "top_p",
    "top_k",
    "seed_low",
    "seed_high",
    "position",
    "banned",
    "forced",
)
_FLOATS = ("temperature", "top_p")
_WORDS = ("seed_low", "seed_high")
NUM_COLUMNS = len(_COLUMNS)

# An idle row: nothing to run, nothing to draw.
_IDLE = {"temperature": GREEDY_TEMPERATURE, "greedy": True, "top_p": 1.0, "top_k": -1, "banned": -1, "forced": -1}


def pack(
    rows: int, time: int, slots: npt.NDArray[np.int32], tokens: npt.NDArray[np.int32], **columns: npt.ArrayLike
) -> npt.NDArray[np.int32]:
    """int32 [rows, NUM_COLUMNS + time] with the given columns at `slots` and every other row idle.

    `tokens` is int32 [len(slots), <= time]; each column is `[len(slots)]` of its natural type. Always a fresh
    array: JAX on CPU reads the host's buffer while the step runs (K11).
    """
    packed = np.zeros((rows, NUM_COLUMNS + time), np.int32)
    for column, name in enumerate(_COLUMNS):
        packed[:, column] = _bits(name, _IDLE.get(name, 0))
        packed[slots, column] = _bits(name, columns[name])
    packed[slots, NUM_COLUMNS : NUM_COLUMNS + tokens.shape[1]] = tokens
    return packed


class StepInput(NamedTuple):
    """The packed array inside the program.

    Attributes:
        tokens: int32 [rows, time], valid in the first `num_new_tokens` columns of a row.
        num_new_tokens: int32 [rows], 0 in idle rows.
        resets: bool [rows], rows to empty first.
        next_token: int32 [rows], the prompt's token after the new ones.
        sampling: what each row samples by.
    """

    tokens: Array
    num_new_tokens: Array
    resets: Array
    next_token: Array
    sampling: SamplingRows


def unpack(packed: Array) -> StepInput:
    """The fields of packed int32 [rows, NUM_COLUMNS + time]."""
    column = {name: packed[:, index] for index, name in enumerate(_COLUMNS)}
    for name in _FLOATS:
        column[name] = jax.lax.bitcast_convert_type(column[name], jnp.float32)
    seed = jnp.stack([jax.lax.bitcast_convert_type(column[name], jnp.uint32) for name in _WORDS], axis=-1)
    sampling = SamplingRows(
        temperature=column["temperature"],
        greedy=column["greedy"] != 0,
        top_p=column["top_p"],
        top_k=column["top_k"],
        seed=seed,
        position=column["position"],
        banned=column["banned"],
        forced=column["forced"],
    )
    return StepInput(
        tokens=packed[:, NUM_COLUMNS:],
        num_new_tokens=column["num_new_tokens"],
        resets=column["reset"] != 0,
        next_token=column["next_token"],
        sampling=sampling,
    )


def _bits(name: str, values: npt.ArrayLike) -> npt.NDArray[np.int32]:
    if name in _FLOATS:
        return np.asarray(values, np.float32).view(np.int32)
    if name in _WORDS:
        return np.asarray(values, np.uint32).view(np.int32)
    return np.asarray(values, np.int32)
