"""Token ids to the first hidden states, image rows merged in (model.md §3)."""

import jax
import jax.numpy as jnp

from deepinfer_jax.arithmetic import Arithmetic
from deepinfer_jax.params import Params, Vision

# Roles of the positions of an image span; text is negative (golden README).
START, IMAGE, NEWLINE, END = 0, 1, 2, 3


def embed_tokens(tokens: jax.Array, params: Params, arith: Arithmetic) -> jax.Array:
    """Embedding rows; an id outside the vocabulary gives zeros. int32 [batch, time] -> [batch, time, hidden]."""
    known = (tokens >= 0) & (tokens < params.embed.shape[0])
    rows = jnp.take(params.embed, jnp.where(known, tokens, 0), axis=0)
    return jnp.where(known[..., None], rows, 0).astype(arith.dtype)


def merge_images(
    embedded: jax.Array, roles: jax.Array, features: jax.Array | None, vision: Vision, arith: Arithmetic
) -> jax.Array:
    """Delimiters take their vectors; the k-th IMAGE position, batch-major, takes the k-th feature row.

    Args:
        embedded: [batch, time, hidden].
        roles: int32 [batch, time], −1 at text and at padding.
        features: aligner rows [features, hidden], or None without images.
    """
    for role, vector in ((START, vision.image_start), (END, vision.image_end), (NEWLINE, vision.image_newline)):
        embedded = jnp.where((roles == role)[..., None], vector.astype(arith.dtype), embedded)
    if features is None or features.shape[0] == 0:  # a chunk without images may bring no rows
        return embedded
    is_feature = roles == IMAGE
    number = (jnp.cumsum(is_feature.reshape(-1), dtype=jnp.int32) - 1).reshape(roles.shape)
    rows = jnp.take(features.astype(arith.dtype), jnp.clip(number, 0, features.shape[0] - 1), axis=0)
    return jnp.where(is_feature[..., None], rows, embedded)
