"""One request as the scheduler sees it (`Sequence`): tokens, progress, blocks and slot, and when it stops."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt


class SequenceStatus(IntEnum):
    """States of a sequence (DB §1.7, in DeepInfer's order; finished means >= FINISHED_STOPPED).

    WAITING lasts until the last chunk of the prompt is launched, as in DeepInfer; a waiting sequence may thus hold
    blocks. SWAPPED is never used, as in DeepInfer. FINISHED_FAILED is ours: DeepInfer ends the process when the
    logits of one row are not finite (DB §15.2 trap 35). So is FINISHED_INVALID: a prompt that turned out to be none,
    as it and its images do not belong together.
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
    FINISHED_INVALID = 11

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
    SequenceStatus.FINISHED_INVALID: "invalid_prompt",
}


@dataclass(frozen=True)
class ImageContent:
    """An image of a prompt: its tokens' ids say where it is, not what it shows.

    Attributes:
        start, stop: its tokens are the positions start … stop - 1.
        digest: names its content; equal digests mean equal pixels.
    """

    start: int
    stop: int
    digest: bytes


@dataclass(frozen=True, eq=False)
class Imported:
    """The device state of a sequence that another engine has begun.

    Attributes:
        num_tokens: tokens whose state it is: all of prompt and output but the last.
        state: uint8 [slot_bytes], its slot; opaque here.
        blocks: uint8 [ceil(num_tokens / tokens_per_block), block_bytes], its blocks in order of position; opaque here.
    """

    num_tokens: int
    state: Any
    blocks: Any


@dataclass(eq=False, slots=True)
class Sequence[R]:
    """The tokens of one request and its progress (DB §5.1).

    R: whatever its owner keeps of the request besides; the scheduler never looks at it.

    Attributes:
        seq_id: unique over the engine's life.
        request_id: the caller's name of the request.
        prompt_token_ids: int32 [prompt_len], prompt_len >= 1.
        max_tokens: output tokens after which it stops, at least 1.
        eos_id: the id that stops it, unless `ignore_eos`.
        stop_token_ids: further ids that stop it.
        stop_text: of its output, the text that stops it and that the last token completed; None if it did not. Asked
            after every token. None: no text stops it.
        stop_reason: of a stopped one, the id or the text; None of EOS.
        max_model_len: it stops once prompt and output together exceed this many tokens.
        user_id: the caller's label; no rule depends on it.
        arrival_time: seconds of time.perf_counter at submission, for statistics; no rule depends on it.
        status: see SequenceStatus.
        output_token_ids: what has been generated and read back.
        num_tokens: tokens whose state is, or by the launched steps will be, in the cache. While decode steps are in
            flight an upper bound (all drafts accepted); else, once the prompt is computed, all tokens but the last.
        num_inflight_steps: steps in flight each of which gives it at least one token.
        block_table: ids of the blocks that hold its tokens, in order of position.
        state_id: its slot within its dp rank, -1 while it holds none.
        dp_rank: where its blocks and its slot are, -1 while it holds none.
        schedulable: False keeps it out of every plan; it keeps what it holds and delays nobody.
        waits_for_results: it decodes only when all its results are committed, as what its next step must do depends on
            them; it sits out the overlapped step, and keeps what it holds.
        num_preemptions: how often it was preempted, and must be or was computed again.
        arrival: its number in the order in which the scheduler got the sequences.
        output_limit: output tokens after which it stops at the latest, by max_tokens or max_model_len.
        request: its owner's record of the request.
        images: in order of position; part of the key of every block that holds one of their tokens.
        reuse: whether its start may be read from what others, or it itself before a preemption, left in the cache.
        most_cached_tokens: at most so many of its tokens may be; None: no limit but its length.
        num_cached_tokens: so many were, when it first started.
        branch: tokens whose blocks were cached when it started; a chunk of it ends there.
        rates: of the newest drafts whose step is committed, the chances that each and all before it are accepted; None:
            there are none, or nobody asks (see draft_policy.py).
        imported: the state with which it starts, instead of computing its prompt; None once it has started.
        block_keys: the names of its first blocks, as far as anybody asked (see prefix.py).
        num_published: so many blocks of its table have been named, by it or by others.
        published: (dp rank, block, key) of each block that it has named.
    """

    seq_id: int
    request_id: str
    prompt_token_ids: npt.NDArray[np.int32]
    max_tokens: int
    eos_id: int
    max_model_len: int
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    stop_text: Callable[[list[int]], str | None] | None = None
    stop_reason: int | str | None = None
    user_id: str = ""
    arrival_time: float = 0.0
    status: SequenceStatus = SequenceStatus.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    num_tokens: int = 0
    num_inflight_steps: int = 0
    block_table: list[int] = field(default_factory=list)
    state_id: int = -1
    dp_rank: int = -1
    schedulable: bool = True
    waits_for_results: bool = False
    num_preemptions: int = 0
    arrival: int = -1
    output_limit: int = field(init=False)
    request: R = None  # type: ignore[assignment]  # an owner without such a record has a Sequence[None]
    images: tuple[ImageContent, ...] = ()
    reuse: bool = True
    most_cached_tokens: int | None = None
    num_cached_tokens: int = 0
    branch: int = 0
    rates: list[float] | None = None
    imported: Imported | None = None
    block_keys: list[bytes] = field(default_factory=list)
    num_published: int = 0
    published: list[tuple[int, int, bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._limit_output()

    def replace_prompt(self, token_ids: npt.NDArray[np.int32], images: tuple[ImageContent, ...]) -> None:
        """Puts another prompt in place, with images; only while it waits and is not schedulable."""
        self.prompt_token_ids, self.images = token_ids, images
        self._limit_output()

    def _limit_output(self) -> None:
        # It stops when its length exceeds max_model_len: the last token is given out, never computed on.
        self.output_limit = min(self.max_tokens, self.max_model_len + 1 - self.prompt_len)

    def __len__(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def output_len(self) -> int:
        return len(self.output_token_ids)

    @property
    def prefill_len(self) -> int:
        """Tokens that prefill steps compute: the prompt, and after a preemption the output without its last token.

        That one is the first decode step's, as if nothing had happened: how a token is drawn may depend on where the
        step began that gave it (its drafts do), so a sequence goes on exactly where a step had ended.
        """
        return len(self.prompt_token_ids) + max(len(self.output_token_ids) - 1, 0)

    @property
    def last_token_id(self) -> int:
        """The last token of prompt and output."""
        return self.output_token_ids[-1] if self.output_token_ids else int(self.prompt_token_ids[-1])

    @property
    def finish_reason(self) -> str:
        """DeepInfer's reason string, "" while unfinished."""
        return FINISH_REASONS.get(self.status, "")

    @property
    def total_inflight_tokens(self) -> int:
        """The most tokens that the steps in flight may add."""
        return max(0, self.num_tokens + 1 - len(self))

    @property
    def max_cached_tokens(self) -> int:
        """The most tokens of it that the cache will ever have to hold: all but the last possible one."""
        return self.prompt_len + self.output_limit - 1

    def token_ids(self, start: int, count: int) -> npt.NDArray[np.int32]:
        """int32 [count], prompt and output from position `start` on."""
        stop = start + count
        prompt = self.prompt_token_ids[start:stop]
        output = self.output_token_ids[max(start - self.prompt_len, 0) : max(stop - self.prompt_len, 0)]
        return np.concatenate([prompt, np.asarray(output, np.int32)])

    def append_tokens(self, token_ids: list[int]) -> int:
        """Takes generated tokens up to the first after which a rule stops it (DB §1.7); returns how many.

        After each token: does it stop the sequence, is the length above max_model_len, is the output max_tokens long.
        The length may thus reach max_model_len + 1.
        """
        output = self.output_token_ids
        room = self.output_limit - len(output)
        may_stop = self.stop_text is not None or (self.eos_id in token_ids and not self.ignore_eos)
        if len(token_ids) < room and not may_stop and self.stop_token_ids.isdisjoint(token_ids):
            output += token_ids
            return len(token_ids)
        for count, token in enumerate(token_ids[:room], start=1):
            output.append(token)
            if self._stops_with(token):
                self.status = SequenceStatus.FINISHED_STOPPED
                return count
        if len(token_ids) < room:
            return len(token_ids)
        self.status = SequenceStatus.FINISHED_LENGTH_CAPPED
        return room

    def _stops_with(self, token: int) -> bool:
        """Whether this last token of the output stops it; `stop_reason` then says why."""
        if token == self.eos_id and not self.ignore_eos:
            return True
        if token in self.stop_token_ids:
            self.stop_reason = token
        elif self.stop_text is not None:
            self.stop_reason = self.stop_text(self.output_token_ids)
        return self.stop_reason is not None
