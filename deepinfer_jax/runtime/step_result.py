"""Results of a launched step: device arrays on their way to the host, and NumPy arrays once they are there."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from jax import Array

from deepinfer_jax.runtime.steps import StepOutput


@dataclass(frozen=True)
class StepResult:
    """What one step gave to its n sequences, in the step's order; see `StepOutput`.

    Attributes:
        tokens: of q = 1 row of a prefill step, of q = 1 + drafts rows of a decode step. int32 [n, q].
        counts: so many of them, the first ones, count. int32 [n].
        logprobs: float32 [n, q].
        finite: bool [n], false where the logits were not.
        verified: rows that were computed, at most q. int32 [n].
        drafts: the next ones, int32 [n, drafts]; None without.
        confidences: raw, of the drafts that might have been verified. float32 [n, drafts]; None of a prefill step, or
            without drafts.
        top_tokens, top_logprobs: int32 and float32 [n, q, 1000 or the vocabulary]; None unless some row wanted them.
        prompt_logprobs: float32 [n, time]; None unless some row wanted them.
        sum_smaller_probs: float32 [n, q]; None unless the sampler's options ask for them.
        draft_logprobs: float32 [n, q], of each row's draft in its own distribution; None of a prefill step, and unless
            the sampler's options ask for them.
    """

    tokens: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    finite: npt.NDArray[np.bool_]
    verified: npt.NDArray[np.int32]
    drafts: npt.NDArray[np.int32] | None = None
    confidences: npt.NDArray[np.float32] | None = None
    top_tokens: npt.NDArray[np.int32] | None = None
    top_logprobs: npt.NDArray[np.float32] | None = None
    prompt_logprobs: npt.NDArray[np.float32] | None = None
    sum_smaller_probs: npt.NDArray[np.float32] | None = None
    draft_logprobs: npt.NDArray[np.float32] | None = None


@dataclass(frozen=True)
class InFlight:
    """A launched step. Its small outputs are already on their way to the host.

    Attributes:
        arrays: what will be read, by the names of `StepResult`; device arrays [data · bucket.rows, ...].
        rows: int32 [n], the rows of the step's sequences among these.
    """

    arrays: dict[str, Array]
    rows: npt.NDArray[np.int32]

    @classmethod
    def start(
        cls, output: StepOutput, rows: npt.NDArray[np.int32], wants_top: bool, wants_prompt_logprobs: bool
    ) -> "InFlight":
        """Sends the arrays that `result` reads towards the host as soon as they exist."""
        sampled = output.sampled
        arrays = {
            "tokens": sampled.tokens,
            "counts": output.counts,
            "logprobs": sampled.logprobs,
            "finite": output.finite,
            "verified": output.verified,
            "drafts": output.drafts,
            "confidences": output.confidences,
            "top_tokens": sampled.top_tokens if wants_top else None,
            "top_logprobs": sampled.top_logprobs if wants_top else None,
            "prompt_logprobs": output.prompt_logprobs if wants_prompt_logprobs else None,
            "sum_smaller_probs": sampled.sum_smaller_probs,
            "draft_logprobs": sampled.draft_logprobs,
        }
        in_flight = cls({name: array for name, array in arrays.items() if array is not None}, rows)
        for array in in_flight.arrays.values():
            array.copy_to_host_async()
        return in_flight

    def result(self) -> StepResult:
        """Waits until the step is done; raises what went wrong on the device."""
        found: dict[str, Any] = {name: np.asarray(array)[self.rows] for name, array in self.arrays.items()}
        return StepResult(**found)
