"""One request while the engine holds it: its tokens, its place in the cache, and when it stops."""

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt


class SequenceStatus(IntEnum):
    """States of a sequence (DB §1.7, in DeepInfer's order; finished means >= FINISHED_STOPPED).

    SWAPPED is never used, as in DeepInfer. FINISHED_FAILED is ours: DeepInfer ends the process when
    the logits of one row are not finite (DB §15.2 trap 35).
    """

    WAITING = 0
    RUNNING = 1
    SWAPPED = 2
    FINISHED_STOPPED = 3
    FINISHED_LENGTH_CAPPED = 4
    FINISHED_ABORTED = 5
    FINISHED_IGNORED = 6
    FINISHED_PREEMPTED = 7
    FINISHED_SO_FAILED = 8
    FINISHED_VE_FAILED = 9
    FINISHED_FAILED = 10

    @property
    def finished(self) -> bool:
        return self >= SequenceStatus.FINISHED_STOPPED


FINISH_REASONS = {
    SequenceStatus.FINISHED_STOPPED: "stop",
    SequenceStatus.FINISHED_LENGTH_CAPPED: "length",
    SequenceStatus.FINISHED_ABORTED: "abort",
    SequenceStatus.FINISHED_IGNORED: "prompt_length_exceeded",
    SequenceStatus.FINISHED_PREEMPTED: "insufficient_system_resource",
    SequenceStatus.FINISHED_SO_FAILED: "xgrammar runtime errors or timeout",
    SequenceStatus.FINISHED_VE_FAILED: "ve_error",
    SequenceStatus.FINISHED_FAILED: "logits_not_finite",
}


@dataclass(eq=False)
class Sequence:
    """The tokens of one request and its progress (DB §5.1).

    Attributes:
        seq_id: unique over the engine's life.
        request_id: the caller's name of the request.
        prompt_token_ids: int32 [prompt_len].
        max_tokens: output tokens after which it stops, at least 1.
        eos_id: the id that stops it, unless `ignore_eos`.
        max_model_len: it stops once prompt and output together exceed this many tokens.
        output_token_ids: what has been generated.
        num_tokens: tokens whose state is in the cache; after a step that generates, all but the last.
        slot: row of the cache while it runs, -1 otherwise.
    """

    seq_id: int
    request_id: str
    prompt_token_ids: npt.NDArray[np.int32]
    max_tokens: int
    eos_id: int
    max_model_len: int
    ignore_eos: bool = False
    status: SequenceStatus = SequenceStatus.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    num_tokens: int = 0
    slot: int = -1

    def __len__(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def output_len(self) -> int:
        return len(self.output_token_ids)

    @property
    def last_token_id(self) -> int:
        """The last token of prompt and output."""
        return self.output_token_ids[-1] if self.output_token_ids else int(self.prompt_token_ids[-1])

    @property
    def finish_reason(self) -> str:
        """DeepInfer's reason string, "" while unfinished."""
        return FINISH_REASONS.get(self.status, "")

    def next_tokens(self, count: int) -> npt.NDArray[np.int32]:
        """The `count` tokens after those in the cache, int32 [count]."""
        start, stop = self.num_tokens, self.num_tokens + count
        prompt = self.prompt_token_ids[start:stop]
        output = self.output_token_ids[max(start - self.prompt_len, 0) : max(stop - self.prompt_len, 0)]
        return np.concatenate([prompt, np.asarray(output, np.int32)])

    def append_token(self, token_id: int) -> None:
        """Takes a generated token and stops if a rule says so, in DeepInfer's order (DB §1.7).

        The length may thus reach `max_model_len` + 1: the last token is emitted, never computed on.
        """
        self.output_token_ids.append(token_id)
        if token_id == self.eos_id and not self.ignore_eos:
            self.status = SequenceStatus.FINISHED_STOPPED
        elif len(self) > self.max_model_len or self.output_len == self.max_tokens:
            self.status = SequenceStatus.FINISHED_LENGTH_CAPPED
