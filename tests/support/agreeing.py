"""Golden models whose drafts are often accepted, and often not.

The sublayers of the backbone add little to the streams, so that the next token follows mostly from the last one: its
logits are nearly those of a matrix [vocab, vocab], of which the drafts' Markov head holds as much as its rank can.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from deepinfer_jax import Params, load_params
from deepinfer_jax.weights.params import HyperConnection, Layer


def agreeing_load(folder: str | Path, *arguments: Any, **options: Any) -> Params:
    """`load_params` in a precision whose dense weights are plain arrays, changed."""
    params = load_params(folder, *arguments, **options)
    assert params.draft is not None
    embed, norm, head = (np.asarray(leaf, np.float64) for leaf in (params.embed, params.norm, params.head))
    normed = embed / np.sqrt((embed**2).mean(-1, keepdims=True)) * norm
    left, sizes, right = np.linalg.svd(normed @ head.T, full_matrices=False)
    rank = params.draft.markov_embed.shape[1]
    root = np.sqrt(sizes[:rank])
    draft = dataclasses.replace(
        params.draft,
        markov_embed=jnp.asarray(left[:, :rank] * root, params.draft.markov_embed.dtype),
        markov_head=jnp.asarray(right[:rank].T * root, params.draft.markov_head.dtype),
        norm=params.draft.norm * 0.1,
    )
    return dataclasses.replace(params, layers=tuple(map(_subdued, params.layers)), draft=draft)


def _subdued(layer: Layer) -> Layer:
    def quiet(mixing: HyperConnection) -> HyperConnection:
        streams = round(len(mixing.base) ** 0.5 + 0.5) - 1  # of streams · (streams + 2) coefficients
        return dataclasses.replace(mixing, base=mixing.base.at[streams : 2 * streams].add(-4))

    engram = layer.engram
    if engram is not None:
        hidden = engram.q_weight.shape[1]
        engram = dataclasses.replace(engram, wkv=engram.wkv.at[-hidden:].multiply(0.1))  # the values, not the keys
    return dataclasses.replace(layer, hc_attn=quiet(layer.hc_attn), hc_ffn=quiet(layer.hc_ffn), engram=engram)
