"""Token ids to the first hidden states, image rows merged in (model.md §3)."""

import jax
import jax.numpy as jnp

from deepinfer_jax.config.precision import PrecisionPolicy
from deepinfer_jax.tokenization import TokenType
from deepinfer_jax.weights.params import Params, Vision

# Roles of the positions of an image span; text is negative (golden README).
START, IMAGE, NEWLINE, END = 0, 1, 2, 3
ROLE_OF = {
    TokenType.IMAGE_START: START,
    TokenType.IMAGE: IMAGE,
    TokenType.IMAGE_NEW_LINE: NEWLINE,
    TokenType.IMAGE_END: END,
}

# A position's place says in one number what stands there: a token, one of the vectors around and inside an image, or,
# from 0 on, a row of the features.
TEXT_PLACE, START_PLACE, NEWLINE_PLACE, END_PLACE = -1, -2, -3, -4
PLACE_OF = {START: START_PLACE, NEWLINE: NEWLINE_PLACE, END: END_PLACE}


@jax.named_scope("embed")
def embed_tokens(tokens: jax.Array, params: Params, policy: PrecisionPolicy) -> jax.Array:
    """Embedding rows; an id outside the vocabulary gives zeros. int32 [batch, time] -> [batch, time, hidden]."""
    known = (tokens >= 0) & (tokens < params.embed.shape[0])
    rows = jnp.take(params.embed, jnp.where(known, tokens, 0), axis=0)
    return jnp.where(known[..., None], rows, 0).astype(policy.dtype)


def places_of(roles: jax.Array) -> jax.Array:
    """Places of positions whose features come in reading order: the k-th IMAGE position, batch-major, has row k.

    int32 [batch, time], −1 at text and at padding -> int32 [batch, time].
    """
    is_feature = roles == IMAGE
    rows = jnp.cumsum(is_feature.reshape(-1), dtype=jnp.int32).reshape(roles.shape) - 1
    places = jnp.where(is_feature, rows, TEXT_PLACE)
    for role, place in PLACE_OF.items():
        places = jnp.where(roles == role, place, places)
    return places


@jax.named_scope("embed")
def merge_images(
    embedded: jax.Array, places: jax.Array, features: jax.Array | None, vision: Vision, policy: PrecisionPolicy
) -> jax.Array:
    """Embedding rows [batch, time, hidden] with those of images replaced.

    Args:
        embedded: [batch, time, hidden].
        places: int32 [batch, time], `TEXT_PLACE` at text and at padding.
        features: aligner rows [features, hidden]; None, or no rows, where no place names one.
    """
    vectors = (
        (START_PLACE, vision.image_start),
        (NEWLINE_PLACE, vision.image_newline),
        (END_PLACE, vision.image_end),
    )
    for place, vector in vectors:
        embedded = jnp.where((places == place)[..., None], vector.astype(policy.dtype), embedded)
    if features is None or features.shape[0] == 0:
        return embedded
    rows = jnp.take(features, jnp.clip(places, 0, features.shape[0] - 1), axis=0).astype(policy.dtype)
    return jnp.where((places >= 0)[..., None], rows, embedded)
