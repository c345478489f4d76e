"""What the device remembers of how each running sequence samples: sent once, when it starts."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from flax import struct
from jax import Array

from deepinfer_jax.kernels.pools import read_pool, write_pool
from deepinfer_jax.sampling import SamplingRows

SAMPLING_COLUMNS = ("temperature", "top_p", "top_k", "greedy", "seed_low", "seed_high")
"""The columns of `step_input` that say so."""


@struct.dataclass
class SlotSampling:
    """Sampling parameters, one row per slot of each data index; see `SamplingRows`.

    Attributes:
        temperature, top_p: float32 [data, slots].
        top_k: int32 [data, slots].
        greedy: bool [data, slots].
        seed: uint32 [data, slots, 2], low and high word of `seq_seed`.
    """

    temperature: Array
    top_p: Array
    top_k: Array
    greedy: Array
    seed: Array


def init_slot_sampling(filled: Callable[..., Array]) -> SlotSampling:
    """Of empty slots. filled: (value, dtype, *more axes) -> array [data, slots, *more]."""
    return SlotSampling(
        temperature=filled(1, jnp.float32),
        top_p=filled(1, jnp.float32),
        top_k=filled(-1, jnp.int32),
        greedy=filled(True, jnp.bool_),
        seed=filled(0, jnp.uint32, 2),
    )


def with_sampling(kept: SlotSampling, slots: Array, column: dict[str, Array]) -> SlotSampling:
    """With the parameters of the rows in slots int32 [data, rows]; column: `SAMPLING_COLUMNS`, [data, rows]."""
    values = {
        "temperature": column["temperature"],
        "top_p": column["top_p"],
        "top_k": column["top_k"],
        "greedy": column["greedy"] != 0,
        "seed": jnp.stack([column["seed_low"], column["seed_high"]], axis=-1),
    }
    return dataclasses.replace(
        kept, **{name: write_pool(getattr(kept, name), (slots,), value) for name, value in values.items()}
    )


def sampling_rows(kept: SlotSampling, slots: Array, position: Array, banned: Array, forced: Array) -> SamplingRows:
    """What the rows int32 [data, rows] sample by, in one row axis [data · rows]."""

    def of(array: Array) -> Array:
        rows = read_pool(array, slots)
        return rows.reshape(-1, *rows.shape[2:])

    return SamplingRows(
        temperature=of(kept.temperature),
        greedy=of(kept.greedy) | (slots.reshape(-1) >= kept.greedy.shape[1]),  # an idle row draws nothing
        top_p=of(kept.top_p),
        top_k=of(kept.top_k),
        seed=of(kept.seed),
        position=position.reshape(-1),
        banned=banned.reshape(-1),
        forced=forced.reshape(-1),
    )
