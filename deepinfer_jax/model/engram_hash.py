"""Engram row ids on the device, exact 64-bit integers without the global x64 flag (model.md §7.2).

A product id·multiplier reaches 2^63, so 64-bit numbers are pairs of uint32 words; the remainder by a prime is taken
a few bits at a time. The host twin is `deepinfer_jax.tokenization`'s `ngram_rows`; tests compare the two.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from deepinfer_jax.config.model_config import TextConfig
from deepinfer_jax.tokenization.engram_hash import engram_multipliers, engram_offsets, engram_primes

_MASK16 = np.uint32(0xFFFF)


@functools.cache
def _primes_and_offsets(text: TextConfig) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Moduli and table offsets, int64 [layers, ngram - 1, heads].

    Raises:
        ValueError: a table has another size than its primes add up to.
    """
    primes = engram_primes(
        text.engram_layer_ids, text.engram_vocab_size, text.engram_max_ngram_size, text.engram_n_heads
    )
    for layer, rows, wanted in zip(
        text.engram_layer_ids, primes.sum(axis=(1, 2)), text.engram_num_embeddings, strict=True
    ):
        if rows != wanted:
            raise ValueError(
                f"the Engram hash of layer {layer} addresses {rows} rows (the sum of its primes), "
                f"but engram_num_embeddings says {wanted}"
            )
    return primes, engram_offsets(primes)


@jax.named_scope("engram")
def engram_rows(history: jax.Array, pad: jax.Array, text: TextConfig) -> jax.Array:
    """Table rows of every new token.

    Args:
        history: compressed ids of the n-gram − 1 tokens before, then of the new ones; negative where there is no
            text. int32 [batch, ngram - 1 + time].
        pad: compressed id of `engram_pad_token_id`. int32 scalar.

    Returns:
        int32 [batch, time, layers, (ngram - 1)·heads], 2-grams first.
    """
    primes, offsets = _primes_and_offsets(text)
    reach = text.engram_max_ngram_size
    time = history.shape[1] - (reach - 1)
    dead = jnp.zeros((history.shape[0], time), bool)
    tokens = []
    for back in range(reach):
        token = history[:, reach - 1 - back : reach - 1 - back + time]
        dead = dead | (token < 0)  # sticky: what lies behind a cut stays cut (T24)
        tokens.append(jnp.where(dead, pad, token).astype(jnp.uint32))
    layers = []
    for layer, layer_id in enumerate(text.engram_layer_ids):
        multipliers = engram_multipliers(layer_id, reach, text.engram_compressed_vocab_size)
        high, low = _multiply(tokens[0], int(multipliers[0]))
        rows = []
        for order in range(1, reach):
            term_high, term_low = _multiply(tokens[order], int(multipliers[order]))
            high, low = high ^ term_high, low ^ term_low
            remainder = _remainder(high[..., None], low[..., None], primes[layer, order - 1])
            rows.append(remainder.astype(jnp.int32) + offsets[layer, order - 1].astype(np.int32))
        layers.append(jnp.concatenate(rows, axis=-1))
    return jnp.stack(layers, axis=2)


def _multiply(token: jax.Array, multiplier: int) -> tuple[jax.Array, jax.Array]:
    """(high, low) words of token · multiplier, by 16-bit limbs; exact below 2^64."""
    low16, high16 = np.uint32(multiplier & 0xFFFF), np.uint32(multiplier >> 16 & 0xFFFF)
    top = np.uint32(multiplier >> 32)
    a, b = token & _MASK16, token >> 16
    low_low, low_high, high_low = a * low16, a * high16, b * low16
    middle = (low_low >> 16) + (low_high & _MASK16) + (high_low & _MASK16)
    high = b * high16 + (low_high >> 16) + (high_low >> 16) + (middle >> 16) + token * top
    return high, (low_low & _MASK16) | (middle << 16)


def _remainder(high: jax.Array, low: jax.Array, primes: npt.NDArray[np.int64]) -> jax.Array:
    """(high·2^32 + low) mod each prime, by Horner's rule on digits that keep every step below 2^32."""
    digit_bits = next(bits for bits in (16, 8, 4, 2, 1) if int(primes.max()) <= 1 << (32 - bits))
    mask = np.uint32((1 << digit_bits) - 1)
    moduli = primes.astype(np.uint32)
    remainder = jnp.zeros((*high.shape[:-1], len(moduli)), jnp.uint32)
    for word in (high, low):
        for shift in range(32 - digit_bits, -1, -digit_bits):
            remainder = ((remainder << digit_bits) | (word >> np.uint32(shift) & mask)) % moduli
    return remainder
