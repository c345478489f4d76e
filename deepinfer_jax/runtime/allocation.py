"""Distributes a step's budget of drafts over its rows on the device, by confidence (DB §5.9, §6.5)."""

import jax
import jax.numpy as jnp
from jax import Array

_LARGEST_LOGIT = 60.0


def verification_rates(confidences: Array, temperatures: tuple[float, ...]) -> Array:
    """The probability that a draft and all before it are accepted, float32 [..., drafts], of raw confidence logits.

    A NaN counts as 0. temperatures: one per draft or one for all, positive.
    """
    scaled = jnp.clip(confidences / jnp.asarray(temperatures, jnp.float32), -_LARGEST_LOGIT, _LARGEST_LOGIT)
    each = jax.nn.sigmoid(scaled)
    # One after the other, so that rates never rise within a row.
    rates = [jnp.ones_like(each[..., 0])]
    for draft in range(each.shape[-1]):
        rates.append(rates[-1] * jnp.nan_to_num(each[..., draft]))
    return jnp.stack(rates[1:], axis=-1)


def allocate(rates: Array, most: Array, total: Array) -> Array:
    """How many drafts each row verifies, int32 [rows]; as many as `total` in all, if there are so many.

    The drafts with the highest rates are chosen, of equal ones those of the first row, then the first of a row. As
    rates never rise within a row, a draft is chosen only with all before it. Whether it is chosen depends on the rates
    up to it and on other rows, never on those behind it.

    Args:
        rates: float32 [rows, drafts].
        most: drafts that each row may verify, 0 for an idle one. int32 [rows].
        total: int32 [].
    """
    rows, drafts = rates.shape
    allowed = jnp.arange(drafts, dtype=jnp.int32) < most[:, None]
    order = jnp.argsort(jnp.where(allowed, -rates, 1.0), axis=None, stable=True)
    chosen = jnp.zeros(rows * drafts, jnp.bool_).at[order].set(jnp.arange(rows * drafts) < total)
    return jnp.sum(chosen.reshape(rows, drafts) & allowed, axis=1, dtype=jnp.int32)
