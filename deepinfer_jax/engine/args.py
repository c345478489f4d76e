"""What an engine is built from (DB §1.2), and the sizes that follow (DB §1.3)."""

import dataclasses
import difflib
import logging
import math
import os
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal

from deepinfer_jax.config.model_config import PRECISIONS, Precision
from deepinfer_jax.engine.validation import boolean, integer, number

logger = logging.getLogger(__name__)

KVCacheFormat = Literal["packed", "unpacked"]
OnImageMismatch = Literal["raise", "warn"]

_DEFAULT_TOKENS_PER_BLOCK = 128
# Chunks longer than this gain little: the experts' tiles are full by then.
_CHUNKED_BATCHED_TOKENS = 2048
# About 1400 snapshots of the released model.
_SNAPSHOT_MEMORY_BYTES = 4 << 30
# About 26,000 rows of the released model: 140 images of 224 x 224 pixels, 27 of the largest.
_IMAGE_CACHE_BYTES = 256 << 20
# DeepInfer's floor for prompts that run in one piece (DB §1.3).
_WHOLE_BATCHED_TOKENS = 4096

# Fields of DeepInfer that nothing reads there (DB §15.2 trap 50).
_DEAD_FIELDS = {
    "ignore_len": "nothing ever read it; prompts are limited by max_model_len",
    "lookahead_tokens": "a chunk has at least one token; the length of drafts is DEEPINFER_USE_NEXTN_DECODE",
}


class EngineType(IntEnum):
    """What an engine does of a request (DB §1.8; as DeepInfer is shipped, only NORMAL works there).

    NORMAL: all of it. PROMPT: prompt and first token; then it holds the request for `export_sequence`. COMPLETION: the
    rest of a request that `import_sequence` brings. One that it preempts it computes again, prompt included, which
    DeepInfer's cannot.
    """

    NORMAL = 0
    PROMPT = 1
    COMPLETION = 2


@dataclass(frozen=True)
class EngineLimits:
    """The sizes of an engine (DB §1.3).

    Attributes:
        max_model_len: most tokens of prompt and output together; also the longest prompt.
        runtime_max_model_len: every position that a step computes is below this: max_model_len, the drafts of one
            step, and what the step in flight may add. DeepInfer sizes its rotary tables and block tables by it; here
            it is a bound to check against, since rotary angles are computed and no step is launched for a sequence
            that is known to be full.
        prompt_limit: longest prompt: max_model_len, or without chunked prefill what one step takes.
        max_num_seqs: most sequences that run at once, over all dp ranks.
        max_num_batched_tokens: most tokens of one engine iteration on each dp rank.
        data_parallel_size: dp ranks; each has its own blocks and slots.
        tokens_per_block: tokens of one block of the paged cache.
        num_drafts: tokens drafted per step.
        chunked_prefill: whether a prompt may run in pieces.
        zero_overhead_scheduling: whether the next step is launched before the results of the last are read.
        keep_tokens: how many last tokens of a prompt the consumer layers run on (bounded replay, DB §9); None: all.
    """

    max_model_len: int
    runtime_max_model_len: int
    prompt_limit: int
    max_num_seqs: int
    max_num_batched_tokens: int
    data_parallel_size: int = 1
    tokens_per_block: int = _DEFAULT_TOKENS_PER_BLOCK
    num_drafts: int = 0
    chunked_prefill: bool = True
    zero_overhead_scheduling: bool = True
    keep_tokens: int | None = None

    @property
    def seqs_per_index(self) -> int:
        """Slots of each dp rank. Rounded up: max_num_seqs itself bounds how many run."""
        return math.ceil(self.max_num_seqs / self.data_parallel_size)

    @property
    def blocks_per_sequence(self) -> int:
        """Blocks of a sequence of max_model_len tokens: the width of a block table."""
        return math.ceil(self.max_model_len / self.tokens_per_block)


@dataclass(kw_only=True)
class EngineArgs:
    """Arguments of `LLMEngine`: DeepInfer's (DB §1.2), and seven of ours at the end.

    Two fields of DeepInfer are gone because nothing reads them there: `ignore_len` and `lookahead_tokens`.

    Attributes:
        model: local folder with config.json, tokenizer files and safetensors; nothing is downloaded.
        served_model_name: the label of the engine's metrics.
        tokenizer: folder with the tokenizer files; None: the model's.
        trust_remote_code: allows tokenizer code named by `auto_map`.
        load_format: "auto" reads safetensors, "dummy" draws random weights; in any case.
        seed: of the "dummy" weights. Sampling does not use it: see `SamplingParams.seq_seed`.
        max_model_len: most tokens of prompt and output; None: the smaller of the model's own and what memory holds
            (DeepInfer: 4096).
        data_parallel_size: copies of the attention part, each with its own sequences; 0 means 1. Routed experts lie
            over `expert_parallel_size` devices of each copy, so the engine needs data × expert devices (DeepInfer
            spreads the experts over the data ranks themselves, and 0 means as many ranks as expert ranks).
        context_parallel_size: 1 in this version.
        expert_parallel_size: devices that share the routed experts.
        engram_parallel_size: 0, or the number of all devices: n-gram tables lie over all of them.
        engine_rank, engine_group_rank: 0: one process drives all devices.
        gpu_memory_utilization: part of the device memory that weights, caches and temporaries may take, in (0, 1].
        max_num_batched_tokens: most tokens of one iteration on each dp rank, at least max_num_seqs × (1 + drafts);
            None: with chunked prefill the larger of 2048 and that, else the largest of max_model_len, 4096 and that.
            Of prompts that may be cut, a step takes no more than `memory.prefill_tokens` in any case.
        max_num_seqs: most sequences that run at once, over all dp ranks; each index has room for its share,
            rounded up.
        disable_log_stats: no statistics in the log; `LLMEngine.stats()` has them all the same.
        revision, tokenizer_revision: forwarded to the tokenizer only, as in DeepInfer.
        stop_preempted_request: a request that is preempted for lack of blocks ends ("insufficient_system_resource")
            instead of being computed again.
        engine_type: see `EngineType`.
        chunked_prefill: prompts may run in chunks (DeepInfer: off by default). Off: a prompt runs in one piece, so
            max_num_batched_tokens must be at least max_model_len.
        tokens_per_block: tokens of a block of the cache, a multiple of 2 (compressed entries stand for up to 2
            tokens); -1 means 128. Small blocks waste less of the last one, large ones keep tables short.
        offline_inference: a label, as in DeepInfer.
        precision: ours; "reference" (the released arithmetic), "bf16", "float32" or "float32_exact".
        num_kv_blocks: ours; blocks of each dp rank; None: as many as memory holds and the sequences can use.
        kv_cache_format: ours; "packed" stores the cache in the released formats, "unpacked" as plain numbers; the
            results are the same to the bit. "float32_exact" quantises nothing and is always unpacked.
        enable_prefix_caching: ours; what the cache holds of earlier requests is reused by those that begin alike. The
            tokens are those of a cold run, in "float32_exact" or with DEEPINFER_BATCH_INVARIANT=1 exactly; else a
            prompt that starts in the middle is summed in another order, as one is that runs in other chunks.
        snapshot_memory_bytes: ours; host memory for the windows, open groups and n-gram tails at block boundaries,
            without which the blocks before one cannot be reused; the least recently used go first.
        image_cache_bytes: ours; device memory for what the vision tower made of images, which serves their later chunks
            and other requests with the same image; the least recently used go first. There is always as much as one
            prefill step may need, and none without a vision tower.
        on_image_mismatch: ours; "raise" refuses a prompt whose placeholders are not as many as its images, or whose
            declared sizes are not the real ones; "warn" does what DeepInfer does, and logs it (MultimodalProcessor).

    Raises ValueError or TypeError with the field's name for a value that cannot be.
    """

    model: str
    served_model_name: str = "deepinfer-model"
    tokenizer: str | None = None
    trust_remote_code: bool = False
    load_format: str = "auto"
    seed: int = 0
    max_model_len: int | None = None
    data_parallel_size: int = 0
    context_parallel_size: int = 1
    expert_parallel_size: int = 1
    engram_parallel_size: int = 0
    engine_rank: int = 0
    engine_group_rank: int = 0
    gpu_memory_utilization: float = 0.90
    max_num_batched_tokens: int | None = None
    max_num_seqs: int = 256
    disable_log_stats: bool = False
    revision: str | None = None
    tokenizer_revision: str | None = None
    stop_preempted_request: bool = True
    engine_type: EngineType = EngineType.NORMAL
    chunked_prefill: bool = True
    tokens_per_block: int = -1
    offline_inference: bool = False
    precision: Precision = "reference"
    num_kv_blocks: int | None = None
    kv_cache_format: KVCacheFormat = "packed"
    enable_prefix_caching: bool = True
    snapshot_memory_bytes: int = _SNAPSHOT_MEMORY_BYTES
    image_cache_bytes: int = _IMAGE_CACHE_BYTES
    on_image_mismatch: OnImageMismatch = "raise"

    def __post_init__(self) -> None:
        self._check_names_and_flags()
        self.load_format = str(self.load_format).lower()
        if self.load_format not in ("auto", "dummy"):
            raise ValueError(f'load_format must be "auto" or "dummy", got {self.load_format!r}')
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {self.precision!r}")
        if self.kv_cache_format not in ("packed", "unpacked"):
            raise ValueError(f'kv_cache_format must be "packed" or "unpacked", got {self.kv_cache_format!r}')
        if self.on_image_mismatch not in ("raise", "warn"):
            raise ValueError(f'on_image_mismatch must be "raise" or "warn", got {self.on_image_mismatch!r}')
        self._check_sizes()
        self._check_parallelism()
        if not 0 < number("gpu_memory_utilization", self.gpu_memory_utilization) <= 1:
            raise ValueError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}")
        try:
            self.engine_type = EngineType(self.engine_type)
        except ValueError:
            raise ValueError(f"engine_type must be one of {list(EngineType)}, got {self.engine_type!r}") from None

    def _check_names_and_flags(self) -> None:
        for name in ("model", "tokenizer"):
            path = getattr(self, name)
            if isinstance(path, os.PathLike):
                path = os.fspath(path)
                setattr(self, name, path)
            if not isinstance(path, str) and (name, path) != ("tokenizer", None):
                raise TypeError(f"{name} must be the path of a folder, got {path!r} of type {type(path).__name__}")
        if not isinstance(self.served_model_name, str):  # a label of the metrics
            raise TypeError(f"served_model_name must be a string, got {self.served_model_name!r}")
        for name in (
            *("trust_remote_code", "disable_log_stats", "stop_preempted_request"),
            *("chunked_prefill", "offline_inference", "enable_prefix_caching"),
        ):
            setattr(self, name, boolean(name, getattr(self, name)))

    def _check_sizes(self) -> None:
        for name in ("max_model_len", "max_num_batched_tokens", "num_kv_blocks"):
            if getattr(self, name) is not None:
                self._check_integer(name, at_least=1)
        self.seed = integer("seed", self.seed)
        self._check_integer("max_num_seqs", at_least=1)
        if integer("tokens_per_block", self.tokens_per_block) == -1:
            self.tokens_per_block = _DEFAULT_TOKENS_PER_BLOCK
        self._check_integer("tokens_per_block", at_least=2)
        self._check_integer("snapshot_memory_bytes", at_least=0)
        self._check_integer("image_cache_bytes", at_least=0)
        if self.tokens_per_block % 2:
            raise ValueError(
                f"tokens_per_block must be a multiple of 2, got {self.tokens_per_block}: a compressed entry stands "
                "for up to 2 tokens and lies in one block"
            )

    def _check_parallelism(self) -> None:
        self._check_integer("data_parallel_size", at_least=0)
        self._check_integer("expert_parallel_size", at_least=1)
        self.data_parallel_size = self.data_parallel_size or 1
        if self.load_format == "dummy" and self.num_devices > 1:
            raise ValueError(
                f'load_format "dummy" draws its weights on one device, and the engine needs {self.num_devices}; use a '
                "checkpoint (`deepinfer-jax make-tiny` writes a random one)"
            )
        for name in ("context_parallel_size", "engram_parallel_size", "engine_rank", "engine_group_rank"):
            self._check_integer(name, at_least=0)
        if self.context_parallel_size != 1:
            raise ValueError(
                f"context_parallel_size is {self.context_parallel_size}, but this version runs a prompt on one data "
                "index; leave it 1 and use data_parallel_size and expert_parallel_size"
            )
        if self.engram_parallel_size not in (0, self.num_devices):
            raise ValueError(
                f"engram_parallel_size is {self.engram_parallel_size}, but n-gram tables lie over all devices: leave "
                f"it 0, or give data_parallel_size × expert_parallel_size = {self.num_devices}"
            )
        for name in ("engine_rank", "engine_group_rank"):
            if getattr(self, name) != 0:
                raise ValueError(
                    f"{name} is {getattr(self, name)}, but one process drives all devices in this version; leave it 0"
                )

    def _check_integer(self, name: str, *, at_least: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or (whole := integer(name, value)) < at_least:
            raise ValueError(f"{name} must be an integer of at least {at_least}, got {value!r}")
        setattr(self, name, whole)

    @classmethod
    def from_kwargs(cls, kwargs: dict[str, Any]) -> "EngineArgs":
        """EngineArgs(**kwargs); an unknown name is a TypeError that names the nearest known ones."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in kwargs:
            if name in _DEAD_FIELDS:
                raise TypeError(f"{name} is no engine argument here: {_DEAD_FIELDS[name]}; leave it out")
            if name not in known:
                near = difflib.get_close_matches(name, known)
                hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}"
                raise TypeError(f"unknown engine argument {name!r}; {hint}")
        return cls(**kwargs)

    @property
    def num_devices(self) -> int:
        """Devices that the engine runs on."""
        return self.data_parallel_size * self.expert_parallel_size

    def limits(
        self,
        max_position_embeddings: int,
        *,
        max_len_in_memory: int | None = None,
        num_drafts: int = 0,
        zero_overhead_scheduling: bool = True,
        keep_tokens: int | None = None,
    ) -> EngineLimits:
        """The engine's sizes for a model trained up to `max_position_embeddings` positions.

        Arguments:
            max_len_in_memory: longest sequence that the memory left for the cache holds; None: not known to be short.
            num_drafts: tokens drafted per step.
            zero_overhead_scheduling: whether steps overlap.
            keep_tokens: of bounded replay.

        Raises ValueError if the token budget is too small, with the arithmetic.
        """
        max_model_len = self.max_model_len or min(max_position_embeddings, max_len_in_memory or max_position_embeddings)
        if max_model_len > max_position_embeddings:
            logger.warning(
                "max_model_len %d exceeds the model's max_position_embeddings %d",
                max_model_len,
                max_position_embeddings,
            )
        budget = self._budget(max_model_len, num_drafts)
        in_flight = num_drafts + 1 if zero_overhead_scheduling else 0
        return EngineLimits(
            max_model_len=max_model_len,
            runtime_max_model_len=max_model_len + 2 * num_drafts + in_flight,
            prompt_limit=max_model_len if self.chunked_prefill else min(max_model_len, budget),
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=budget,
            data_parallel_size=self.data_parallel_size,
            tokens_per_block=self.tokens_per_block,
            num_drafts=num_drafts,
            chunked_prefill=self.chunked_prefill,
            zero_overhead_scheduling=zero_overhead_scheduling,
            keep_tokens=keep_tokens,
        )

    def _budget(self, max_model_len: int, num_drafts: int) -> int:
        decoding = self.max_num_seqs * (1 + num_drafts)
        if self.max_num_batched_tokens is None:
            if self.chunked_prefill:
                return max(_CHUNKED_BATCHED_TOKENS, decoding)
            return max(max_model_len, _WHOLE_BATCHED_TOKENS, decoding)
        if self.max_num_batched_tokens < decoding:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs × (1 + drafts) = {self.max_num_seqs} × {1 + num_drafts} = {decoding}: "
                "each running sequence needs that many per step"
            )
        if not self.chunked_prefill and self.max_num_batched_tokens < max_model_len:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_model_len "
                f"({max_model_len}) when chunked_prefill is off: a prompt runs in one piece"
            )
        return self.max_num_batched_tokens
