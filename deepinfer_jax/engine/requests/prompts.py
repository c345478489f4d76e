"""The checks of a prompt before it becomes a sequence. Each failure is a sentence."""

from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer_jax.tokenization import ImageTokenOffset


def encode_text(tokenizer: Any, prompt: str) -> list[int]:
    """The ids of a text, special tokens included; ValueError if it has none or cannot be encoded."""
    try:
        ids: list[int] = tokenizer.encode(prompt)
    except ValueError:
        raise
    except Exception as error:  # the tokenizers library raises bare Exception
        raise ValueError(f"the tokenizer cannot encode the prompt {prompt[:40]!r}: {error}") from error
    if prompt and not ids:
        raise ValueError(f"the tokenizer has no tokens for the prompt {prompt[:40]!r}; nothing of it is left")
    return ids


def token_ids(prompt: Any) -> npt.NDArray[np.int64]:
    """The prompt's ids as int64 [length]; ValueError for what is no list of integers or is empty."""
    try:
        ids = np.asarray(prompt)
    except (ValueError, OverflowError) as error:  # ragged lists
        raise ValueError(f"prompt token ids must be one list of integers: {error}") from None
    if ids.ndim != 1:
        raise ValueError(f"prompt token ids must be one list of integers, got an array of shape {ids.shape}")
    if ids.size == 0:
        raise ValueError("prompt must not be empty")
    if not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"prompt token ids must be integers, got {ids.tolist()[:4]} of type {ids.dtype}")
    return ids.astype(np.int64)


def id_problem(ids: npt.NDArray[np.int64], vocab_size: int, *, with_images: bool = False) -> str | None:
    """Why these ids cannot be embedded, None if they can. `with_images`: they may stand for parts of images."""
    limit = vocab_size + ImageTokenOffset.NUM_SPECIAL if with_images else vocab_size
    outside = np.flatnonzero((ids < 0) | (ids >= limit))
    if outside.size == 0:
        return None
    position, token = int(outside[0]), int(ids[outside[0]])
    if 0 <= token - vocab_size < ImageTokenOffset.NUM_SPECIAL:
        return (
            f"token id {token} at position {position} stands for a part of an image, and the prompt has no image "
            f"data; text ids are 0..{vocab_size - 1}"
        )
    return f"token id {token} at position {position} is outside the vocabulary; valid ids are 0..{vocab_size - 1}"
