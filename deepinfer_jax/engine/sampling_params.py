"""How one request samples and when it stops (DB §1.5)."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from deepinfer_jax.engine.values import boolean, integer, number
from deepinfer_jax.sampling import GREEDY_TEMPERATURE

_MAX_INT32 = 2**31 - 1
_MAX_FLOAT32 = float(np.finfo(np.float32).max)
_MAX_TOP_LOGPROBS = 1000


@dataclass(kw_only=True)
class SamplingParams:
    """Parameters of one request; names, defaults and limits are DeepInfer's (DB §1.5).

    Attributes:
        temperature: >= 0. Below 1e-5 it is greedy: top_p and top_k are switched off, and the token is the exact
            argmax, the lowest id on ties (DeepInfer samples at 1e-5 instead).
        top_p: in (0, 1]; nucleus on the full softmax.
        top_k: -1 (off) or >= 1; on the full softmax too.
        ignore_eos: the end-of-sequence token does not stop the request.
        max_tokens: most output tokens; 0 means 1. The default is 16.
        logprobs: accepted and ignored: every token has its log-probability.
        prompt_logprobs: also those of the prompt's tokens, on the first output.
        top_logprobs: 0..1000, how many (logprob, id) pairs each output lists.
        first_n_token_no_eos: only 1 acts: the first output token is not EOS.
        eos_id: set by the engine from the tokenizer.
        so_args: structured output; not in this version, must be None.
        golden_token_ids: output i is forced to entry i; -1 leaves it free.
        seq_seed: the 64-bit key of the request's random numbers; None draws one per request (DeepInfer draws it
            here, so that prompts that share an object share their seed).

    Raises ValueError or TypeError with the field's name for anything else.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    ignore_eos: bool = False
    max_tokens: int = 16
    logprobs: bool = False
    prompt_logprobs: bool = False
    top_logprobs: int = 0
    first_n_token_no_eos: int = 0
    eos_id: int = 0
    so_args: Any = None
    golden_token_ids: list[int] | None = None
    seq_seed: int | None = None

    def __post_init__(self) -> None:
        self.temperature = number("temperature", self.temperature)
        if not 0 <= self.temperature <= _MAX_FLOAT32:  # NaN fails too
            raise ValueError(f"temperature must be a finite number >= 0 of float32, got {self.temperature}")
        self.top_p = number("top_p", self.top_p)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        self.top_k = integer("top_k", self.top_k)
        if self.top_k != -1 and not 1 <= self.top_k <= _MAX_INT32:
            raise ValueError(f"top_k must be -1 (off) or in 1..{_MAX_INT32}, got {self.top_k}")
        self.ignore_eos = boolean("ignore_eos", self.ignore_eos)
        self.max_tokens = integer("max_tokens", self.max_tokens) or 1
        if not 1 <= self.max_tokens <= _MAX_INT32:
            raise ValueError(f"max_tokens must be in 0..{_MAX_INT32} (0 means 1), got {self.max_tokens}")
        self.prompt_logprobs = boolean("prompt_logprobs", self.prompt_logprobs)
        self.top_logprobs = integer("top_logprobs", self.top_logprobs)
        if not 0 <= self.top_logprobs <= _MAX_TOP_LOGPROBS:
            raise ValueError(f"top_logprobs must be in 0..{_MAX_TOP_LOGPROBS}, got {self.top_logprobs}")
        self.first_n_token_no_eos = integer("first_n_token_no_eos", self.first_n_token_no_eos)
        if self.so_args is not None:
            raise ValueError("so_args: structured output is not part of this version; leave it None")
        if self.golden_token_ids is not None:
            self.golden_token_ids = _forced_ids(self.golden_token_ids)
        if self.seq_seed is not None:
            self.seq_seed = integer("seq_seed", self.seq_seed) & (2**64 - 1)

        if self.temperature < GREEDY_TEMPERATURE:
            self.temperature, self.top_p, self.top_k = GREEDY_TEMPERATURE, 1.0, -1

    @property
    def greedy(self) -> bool:
        """Whether the token is the exact argmax. Read off the fields, so that `dataclasses.replace` keeps it."""
        return (self.temperature, self.top_p, self.top_k) == (GREEDY_TEMPERATURE, 1.0, -1)

    def forced_token(self, output_index: int) -> int:
        """The id that output `output_index` is forced to, -1 if it is free."""
        golden = self.golden_token_ids or []
        return golden[output_index] if output_index < len(golden) else -1


def _forced_ids(tokens: Any) -> list[int]:
    try:
        ids = [integer("golden_token_ids", token) for token in tokens]
    except TypeError as error:
        raise TypeError(f"golden_token_ids must be a list of integers: {error}") from None
    for index, token in enumerate(ids):
        if not -1 <= token <= _MAX_INT32:
            raise ValueError(f"golden_token_ids[{index}] is {token}; give a token id, or -1 to leave that output free")
    return ids
