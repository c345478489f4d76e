"""What the engine keeps of a request besides its sequence."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from deepinfer_jax.engine.grammars.constraint import Constraint
from deepinfer_jax.engine.requests.sampling_params import SamplingParams
from deepinfer_jax.scheduler import Sequence
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
