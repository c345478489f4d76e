"""How one request samples and when it stops (DB §1.5)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepinfer_jax.engine.validation import boolean, integer, number
from deepinfer_jax.sampling import GREEDY_TEMPERATURE, MAX_EDITS
from deepinfer_jax.sampling.fields import SamplerScalars, sampler_scalars
from deepinfer_jax.structured import StructuredArgs, so_args_of, structured_args

_MAX_INT32 = 2**31 - 1
_MAX_TOP_LOGPROBS = 1000
_MAX_BIASES, _MAX_BIAS = 300, 100
_LOGPROBS_MODES = ("processed_logprobs", "raw_logprobs")


@dataclass(kw_only=True)
class SamplingParams(SamplerScalars):
    """Parameters of one request: `SamplerScalars` (temperature, filters, penalties), and those below. Names, defaults
    and limits of temperature, top_p, top_k and all down to `seq_seed` are DeepInfer's (DB §1.5), the others have the
    names and meanings that vLLM and OpenAI's interface gave them.

    Attributes:
        ignore_eos: the end-of-sequence token does not stop the request.
        max_tokens: most output tokens; 0 means 1. The default is 16.
        logprobs: accepted and ignored: every token has its log-probability.
        prompt_logprobs: also those of the prompt's tokens, on the first output.
        top_logprobs: 0..1000, how many (logprob, id) pairs each output lists; the token itself comes behind them if it
            is not among them.
        first_n_token_no_eos: only 1 acts: the first output token is not EOS.
        eos_id: set by the engine from the tokenizer.
        so_args: structured output (DB §8.1): a dict of schema_type ("json", "regex" or "ebnf"), schema (a string) and,
            if the text is free until these ids came in a row, trigger_token_ids; after the id bound_token_id they must
            come at once. A JSON Schema allows no properties but those it lists, unless it says so.
        golden_token_ids: output i is forced to entry i; -1 leaves it free.
        seq_seed: the 64-bit key of the request's random numbers; None draws one per request (DeepInfer draws it
            here, so that prompts that share an object share their seed).
        logit_bias: id -> -100..100, added to its logit; ids may be strings of digits; at most 300.
        stop: texts, each of which stops the request once the output holds it; one string or several.
        stop_token_ids: ids, each of which stops the request as EOS does, also with `ignore_eos`.
        min_tokens: so many output tokens come before one that stops it: EOS (unless ignored) and stop_token_ids are not
            sampled sooner. Stop texts are not looked for in them.
        n: completions of each prompt, of independent seeds; of `LLM.generate` only.
        logprobs_mode: "processed_logprobs": of the distribution sampled from, as DeepInfer; "raw_logprobs": of the
            model's, whatever temperature, filters, biases, penalties and masks do to it.
        response_format: the same in OpenAI's words: a dict of type "text", "json_object", or "json_schema" with
            json_schema = {"schema": …, "strict": …}; or so_args, not both.

    Raises ValueError or TypeError with the field's name for anything else.
    """

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
    logit_bias: dict[int, float] | None = None
    stop: list[str] | str | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int = 0
    n: int = 1
    logprobs_mode: str = "processed_logprobs"
    response_format: Any = None

    def __post_init__(self) -> None:
        self._check_sampling()
        self._check_length_and_reports()
        self.first_n_token_no_eos = integer("first_n_token_no_eos", self.first_n_token_no_eos)
        if self.so_args is not None and self.response_format is not None:
            raise ValueError("so_args and response_format both say what the output must be; give one of them")
        self.structured()
        if self.golden_token_ids is not None:
            self.golden_token_ids = _ids("golden_token_ids", self.golden_token_ids, least=-1)
        self.logit_bias = _biases({} if self.logit_bias is None else self.logit_bias) or None
        self.stop = _stop_texts(self.stop) or None
        if self.stop_token_ids is not None:
            self.stop_token_ids = _ids("stop_token_ids", self.stop_token_ids, least=0) or None
        if (count := len(self.edits(0))) > MAX_EDITS:
            raise ValueError(
                f"min_tokens bans EOS and each of stop_token_ids, and with logit_bias that makes {count} changes of "
                f"logits; at most {MAX_EDITS} fit"
            )

        if self.temperature < GREEDY_TEMPERATURE:
            self.temperature = GREEDY_TEMPERATURE
            for name, scalar in sampler_scalars().items():
                if scalar.kind == "filter":
                    setattr(self, name, getattr(SamplerScalars, name))

    def _check_sampling(self) -> None:
        for name, scalar in sampler_scalars().items():
            plain = {float: number, int: integer, bool: boolean}[type(getattr(SamplerScalars, name))]
            value = plain(name, getattr(self, name))
            if not scalar.holds(value):
                raise ValueError(f"{name} must be {scalar.must_be}, got {value}")
            setattr(self, name, value)
        if self.seq_seed is not None:
            self.seq_seed = integer("seq_seed", self.seq_seed) & (2**64 - 1)

    def _check_length_and_reports(self) -> None:
        self.ignore_eos = boolean("ignore_eos", self.ignore_eos)
        self.max_tokens = integer("max_tokens", self.max_tokens) or 1
        if not 1 <= self.max_tokens <= _MAX_INT32:
            raise ValueError(f"max_tokens must be in 0..{_MAX_INT32} (0 means 1), got {self.max_tokens}")
        self.min_tokens = integer("min_tokens", self.min_tokens)
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(f"min_tokens must be in 0..max_tokens ({self.max_tokens}), got {self.min_tokens}")
        self.n = integer("n", self.n)
        if not 1 <= self.n <= _MAX_INT32:
            raise ValueError(f"n must be at least 1, got {self.n}")
        self.prompt_logprobs = boolean("prompt_logprobs", self.prompt_logprobs)
        self.top_logprobs = integer("top_logprobs", self.top_logprobs)
        if not 0 <= self.top_logprobs <= _MAX_TOP_LOGPROBS:
            raise ValueError(f"top_logprobs must be in 0..{_MAX_TOP_LOGPROBS}, got {self.top_logprobs}")
        if not isinstance(self.logprobs_mode, str) or self.logprobs_mode not in _LOGPROBS_MODES:
            raise ValueError(f"logprobs_mode must be {' or '.join(_LOGPROBS_MODES)}, got {self.logprobs_mode!r}")

    @property
    def greedy(self) -> bool:
        """Whether the token is the exact argmax. Read off the fields, so that `dataclasses.replace` keeps it."""
        filters = [name for name, scalar in sampler_scalars().items() if scalar.kind == "filter"]
        is_off = all(getattr(self, name) == getattr(SamplerScalars, name) for name in filters)
        return self.temperature == GREEDY_TEMPERATURE and is_off

    @property
    def penalised(self) -> bool:
        """Whether what prompt and output hold changes the logits."""
        penalties = [name for name, scalar in sampler_scalars().items() if scalar.kind == "penalty"]
        return any(getattr(self, name) != getattr(SamplerScalars, name) for name in penalties)

    @property
    def edited(self) -> bool:
        """Whether it has `edits`."""
        return bool(self.edits(0))

    @property
    def raw_logprobs(self) -> bool:
        """Whether the log-probabilities are the model's."""
        return self.logprobs_mode == "raw_logprobs"

    @property
    def stop_ids(self) -> frozenset[int]:
        """The ids that stop it."""
        return frozenset(self.stop_token_ids or ()) | (frozenset() if self.ignore_eos else {self.eos_id})

    def edits(self, prompt_len: int) -> list[tuple[int, float, int]]:
        """What is added to logits: id, value, and below which position, for a prompt of this length."""
        edits = [(token, bias, _MAX_INT32) for token, bias in (self.logit_bias or {}).items()]
        if self.min_tokens:
            edits += [(token, -np.inf, prompt_len + self.min_tokens) for token in sorted(self.stop_ids)]
        if self.first_n_token_no_eos == 1:
            edits.append((self.eos_id, -np.inf, prompt_len + 1))
        return edits

    def structured(self) -> StructuredArgs | None:
        """What so_args or response_format ask for, None if they ask for nothing. Raises what `structured_args` does."""
        so_args = so_args_of(self.response_format) if self.so_args is None else self.so_args
        return None if so_args is None else structured_args(so_args)

    def forced_token(self, output_index: int) -> int:
        """The id that output `output_index` is forced to, -1 if it is free."""
        golden = self.golden_token_ids or []
        return golden[output_index] if output_index < len(golden) else -1


def _ids(name: str, tokens: Any, *, least: int) -> list[int]:
    try:
        ids = [integer(name, token) for token in tokens]
    except TypeError as error:
        raise TypeError(f"{name} must be a list of integers: {error}") from None
    free = ", or -1 to leave that output free" if least < 0 else ""
    for index, token in enumerate(ids):
        if not least <= token <= _MAX_INT32:
            raise ValueError(f"{name}[{index}] is {token}; give a token id{free}")
    return ids


def _biases(biases: Any) -> dict[int, float]:
    if not isinstance(biases, Mapping):
        raise TypeError(f"logit_bias must be a dict from token id to number, got {biases!r}")
    if len(biases) > _MAX_BIASES:
        raise ValueError(f"logit_bias has {len(biases)} entries, at most {_MAX_BIASES} are possible")
    checked: dict[int, float] = {}
    for key, value in biases.items():
        is_digits = isinstance(key, str) and key.isascii() and key.isdigit()
        token = int(key) if is_digits else integer("a key of logit_bias", key)
        if not 0 <= token <= _MAX_INT32:
            raise ValueError(f"logit_bias: {token} is no token id")
        if token in checked:
            raise ValueError(f"logit_bias names id {token} twice")
        bias = number(f"logit_bias[{token}]", value)
        if not -_MAX_BIAS <= bias <= _MAX_BIAS:
            raise ValueError(f"logit_bias[{token}] must be in -{_MAX_BIAS}..{_MAX_BIAS}, got {bias}")
        checked[token] = bias
    return checked


def _stop_texts(stop: Any) -> list[str]:
    if stop is None:
        return []
    if not isinstance(stop, Iterable):
        raise TypeError(f"stop must be a string or a list of strings, got {stop!r}")
    texts = [stop] if isinstance(stop, str) else list(stop)
    if not all(isinstance(text, str) for text in texts):
        raise TypeError(f"stop must be a string or a list of strings, got {stop!r}")
    for text in texts:
        if not text or "\N{REPLACEMENT CHARACTER}" in text:
            raise ValueError(
                f"stop: {text!r} cannot be found in a text; give it at least one character, none of them "
                "U+FFFD, which stands for what is no text"
            )
    return texts
