"""Rows to sample by, the filters by brute force, and the chi-square test."""

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats

from deepinfer_jax.sampling import SamplingRows, draw_draft, plain_rows, processed_logprobs, sample

sample_jit = jax.jit(sample, static_argnames=("num_top", "options"))
processed_jit = jax.jit(processed_logprobs, static_argnames="options")
draft_jit = jax.jit(draw_draft, static_argnames="options")


def make_rows(count: int, **fields: object) -> SamplingRows:
    """Rows that sample at temperature 1 without filters; seed 0, positions 0, 1, 2, ..."""
    rows = plain_rows(count).replace(position=jnp.arange(count, dtype=jnp.int32))
    given = {}
    for name, value in fields.items():
        own: jax.Array = getattr(rows, name)
        shape = (count, *np.shape(value)[1:]) if name == "uncounted" else own.shape
        given[name] = jnp.asarray(np.broadcast_to(value, shape)).astype(own.dtype)
    return rows.replace(**given)


def brute_force_logprobs(
    logits: np.ndarray,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = -1,
    min_p: float = 0.0,
    force_top_k: int = 0,
) -> np.ndarray:
    """DB §7.3 literally, one row, float64 on the float32 quotients, by sorting."""
    if force_top_k:
        outside = np.argsort(-logits, kind="stable")[force_top_k:]
        logits = logits.copy()
        logits[outside] = -np.inf
    scaled = ((logits - logits.max()) / np.float32(temperature)).astype(np.float64)
    p = np.exp(scaled) / np.exp(scaled).sum()
    order = np.argsort(-scaled, kind="stable")
    before = np.concatenate([[0.0], np.cumsum(p[order])[:-1]])
    keep = p[order] >= min_p * p.max()
    if top_p < 1:
        keep &= before <= top_p
    if top_k >= 0:
        keep &= np.arange(len(p)) < top_k
    result = np.full(len(p), -np.inf)
    with np.errstate(divide="ignore"):  # logits may be -inf
        result[order[keep]] = np.log(p[order[keep]]) - np.log(p[order[keep]].sum())
    return result


def assert_distributed(tokens: np.ndarray, expected: np.ndarray, alpha: float = 1e-3) -> None:
    """Chi-square test of tokens against probabilities; what has probability 0 must not occur.

    Cells that expect less than 5 are pooled, as the test's approximation wants.
    """
    observed = np.bincount(tokens.ravel(), minlength=len(expected))
    assert len(observed) == len(expected)
    assert not observed[expected == 0].any()
    expected = expected / expected.sum() * tokens.size
    small = expected < 5
    observed = np.append(observed[~small], observed[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    chi_square = ((observed - expected) ** 2 / expected).sum()
    assert chi_square < scipy.stats.chi2.isf(alpha, len(expected) - 1), (chi_square, observed, expected)
