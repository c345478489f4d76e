"""What the engine keeps of a request besides its sequence, and what it tells the device about it."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer_jax.engine.grammars.constraint import Constraint
from deepinfer_jax.engine.requests.sampling_params import SamplingParams
from deepinfer_jax.scheduler import DecodeStep, PrefillStep, Sequence
from deepinfer_jax.tokenization import ImagePrompt


@dataclass(slots=True)
class Request:
    """The engine's record of a request; `Sequence.request`.

    Attributes:
        params: a private copy.
        seed: 64-bit key of the request's random numbers.
        prompt_logprobs: entry i belongs to prompt token i + 1; grows with the chunks.
        launched: whether some step of it has been launched.
        error: why the engine ended it, "" if it did not.
        constraint: its grammar; None if it has none.
        image_prompt: its prompt with the images in place, kept as long as a preemption may want them again; None: text.
        awaits: what must be ready before it may start: `BackgroundWork.name` of each kind of work.
    """

    params: SamplingParams
    seed: int
    prompt_logprobs: list[float] = field(default_factory=list)
    launched: bool = False
    error: str = ""
    constraint: Constraint | None = None
    image_prompt: ImagePrompt | None = None
    awaits: set[str] = field(default_factory=set)

    def take_prompt_logprobs(self, start: int, logprobs: list[float]) -> None:
        """Keeps the entries `start`, `start` + 1, … that are not there yet.

        A preempted request computes its prompt again: what it has must not come twice (DB §15.2 trap 27).
        """
        self.prompt_logprobs += logprobs[len(self.prompt_logprobs) - start :]


def mark_ready(sequence: Sequence[Request], ready: str) -> None:
    """Says that one of the things that a sequence awaits is ready; with the last one it may run. May be said again."""
    sequence.request.awaits.discard(ready)
    sequence.schedulable = not sequence.request.awaits


def check_request_id(request_id: object) -> None:
    """TypeError for a request id that is no string: outputs, and those who abort, name requests by string."""
    if not isinstance(request_id, str):
        raise TypeError(f"request_id must be a string, got {request_id!r} of type {type(request_id).__name__}")


def copy_params(sampling_params: SamplingParams | dict[str, Any] | None, eos_id: int) -> SamplingParams:
    """A private copy with the engine's EOS, so that neither side sees the other's later changes.

    It is checked: fields may be set afterwards, and EOS is one of the ids that rules name.
    """
    if isinstance(sampling_params, SamplingParams):
        return dataclasses.replace(sampling_params, eos_id=eos_id)
    if sampling_params is not None and not isinstance(sampling_params, dict):
        raise TypeError(f"sampling_params must be SamplingParams or a dict of its fields, got {sampling_params!r}")
    given = {k: v for k, v in (sampling_params or {}).items() if v is not None}
    return SamplingParams(**(given | {"eos_id": eos_id}))


def slot_places(sequences: list[Sequence[Request]]) -> dict[str, npt.NDArray[np.int32]]:
    """Where the slots of sequences are, as arguments of the runner: dp_rank and slots, int32 [n]."""
    return {
        "dp_rank": np.asarray([sequence.dp_rank for sequence in sequences], np.int32),
        "slots": np.asarray([sequence.state_id for sequence in sequences], np.int32),
    }


def sampling_columns(sequences: list[Sequence[Request]]) -> dict[str, npt.NDArray[Any]]:
    """How long each sequence may become and what it samples by, arrays [n]; the device keeps it from step to step."""
    requests = [sequence.request for sequence in sequences]
    params = [request.params for request in requests]
    return {
        "temperature": np.asarray([p.temperature for p in params], np.float32),
        "greedy": np.asarray([p.greedy for p in params], np.bool_),
        "top_p": np.asarray([p.top_p for p in params], np.float32),
        "top_k": np.asarray([p.top_k for p in params], np.int32),
        "min_p": np.asarray([p.min_p for p in params], np.float32),
        "raw_logprobs": np.asarray([p.logprobs_mode == "raw_logprobs" for p in params], np.bool_),
        "presence": np.asarray([p.presence_penalty for p in params], np.float32),
        "frequency": np.asarray([p.frequency_penalty for p in params], np.float32),
        "repetition": np.asarray([p.repetition_penalty for p in params], np.float32),
        "edited": np.asarray([bool(p.edits(0)) for p in params], np.bool_),
        "penalised": np.asarray([p.penalised for p in params], np.bool_),
        "limit": np.asarray([sequence.max_cached_tokens for sequence in sequences], np.int32),
        "seed_low": np.asarray([request.seed & 0xFFFFFFFF for request in requests], np.uint32),
        "seed_high": np.asarray([request.seed >> 32 for request in requests], np.uint32),
    }


def prefill_columns(step: PrefillStep[Request], keep_tokens: int | None = None) -> dict[str, npt.NDArray[Any]]:
    """What the host says about each row of a prefill, arrays [rows].

    next_token is the prompt's token after the new ones: the target of the last new token's log-probability. kept_from
    counts from the end of what prefill steps compute, after a preemption with output.

    Arguments:
        keep_tokens: `EngineLimits.keep_tokens`.
    """
    params = [sequence.request.params for sequence in step.sequences]
    ends = (step.starts + step.num_new_tokens).tolist()
    rows = list(zip(step.sequences, params, ends, strict=True))
    return sampling_columns(step.sequences) | {
        # After a preemption the last token is known; the step takes it as if it had sampled it.
        "forced": np.asarray([s.last_token_id if s.output_len else p.forced_token(0) for s, p, _ in rows], np.int32),
        "masked": np.where(step.samples, mask_bits(step), 0),
        "next_token": np.asarray(
            [s.prompt_token_ids[end] if end < s.prompt_len else 0 for s, _, end in rows], np.int32
        ),
        "wants_top": step.samples & np.asarray([p.top_logprobs > 0 for p in params], np.bool_),
        "wants_prompt_logprobs": np.asarray(
            [p.prompt_logprobs and s.output_len == 0 and s.prompt_len > 1 for s, p, _ in rows], np.bool_
        ),
        "kept_from": np.asarray(
            [0 if keep_tokens is None else max(s.prefill_len - keep_tokens, 0) for s in step.sequences], np.int32
        ),
    }


def mask_bits(step: PrefillStep[Request] | DecodeStep[Request]) -> npt.NDArray[np.int32]:
    """int32 [rows]: bit j says whether mask j of the row's slot holds."""
    constraints = [sequence.request.constraint for sequence in step.sequences]
    return np.asarray([0 if constraint is None else constraint.bits() for constraint in constraints], np.int32)


def forced_tokens(step: DecodeStep[Request]) -> npt.NDArray[np.int32]:
    """int32 [n, bucket.time]: the id that each row's output is forced to, -1 if it is free."""
    return np.asarray([_forced(sequence, step.bucket.time) for sequence in step.sequences], np.int32)


def _forced(sequence: Sequence[Request], time: int) -> list[int]:
    # The step itself counts as in flight already; its outputs come after those of the steps before it, of which the
    # number is known: without drafts each gives one, with drafts there are none (`Sequence.waits_for_results`).
    first = sequence.output_len + sequence.total_inflight_tokens - time
    return [sequence.request.params.forced_token(first + row) for row in range(time)]
