"""What the engine gives back: one object per emitted token (DB §1.6)."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

from deepinfer_jax.engine.requests.stop_texts import begin_of


@dataclass(slots=True)
class RequestOutput:
    """One emitted token of a request; names and meanings are DeepInfer's (DB §1.6).

    The object and its lists belong to the caller: the engine keeps no reference and reuses none.

    Attributes:
        request_id: the caller's name of the request.
        prompt_len: tokens of the prompt, those of its images included.
        token_id: the emitted token. A request that ended without one repeats its last token; -1 if it has none.
        finish_reason: "" unless this is the last output of a finished request (DB §1.7), then "stop", "length",
            "abort", "prompt_length_exceeded", "insufficient_system_resource" (preempted and not resumed), "xgrammar
            runtime errors or timeout", "ve_error" (an image cannot be used); ours are "logits_not_finite" and
            "invalid_prompt" (of a prompt that does not match its images, and of `LLM.generate(...,
            on_invalid="report")`).
        finished: whether this is the request's last output.
        max_num_batched_tokens: the engine's constant.
        token_logprobs: log-probability of the token, of the distribution sampled from or of the model
            (`SamplingParams.logprobs_mode`), at least -9999; 1.0 if there is no token.
        nextn_logprobs: of an accepted draft, with DEEPINFER_COMPUTE_SUM_SMALLER_PROBS, its log-probability in the
            distribution that it was drawn from; else 1.0.
        sum_smaller_probs: with DEEPINFER_COMPUTE_SUM_SMALLER_PROBS the probability of all that is less likely than the
            token, or equally likely with an id up to its own; else -1.0.
        top_logprobs, top_token_ids: the likeliest tokens, in descending order, `SamplingParams.top_logprobs` long, and
            behind them the token itself if it is not among them.
        num_output_tokens: output tokens up to this one, from 1.
        prompt_logprobs: [prompt_len - 1] on the first output of a request that asked, else empty; -9999 at positions of
            an image, whose ids no model gives.
        draft_tok: on the last output of a step, the rows verified in it: drafts + 1, fewer at the end of the longest
            text that the request may have and with DEEPINFER_ENABLE_MTP_VARLEN; else 0.
        accept_tok: on the last output of a step, accepted drafts + 1; else 0.
        confidence_score: on the last output of a decode step with drafts, the confidence head's probability that
            each draft verified in it is accepted, given that those before it are; else None.
        num_cached_tokens: ours: tokens of the prompt whose state was restored instead of computed, on the request's
            first output; else 0.
        stop_reason: ours: with finish reason "stop", the id of `SamplingParams.stop_token_ids` or the text of `stop`
            that ended the request; None: EOS did.
        message: ours: a sentence if the request failed, else "".
    """

    request_id: str
    prompt_len: int
    token_id: int
    finish_reason: str = ""
    finished: bool = False
    max_num_batched_tokens: int = 0
    token_logprobs: float = 1.0
    nextn_logprobs: float = 1.0
    sum_smaller_probs: float = -1.0
    top_logprobs: list[float] = field(default_factory=list)
    top_token_ids: list[int] = field(default_factory=list)
    num_output_tokens: int = 0
    prompt_logprobs: list[float] = field(default_factory=list)
    draft_tok: int = 0
    accept_tok: int = 0
    confidence_score: list[float] | None = None
    num_cached_tokens: int = 0
    stop_reason: int | str | None = None
    message: str = ""

    def clone(self) -> "RequestOutput":
        """An independent copy. DeepInfer's objects live in a pool and need it; here every output is the caller's."""
        return dataclasses.replace(
            self,
            top_logprobs=list(self.top_logprobs),
            top_token_ids=list(self.top_token_ids),
            prompt_logprobs=list(self.prompt_logprobs),
            confidence_score=None if self.confidence_score is None else list(self.confidence_score),
        )


def token_output(
    *,
    request_id: str,
    prompt_len: int,
    token_id: int,
    max_num_batched_tokens: int,
    token_logprobs: float,
    num_output_tokens: int,
) -> RequestOutput:
    """`RequestOutput` of these fields, in two thirds of its constructor's time: a decode step makes hundreds."""
    output = object.__new__(RequestOutput)
    output.request_id = request_id
    output.prompt_len = prompt_len
    output.token_id = token_id
    output.finish_reason = ""
    output.finished = False
    output.max_num_batched_tokens = max_num_batched_tokens
    output.token_logprobs = token_logprobs
    output.nextn_logprobs = 1.0
    output.sum_smaller_probs = -1.0
    output.top_logprobs = []
    output.top_token_ids = []
    output.num_output_tokens = num_output_tokens
    output.prompt_logprobs = []
    output.draft_tok = 0
    output.accept_tok = 0
    output.confidence_score = None
    output.num_cached_tokens = 0
    output.stop_reason = None
    output.message = ""
    return output


def answer_ids(outputs: list[RequestOutput], *, strip_eos: bool = True) -> list[int]:
    """The ids that a request's outputs hold, without the one that ended it (EOS or a stop id) if `strip_eos`."""
    ids = [output.token_id for output in outputs if not output.message]
    if strip_eos and outputs[-1].finish_reason == "stop" and not isinstance(outputs[-1].stop_reason, str):
        ids.pop()
    return ids


def answer_text(outputs: list[RequestOutput], decode: Callable[[list[int]], str], *, strip_eos: bool = True) -> str:
    """The text of `answer_ids`, up to the text that ended it."""
    ids, stop = answer_ids(outputs, strip_eos=strip_eos), outputs[-1].stop_reason
    text = decode(ids)
    return text[: begin_of(stop, text, decode(ids[:-1]))] if isinstance(stop, str) else text
