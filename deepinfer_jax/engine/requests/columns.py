"""The columns of `runtime/step_input.py`, gathered from the requests of a step; it packs them into one array."""

from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer_jax.engine.requests.request import Request
from deepinfer_jax.runtime.slot_sampling import SAMPLING_FIELDS
from deepinfer_jax.scheduler import DecodeStep, PrefillStep, Sequence


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
    columns: dict[str, npt.NDArray[Any]] = {
        name: np.asarray([getattr(p, field.source) for p in params], field.dtype)
        for name, field in SAMPLING_FIELDS.items()
        if field.source
    }
    return columns | {
        "limit": np.asarray([sequence.max_cached_tokens for sequence in sequences], np.int32),
        "seed_low": np.asarray([request.seed & 0xFFFFFFFF for request in requests], np.uint32),
        "seed_high": np.asarray([request.seed >> 32 for request in requests], np.uint32),
    }


def prefill_columns(step: PrefillStep[Request], keep_tokens: int | None = None) -> dict[str, npt.NDArray[Any]]:
    """What the host says about each row of a prefill, arrays [rows].

    next_token is the prompt's token after the new ones: the target of the last new token's log-probability. kept_from
    counts from the end of what prefill steps compute, after a preemption with output.

    Arguments:
        keep_tokens: `EngineConfig.keep_tokens`.
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
    request: Request = sequence.request
    first = sequence.output_len + sequence.total_inflight_tokens - time
    return [request.params.forced_token(first + row) for row in range(time)]
