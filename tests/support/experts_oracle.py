"""Routed experts in NumPy float64 from model.md §2.2, §2.3 and §6, with a bound on the error of an implementation."""

from typing import Any

import numpy as np

MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
# float32 sums of at most some thousand products, 1e-7 relative each at worst.
SUM_ERROR = 1e-5
# bfloat16 keeps 8 bits; where float32 rounds to the other side of a tie, the results differ by one step.
BFLOAT16_STEP = 2.0**-7
# One step of e4m3: a value near a tie of the quantiser may round either way.
E4M3_STEP = 2.0**-3


def matrix(weight: Any, expert: int) -> np.ndarray:
    """Float64 [out, in] of one expert of an `Fp4Weight`."""
    codes = np.asarray(weight.codes[expert])
    nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(codes.shape[0], -1)
    values = np.where(nibbles < 8, 1, -1) * MAGNITUDES[nibbles & 7]
    scales = np.asarray(weight.scales[expert]).astype(np.float64)
    return values * np.repeat(np.where(scales == 255, np.nan, 2.0 ** (scales - 127)), 32, axis=-1)


def quantised(x: np.ndarray) -> np.ndarray:
    """To e4m3 with one power of two for each 32 channels."""
    groups = x.reshape(*x.shape[:-1], -1, 32)
    scale = 2.0 ** np.ceil(np.log2(np.maximum(np.abs(groups).max(-1, keepdims=True), 1e-4) / 448))
    magnitude = np.abs(groups / scale)
    step = 2.0 ** (np.floor(np.log2(np.maximum(magnitude, 2.0**-6))) - 3)
    return (np.sign(groups) * np.minimum(np.round(magnitude / step) * step, 448) * scale).reshape(x.shape)


def brute_force(arguments: tuple[Any, ...], *, limit: float, quantize_input: bool) -> tuple[np.ndarray, np.ndarray]:
    """Result float64 [tokens, hidden], and how far an implementation may be from it."""
    x, w1, w3, w2, ids, weights = arguments
    x = np.asarray(x).astype(np.float64)
    if quantize_input:
        x = quantised(x)
    result, bound = np.zeros_like(x), np.zeros_like(x)
    experts = w1.codes.shape[0]
    for expert in set(np.asarray(ids).ravel().tolist()) - {experts}:
        tokens, picks = np.nonzero(np.asarray(ids) == expert)
        weight = np.asarray(weights).astype(np.float64)[tokens, picks][:, None]
        (gate, gate_error), (up, up_error) = (_product(x[tokens], 0.0, matrix(w, expert)) for w in (w1, w3))
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
        silu = gate / (1 + np.exp(np.minimum(-gate, 700)))  # exp(710) is beyond float64
        z = weight * silu * up
        error = weight * (1.1 * gate_error * np.abs(up) + np.abs(silu) * up_error) + BFLOAT16_STEP * np.abs(z)
        if quantize_input:
            z, error = quantised(z), error * (1 + E4M3_STEP) + E4M3_STEP * np.abs(z)
        out, error = _product(z, error, matrix(w2, expert))
        result[tokens] += out
        bound[tokens] += error
    return result, bound


def _product(x: np.ndarray, error: np.ndarray | float, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    out = x @ w.T
    return out, (np.abs(x) * SUM_ERROR + error) @ np.abs(w).T + BFLOAT16_STEP * np.abs(out)
