"""`prepare` checks a request once, for every door: it gives one that can run, or the reason why it cannot."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer_jax.engine.images.request_images import RequestImages, image_failure_status
from deepinfer_jax.engine.requests.prompts import id_problem, token_ids
from deepinfer_jax.engine.requests.sampling_params import SamplingParams
from deepinfer_jax.scheduler import FINISH_REASONS, Limits, SequenceStatus
from deepinfer_jax.structured import StructuredArgs
from deepinfer_jax.tokenization import ImagePrompt

INVALID_PROMPT = FINISH_REASONS[SequenceStatus.FINISHED_INVALID]
TOO_LONG = FINISH_REASONS[SequenceStatus.FINISHED_IGNORED]


@dataclass(frozen=True)
class RequestRules:
    """What it depends on whether an engine can serve a request.

    Attributes:
        vocab_size: ids a prompt may hold.
        lengths: longest prompt and text.
        has_vision_tower: whether prompts may have images.
        keep_tokens: how many last tokens of a prompt the consumer layers run on (bounded replay); None: all.
    """

    vocab_size: int
    lengths: Limits
    has_vision_tower: bool = False
    keep_tokens: int | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class Prepared:
    """A request that passed every check that needs no opened image.

    Attributes:
        params: as given, a private copy.
        token_ids: of the prompt, int32 [prompt_len].
        structured: what the output must be; None: anything.
        image_prompt: the prompt with its images in place, if they are opened.
        unopened: images that are not in the prompt yet.
    """

    params: SamplingParams
    token_ids: npt.NDArray[np.int32]
    structured: StructuredArgs | None = None
    image_prompt: ImagePrompt | None = None
    unopened: RequestImages | None = None

    @property
    def with_images(self) -> bool:
        """Whether the prompt has images, opened or not."""
        return self.image_prompt is not None or self.unopened is not None


@dataclass(frozen=True, eq=False)
class Refusal:
    """Why a request cannot run.

    Attributes:
        sentence: says it, without the request's name.
        finish_reason: of an output that says it.
        params: as given.
        token_ids: of the prompt, any integers; empty if it has none.
        drops: whether an id is outside the vocabulary, for which `LLMEngine.add_request` drops a request with a line in
            the log (DeepInfer's contract).
    """

    sentence: str
    finish_reason: str
    params: SamplingParams
    token_ids: npt.NDArray[np.integer[Any]] = dataclasses.field(default_factory=lambda: np.empty(0, np.int64))
    drops: bool = False

    @property
    def is_too_long(self) -> bool:
        """Whether prompt and parameters are right, and only too long for this engine."""
        return self.finish_reason == TOO_LONG


def prepare(
    prompt_token_ids: Any, params: SamplingParams, images: Any, rules: RequestRules, *, several: bool = False
) -> Prepared | Refusal:
    """Checks a request, and copies what its caller may change later.

    Arguments:
        prompt_token_ids: one list of integers.
        params: a checked copy (`copy_params`).
        images: `multi_modal_data` as of `LLMEngine.add_request`, its `RequestImages`, or the prompt with its images in
            place, whose ids then count; None: text.
        several: whether `params` may ask for several completions.

    Returns what can be queued, or the first thing that is wrong; raises nothing for a wrong request.
    """
    ids = np.empty(0, np.int64)
    try:
        _check_params(params, rules, several=several)
        opened = images if isinstance(images, ImagePrompt) else None
        unopened = None if isinstance(images, ImagePrompt) else RequestImages.of(images)
        with_images = opened is not None or unopened is not None
        if with_images and not rules.has_vision_tower:
            raise ValueError("the model has no vision tower, so a prompt takes no images: leave multi_modal_data out")
        ids = token_ids(prompt_token_ids if opened is None else opened.token_ids)
    except ValueError as error:
        return Refusal(str(error), INVALID_PROMPT, params, ids)
    structured = params.structured()
    if problem := _vocabulary_problem(ids, params, structured, rules.vocab_size, with_images=with_images):
        return Refusal(problem, INVALID_PROMPT, params, ids, drops=True)
    return _checked_length(
        Prepared(
            params=params,
            token_ids=ids.astype(np.int32),
            structured=structured,
            image_prompt=opened,
            unopened=unopened,
        ),
        rules,
    )


def with_opened_images(prepared: Prepared, opened: ImagePrompt | ValueError, rules: RequestRules) -> Prepared | Refusal:
    """A prepared request once its images are opened, or could not be: its prompt is longer then."""
    if isinstance(opened, ValueError):
        reason = FINISH_REASONS[image_failure_status(opened)]
        return Refusal(str(opened), reason, prepared.params, prepared.token_ids)
    changed = dataclasses.replace(prepared, token_ids=opened.token_ids, image_prompt=opened, unopened=None)
    return _checked_length(changed, rules)


def _check_params(params: SamplingParams, rules: RequestRules, *, several: bool) -> None:
    if params.n != 1 and not several:
        raise ValueError(f"a request is one completion, got n={params.n}; LLM.generate gives several")
    if params.prompt_logprobs and rules.keep_tokens is not None:
        raise ValueError(
            "prompt_logprobs need the final states of the whole prompt, but with "
            "DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE on only those of its last "
            f"{rules.keep_tokens} tokens are right; ask for none, or use an engine without it"
        )


def _checked_length(prepared: Prepared, rules: RequestRules) -> Prepared | Refusal:
    ids, params = prepared.token_ids, prepared.params
    refusal = rules.lengths.refusal(len(ids), params.max_tokens, imported=False)
    return prepared if refusal is None else Refusal(refusal, TOO_LONG, params, ids)


def _vocabulary_problem(
    ids: npt.NDArray[np.int64],
    params: SamplingParams,
    structured: StructuredArgs | None,
    vocab_size: int,
    *,
    with_images: bool,
) -> str | None:
    """Which id of prompt or parameters is outside the vocabulary, None if all are in it."""
    if problem := id_problem(ids, vocab_size, with_images=with_images):
        return problem
    for name, own in _named_ids(params, structured):
        if problem := id_problem(np.asarray(own, np.int64), vocab_size):
            return f"{name}: {problem}"
    return None


def _named_ids(params: SamplingParams, structured: StructuredArgs | None) -> Iterator[tuple[str, list[int]]]:
    """The ids that parameters name, by field."""
    if params.golden_token_ids:
        yield "golden_token_ids", [max(token, 0) for token in params.golden_token_ids]  # -1 leaves an output free
    if params.logit_bias:
        yield "logit_bias", list(params.logit_bias)
    if params.stop_token_ids:
        yield "stop_token_ids", params.stop_token_ids
    if structured is not None and structured.trigger:
        yield "trigger_token_ids", list(structured.trigger)
    if structured is not None and structured.bound is not None:
        yield "bound_token_id", [structured.bound]
