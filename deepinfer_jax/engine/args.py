"""What is asked of an engine (DB §1.2); `engine/resolution.py` says what follows."""

import dataclasses
import difflib
import os
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal

from deepinfer_jax.config.model_config import PRECISIONS, Precision
from deepinfer_jax.engine.validation import boolean, integer, number

KVCacheFormat = Literal["packed", "unpacked"]
OnImageMismatch = Literal["raise", "warn"]

_DEFAULT_TOKENS_PER_BLOCK = 128
# About 1470 snapshots of the released model.
_SNAPSHOT_MEMORY_BYTES = 4 << 30
# About 26,000 rows of the released model: 140 images of 224 x 224 pixels, 27 of the largest.
_IMAGE_CACHE_BYTES = 256 << 20

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
            Of prompts that may be cut, a step takes no more than `memory.device.prefill_tokens` in any case.
        max_num_seqs: most sequences that run at once, over all dp ranks; each has room for its share,
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
                f"context_parallel_size is {self.context_parallel_size}, but this version runs a prompt on one "
                "data-parallel rank; leave it 1 and use data_parallel_size and expert_parallel_size"
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
