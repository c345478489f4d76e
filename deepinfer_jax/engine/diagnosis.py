"""Why the logits of a row were no distribution: its text is run again, and the first bad tensor named (design.md §10).

A failed row is not among those that run on, so this may take its time: it compiles a program of its own, which is
none of the engine's step programs.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from deepinfer_jax.cache.dense import Cache, init_cache
from deepinfer_jax.config.model_config import ModelConfig
from deepinfer_jax.engine.requests.request import Request
from deepinfer_jax.kernels.choice import KernelChoice
from deepinfer_jax.model.embedding import IMAGE, ROLE_OF
from deepinfer_jax.model.forward import forward
from deepinfer_jax.model.probe import capture_names
from deepinfer_jax.model.vision import encode_image
from deepinfer_jax.scheduler import DecodeStep, PrefillStep, SequenceStatus
from deepinfer_jax.tokenization import ImagePrompt
from deepinfer_jax.weights.params import Params

logger = logging.getLogger(__name__)

Diagnose = Callable[[npt.NDArray[np.int32], ImagePrompt | None], str]
"""The text of a failed row, and its prompt if that has images, to the reason, a clause."""

CHUNK = 128
"""Tokens that are run at once."""
LONGEST_TEXT = 1 << 15
"""A longer text is not run again: the others wait meanwhile."""

# Integers, truth values, scores that are −inf where they are masked; taps are means of streams.
_NOT_WATCHED = ("engram.rows", "index_scores", "candidates", "index_picks", "expert_ids", "taps")


def explain_failures(
    step: PrefillStep[Request] | DecodeStep[Request],
    emitted: list[tuple[int, int]],
    diagnose: Diagnose | None,
) -> None:
    """Writes into each request that failed in this step why; before its output is made.

    Arguments:
        emitted: what `Scheduler.update` returned: row, and how many tokens its sequence has just emitted.
        diagnose: None: the model cannot be asked.
    """
    for row, _ in emitted:
        sequence = step.sequences[row]
        if sequence.status is SequenceStatus.FINISHED_FAILED:
            text = sequence.token_ids(0, len(sequence))  # with the drafts that this step accepted
            reason = "" if diagnose is None else f": {diagnose(text, sequence.request.image_prompt)}"
            sequence.request.error = (
                f"the logits after position {len(text) - 1} are no distribution (not finite, or all zero){reason}"
            )


def make_diagnosis(params: Params, config: ModelConfig, precision: str, kernels: KernelChoice) -> Diagnose:
    """A `Diagnose` of this model. It never raises: a second failure must not end those that run."""

    def diagnose(text: npt.NDArray[np.int32], image_prompt: ImagePrompt | None) -> str:
        if len(text) > LONGEST_TEXT:
            return f"its {len(text)} tokens were not run again to find the layer, as they are more than {LONGEST_TEXT}"
        try:
            fault = first_fault(params, config, text, image_prompt, precision=precision, kernels=kernels)
        except Exception as error:
            logger.exception("a failed row could not be run again")
            return f"running the text again to find the layer failed too ({type(error).__name__}: {error})"
        return fault or (
            "run again alone they were right, so either what the cache held was spoiled, or bans, biases and masks "
            "left no token"
        )

    return diagnose


def first_fault(
    params: Params,
    config: ModelConfig,
    text: npt.NDArray[np.int32],
    image_prompt: ImagePrompt | None = None,
    *,
    precision: str,
    kernels: KernelChoice,
) -> str | None:
    """The first tensor of the first position of a text that is not finite, or, if none is, is zero before zero logits.

    The text runs in chunks of `CHUNK` tokens; of every captured tensor a chunk keeps two bits per token.

    Arguments:
        text: int32 [tokens], at least one.
        image_prompt: the prompt that it begins with, if that has images; they are encoded again.

    Returns a clause, such as "layers.3.attention.output at position 17 is not finite"; None if the logits after the
    text are finite and not all zero.
    """
    names = _watched(config)
    room = 1 << (len(text) - 1).bit_length()  # few shapes, so few programs
    cache = init_cache(config, 1, max(room, CHUNK), precision=precision)
    zero_last = np.zeros(len(names), np.bool_)
    roles, features = (
        (None, None) if image_prompt is None else _images(params, config, len(text), image_prompt, precision)
    )
    for start in range(0, len(text), CHUNK):
        chunk = np.zeros((1, CHUNK), np.int32)
        count = len(text[start : start + CHUNK])
        chunk[0, :count] = text[start : start + CHUNK]
        images = {}
        if roles is not None and features is not None:
            own = np.full((1, CHUNK), -1, np.int32)
            own[0, :count] = roles[start : start + CHUNK]
            images = {"token_types": own, "image_embeds": jnp.roll(features, -(roles[:start] == IMAGE).sum(), axis=0)}
        flags, cache = _run(
            params, chunk, cache, np.asarray([count]), images, config=config, precision=precision, kernels=kernels
        )
        not_finite, zero = (np.asarray(flag)[:, :count] for flag in flags)
        if not_finite.any():
            position = int(not_finite.any(axis=0).argmax())
            name = names[int(not_finite[:, position].argmax())]
            return f"{name} at position {start + position} is not finite"
        zero_last = zero[:, -1]
    if zero_last[-1]:
        return f"{names[int(zero_last.argmax())]} at position {len(text) - 1} is all zero"
    return None


def _images(
    params: Params, config: ModelConfig, length: int, image_prompt: ImagePrompt, precision: str
) -> tuple[npt.NDArray[np.int32], jax.Array]:
    """The roles of a text's tokens, int32 [length], and the features of all images, [features, hidden]."""
    roles, features = np.full(length, -1, np.int32), []
    for image in image_prompt.images:
        layout = image.image.layout
        roles[image.start : image.stop] = [ROLE_OF[kind] for kind in layout.roles().tolist()]
        patches = jnp.asarray(image.image.patches())
        features.append(
            encode_image(params, config, patches, layout.vit_height, layout.vit_width, precision=precision)[1]
        )
    return roles, jnp.concatenate(features)


def _watched(config: ModelConfig) -> tuple[str, ...]:
    """What is looked at, in the order of the pass: captures that are real numbers, and the logits."""
    return (*(name for name in capture_names(config) if not name.endswith(_NOT_WATCHED)), "logits")


@functools.partial(jax.jit, static_argnames=("config", "precision", "kernels"), donate_argnames=("cache",))
def _run(
    params: Params,
    tokens: npt.NDArray[np.int32],
    cache: Cache,
    lengths: npt.NDArray[Any],
    images: dict[str, Any],
    *,
    config: ModelConfig,
    precision: str,
    kernels: KernelChoice,
) -> tuple[tuple[jax.Array, jax.Array], Cache]:
    """Of each watched tensor and token, whether it is not finite and whether it is all zero, bool [names, CHUNK].

    images: what `forward` gets of them; of its image_embeds only the first are of this chunk.
    """
    names = _watched(config)
    output = forward(
        params,
        config,
        tokens,
        cache=cache,
        lengths=lengths,
        precision=precision,
        capture=names[:-1],
        kernels=kernels,
        **images,
    )
    assert output.logits is not None and output.cache is not None
    tensors = [*(output.captured[name] for name in names[:-1]), output.logits]
    rows = [tensor[0].reshape(CHUNK, -1).astype(jnp.float32) for tensor in tensors]
    not_finite = jnp.stack([~jnp.isfinite(row).all(axis=1) for row in rows])
    zero = jnp.stack([(row == 0).all(axis=1) for row in rows])
    return (not_finite, zero), output.cache
