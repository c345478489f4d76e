"""Rows to sample by, the filters by brute force, and the chi-square test."""

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats

from deepinfer_jax.sampling import SamplingRows, draw_draft, processed_logprobs, sample

sample_jit = jax.jit(sample, static_argnames="num_top")
processed_jit = jax.jit(processed_logprobs)
draft_jit = jax.jit(draw_draft)


def make_rows(count: int, **fields: object) -> SamplingRows:
    """Rows that sample at temperature 1 without filters; seed 0, positions 0, 1, 2, ..."""
    values: dict[str, object] = {
        "temperature": 1.0,
        "greedy": False,
        "top_p": 1.0,
        "top_k": -1,
        "seed": np.zeros((count, 2)),
        "position": np.arange(count),
        "banned": -1,
        "forced": -1,
    } | fields
    dtypes = {"temperature": np.float32, "greedy": np.bool_, "top_p": np.float32, "seed": np.uint32}
    return SamplingRows(
        **{
            name: jnp.asarray(np.broadcast_to(value, (count, 2) if name == "seed" else (count,))).astype(
                dtypes.get(name, np.int32)
            )
            for name, value in values.items()
        }
    )


def brute_force_logprobs(logits: np.ndarray, temperature: float, top_p: float, top_k: int) -> np.ndarray:
    """DB §7.3 literally, one row, float64 on the float32 quotients, by sorting."""
    scaled = ((logits - logits.max()) / np.float32(temperature)).astype(np.float64)
    p = np.exp(scaled) / np.exp(scaled).sum()
    order = np.argsort(-scaled, kind="stable")
    before = np.concatenate([[0.0], np.cumsum(p[order])[:-1]])
    keep = np.ones(len(p), bool)
    if top_p < 1:
        keep &= before <= top_p
    if top_k >= 0:
        keep &= np.arange(len(p)) < top_k
    result = np.full(len(p), -np.inf)
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
