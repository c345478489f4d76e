"""What an engine is built from (DB §1.2), and the sizes that follow (DB §1.3)."""

import dataclasses
import difflib
import logging
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from deepinfer_jax.config import PRECISIONS, Precision

logger = logging.getLogger(__name__)

# Longest context that is set aside without being asked for (DeepInfer's default for every model).
_DEFAULT_MAX_MODEL_LEN = 4096
# Most tokens of one prompt in one step. Longer chunks gain little: the experts' tiles are full by then.
_CHUNK_SIZE = 128
# Sizes of the cache: steps of few sequences do not pay for many.
_ROW_BUCKETS = (1, 4, 16, 64)


class EngineType(IntEnum):
    """DB §1.8. As in DeepInfer as shipped, only NORMAL works."""

    NORMAL = 0
    PROMPT = 1
    COMPLETION = 2


@dataclass(frozen=True)
class EngineLimits:
    """The sizes of an engine.

    Attributes:
        max_model_len: most tokens of prompt and output together; also the longest prompt.
        max_num_seqs: most sequences that run at once.
        max_num_batched_tokens: most tokens of one step, padding included.
        buckets: (rows, chunk) in ascending order: a step of at most `rows` sequences takes at most `chunk` tokens of
            each.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    buckets: tuple[tuple[int, int], ...]


@dataclass(kw_only=True)
class EngineArgs:
    """Arguments of `LLMEngine`: those of DeepInfer's that mean something in this version (DB §1.2).

    Attributes:
        model: local folder with config.json, tokenizer files and safetensors; nothing is downloaded.
        served_model_name: a label.
        tokenizer: folder with the tokenizer files; None: the model's.
        trust_remote_code: allows tokenizer code named by `auto_map`.
        load_format: "auto" reads safetensors, "dummy" draws random weights.
        seed: of the "dummy" weights. Sampling does not use it: see `SamplingParams.seq_seed`.
        max_model_len: most tokens of prompt and output; None: the smaller of the model's and 4096.
        expert_parallel_size: 1. The engine of this version runs on one device.
        gpu_memory_utilization: in (0, 1]; the dense cache of this version is sized by the other arguments.
        max_num_batched_tokens: most tokens of a step, padding included, at least `max_num_seqs`; None: the largest of
            max_model_len, 4096 and max_num_seqs.
        max_num_seqs: most sequences that run at once.
        disable_log_stats: no throughput line in the log.
        revision, tokenizer_revision: forwarded to the tokenizer only, as in DeepInfer.
        stop_preempted_request: no request is preempted in this version.
        engine_type: NORMAL.
        chunked_prefill: prompts are always prefilled in chunks.
        precision: ours; "reference" (the released arithmetic), "bf16", "float32" or "float32_exact".

    Raises ValueError with the field's name for a value that cannot be.
    """

    model: str
    served_model_name: str = "deepinfer-model"
    tokenizer: str | None = None
    trust_remote_code: bool = False
    load_format: str = "auto"
    seed: int = 0
    max_model_len: int | None = None
    expert_parallel_size: int = 1
    gpu_memory_utilization: float = 0.90
    max_num_batched_tokens: int | None = None
    max_num_seqs: int = 256
    disable_log_stats: bool = False
    revision: str | None = None
    tokenizer_revision: str | None = None
    stop_preempted_request: bool = True
    engine_type: EngineType = EngineType.NORMAL
    chunked_prefill: bool = False
    precision: Precision = "reference"

    def __post_init__(self) -> None:
        self.load_format = str(self.load_format).lower()
        if self.load_format not in ("auto", "dummy"):
            raise ValueError(f'load_format must be "auto" or "dummy", got {self.load_format!r}')
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {self.precision!r}")
        for name in ("max_model_len", "max_num_batched_tokens", "max_num_seqs"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}")
        if self.expert_parallel_size != 1:
            raise ValueError(
                f"expert_parallel_size is {self.expert_parallel_size}, but the engine of this version runs on one "
                "device; load_params(..., mesh=...) with forward() runs on several"
            )
        if self.engine_type != EngineType.NORMAL:
            raise ValueError(f"engine_type must be NORMAL in this version, got {EngineType(self.engine_type).name}")

    @classmethod
    def from_kwargs(cls, kwargs: dict[str, Any]) -> "EngineArgs":
        """EngineArgs(**kwargs); an unknown name is a TypeError that names the nearest known ones."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in kwargs:
            if name not in known:
                near = difflib.get_close_matches(name, known)
                hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}"
                raise TypeError(f"unknown engine argument {name!r}; {hint}")
        return cls(**kwargs)

    def limits(self, max_position_embeddings: int) -> EngineLimits:
        """The engine's sizes for a model trained up to `max_position_embeddings` positions."""
        max_model_len = self.max_model_len or min(max_position_embeddings, _DEFAULT_MAX_MODEL_LEN)
        if max_model_len > max_position_embeddings:
            logger.warning(
                "max_model_len %d exceeds the model's max_position_embeddings %d",
                max_model_len,
                max_position_embeddings,
            )
        budget = self.max_num_batched_tokens or max(max_model_len, _DEFAULT_MAX_MODEL_LEN, self.max_num_seqs)
        if budget < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({budget}) must be at least max_num_seqs ({self.max_num_seqs}): every "
                "running sequence needs one token per step"
            )
        rows = (*(rows for rows in _ROW_BUCKETS if rows < self.max_num_seqs), self.max_num_seqs)
        return EngineLimits(
            max_model_len=max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=budget,
            buckets=tuple((count, min(_CHUNK_SIZE, max_model_len, budget // count)) for count in rows),
        )
