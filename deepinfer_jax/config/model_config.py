"""A checkpoint's `config.json` as frozen, hashable dataclasses (model.md §1, DB §13.4).

Every literal of model.md is read from here; every schedule rule of model.md §1.3 is checked while loading, and each
failure is a sentence that names the file, the key and the rule.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

from deepinfer_jax.config.schedule_rules import schedule_violations

ARCHITECTURE = "DeepseekV41ForCausalLM"
MODEL_TYPE = "deepseek_v41"

Precision = Literal["reference", "bf16", "float32", "float32_exact"]
PRECISIONS: tuple[Precision, ...] = ("reference", "bf16", "float32", "float32_exact")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """YaRN parameters of the compressed layers (model.md §5.2)."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclasses.dataclass(frozen=True)
class TextConfig:
    """`text_config` of the released schema (model.md §1.1); field names are the file's keys."""

    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    swiglu_limit: float
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    compress_rope_theta: float
    n_routed_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    num_nextn_predict_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int

    @property
    def draft_block(self) -> int:
        """Drafts of one block of the model; 0: it has no draft layers."""
        return self.dspark_block_size if self.num_nextn_predict_layers else 0


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """`vision_config` of the released schema (model.md §1.1, §10); zero layers means that there is no vision tower."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    rope_theta: float
    downsample_ratio: int
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | None


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """One model: text, vision, the special ids, and whether the checkpoint is in the released FP8/FP4 formats.

    Attributes:
        quantized: True with the released `quantization_config`; False for a plain bf16 checkpoint, whose linears are
            not quantised and therefore take no activation quantisation in any precision (model.md §2.1).
        tokenizer_compatibility: "release" or "native" (DB §3.1).
    """

    text: TextConfig
    vision: VisionConfig
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int
    tokenizer_compatibility: str
    quantized: bool


_QUANTIZATION = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}

_MAX_SIZE = 2**63  # what an array can be indexed with
_MAX_NUMBER = 3e38  # float32

# Values that this architecture fixes; another value means another model (DB §13.4, model.md §1.2).
_TEXT_FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
}
_TEXT_FIXED_IF_PRESENT: dict[str, Any] = {
    "attention_dropout": 0.0,
    "hc_shifted": True,
    "use_fp4_sparse_kv": True,
    "dspark_target_attn_input": True,
    "tie_word_embeddings": False,
}

# Keys that a model without the mechanism may leave out.
_TEXT_DEFAULTS: dict[str, Any] = {
    "rope_scaling": None,
    "compress_rope_theta": 160000,
    "kv_source_layer_ids": (),
    "index_source_layer_ids": (),
    "index_n_heads": 0,
    "index_head_dim": 0,
    "index_topk": 0,
    "candidate_source_layer_id": -1,
    "candidate_topk_blocks": 0,
    "candidate_block_size": 1,
    "engram_layer_ids": (),
    "engram_num_embeddings": (),
    "engram_max_ngram_size": 0,
    "engram_vocab_size": 0,
    "engram_n_heads": 0,
    "engram_head_dim": 0,
    "engram_pad_token_id": 0,
    "engram_compressed_vocab_size": 0,
    "num_nextn_predict_layers": 0,
    "dspark_block_size": 0,
    "dspark_noise_token_id": 0,
    "dspark_target_layer_ids": (),
    "dspark_markov_rank": 0,
    "dspark_n_routed_experts": 0,
    "dspark_num_experts_per_tok": 0,
}

# Sizes that every model has; zero or less would give empty arrays and wrong numbers without an error.
_TEXT_POSITIVE = (
    "rms_norm_eps",
    "vocab_size",
    "hidden_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "q_lora_rank",
    "o_lora_rank",
    "max_position_embeddings",
    "rope_theta",
    "compress_rope_theta",
    "sliding_window",
    "hc_mult",
)
_INDEX_POSITIVE = ("index_n_heads", "index_head_dim", "index_topk")
_ENGRAM_POSITIVE = ("engram_vocab_size", "engram_head_dim")
_VISION_POSITIVE = (
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
    "patch_size",
    "rope_theta",
    "downsample_ratio",
)

_NO_VISION: dict[str, Any] = {
    "num_hidden_layers": 0,
    "hidden_size": 0,
    "num_attention_heads": 1,
    "intermediate_size": 0,
    "patch_size": 14,
    "rope_theta": 10000,
    "downsample_ratio": 3,
    "max_image_tokens": 0,
    "min_pixels": 0,
    "max_wh_ratio": None,
}


def load_config(directory: str | Path) -> ModelConfig:
    """Reads `config.json` of a model folder (the folder may hold nothing else).

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: not JSON, another architecture or quantisation, a missing key, a value of the wrong type, or a
            schedule rule of model.md §1.3 that does not hold.
    """
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; a model folder needs the checkpoint's config.json")
    raw = read_json(path)
    try:
        return parse_config(raw)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def read_json(path: Path) -> Any:
    """What a UTF-8 JSON file holds.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not JSON; the message names the file.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # bad JSON, bad UTF-8; JSON nested without end
        raise ValueError(f"{path} is not valid JSON: {error}") from error


def check_precision(precision: str) -> None:
    """Raises ValueError unless `precision` is one of PRECISIONS."""
    if precision not in PRECISIONS:
        raise ValueError(f"precision {precision!r} does not exist; choose one of {', '.join(PRECISIONS)}")


def parse_config(raw: object) -> ModelConfig:
    """Turns a decoded `config.json` into a `ModelConfig`. Raises ValueError as `load_config` does."""
    if not isinstance(raw, dict):
        raise ValueError("the top level must be a JSON object")
    if raw.get("architectures") != [ARCHITECTURE]:
        raise ValueError(f"architectures is {raw.get('architectures')!r}; this engine runs [{ARCHITECTURE!r}] only")
    if raw.get("model_type") != MODEL_TYPE:
        raise ValueError(f"model_type is {raw.get('model_type')!r}; expected {MODEL_TYPE!r}")
    if raw.get("dtype") != "bfloat16":
        raise ValueError(f"dtype is {raw.get('dtype')!r}; expected 'bfloat16'")
    compatibility = raw.get("tokenizer_compatibility", "release")
    if compatibility not in ("release", "native"):
        raise ValueError(f"tokenizer_compatibility is {compatibility!r}; expected 'release' or 'native'")
    quantization = raw.get("quantization_config")
    if quantization is not None:
        for key, wanted in _QUANTIZATION.items():
            found = quantization.get(key) if isinstance(quantization, dict) else None
            if found != wanted:
                raise ValueError(f"quantization_config.{key} is {found!r}; this engine reads {wanted!r} only")
    text = _parse_text(_section(raw, "text_config"))
    vision = _parse_vision({**_NO_VISION, **(_section(raw, "vision_config") if raw.get("vision_config") else {})})
    ids = {key: _typed(raw, key, int, "") for key in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")}
    for key, value in ids.items():
        if not 0 <= value < text.vocab_size:
            raise ValueError(f"{key} is {value}, outside the vocabulary of {text.vocab_size} ids")
    return ModelConfig(
        text=text,
        vision=vision,
        tokenizer_compatibility=compatibility,
        quantized=quantization is not None,
        **ids,
    )


def _section(raw: dict[str, Any], key: str) -> dict[str, Any]:
    section = raw.get(key)
    if not isinstance(section, dict):
        raise ValueError(f"{key} must be a JSON object, found {type(section).__name__}")
    return section


def text_values(section: dict[str, Any]) -> dict[str, Any]:
    """`text_config` with the defaults of absent mechanisms filled in; nothing is checked."""
    values = {**_TEXT_DEFAULTS, **{key: value for key, value in section.items() if value is not None}}
    if "engram_pad_id" in section and "engram_pad_token_id" not in section:  # the flat spelling (T25)
        values["engram_pad_token_id"] = section["engram_pad_id"]
    return values


def _parse_text(section: dict[str, Any]) -> TextConfig:
    for key, wanted in _TEXT_FIXED.items():
        if key not in section:
            raise ValueError(f"text_config.{key} is missing; expected {wanted!r}")
    for key, wanted in {**_TEXT_FIXED, **_TEXT_FIXED_IF_PRESENT}.items():
        if section.get(key, wanted) != wanted:
            raise ValueError(f"text_config.{key} is {section[key]!r}; this architecture has {wanted!r}")
    values = text_values(section)
    if values["rope_scaling"] is not None:
        values["rope_scaling"] = _parse_rope_scaling(values["rope_scaling"])
    text = TextConfig(**_fields(TextConfig, values, "text_config."))
    _refuse_not_positive(text, _TEXT_POSITIVE, "text_config.")
    _refuse_not_positive(text, _INDEX_POSITIVE if text.index_source_layer_ids else (), "text_config.")
    _refuse_not_positive(text, _ENGRAM_POSITIVE if text.engram_layer_ids else (), "text_config.")
    index_keys = values.get("index_k_source_layer_ids", text.kv_source_layer_ids)
    if tuple(index_keys) != text.kv_source_layer_ids:
        raise ValueError(
            f"text_config.index_k_source_layer_ids is {list(index_keys)}; index keys are read from the KV sources "
            f"{list(text.kv_source_layer_ids)} only"
        )
    for rule, reason in schedule_violations(dataclasses.asdict(text)):
        if reason is not None:
            raise ValueError(f"text_config breaks the rule «{rule}»: {reason}")
    return text


def _parse_rope_scaling(section: Any) -> RopeScaling | None:
    if not isinstance(section, dict):
        raise ValueError(f"text_config.rope_scaling must be a JSON object, found {type(section).__name__}")
    kind = section.get("rope_type", section.get("type", "yarn"))
    if kind == "default":
        return None
    if kind != "yarn":
        raise ValueError(f"text_config.rope_scaling.rope_type is {kind!r}; expected 'yarn'")
    scaling = RopeScaling(**_fields(RopeScaling, section, "text_config.rope_scaling."))
    _refuse_not_positive(scaling, tuple(dataclasses.asdict(scaling)), "text_config.rope_scaling.")
    return scaling


def _parse_vision(section: dict[str, Any]) -> VisionConfig:
    vision = VisionConfig(**_fields(VisionConfig, section, "vision_config."))
    if not vision.num_hidden_layers:
        return vision
    _refuse_not_positive(vision, _VISION_POSITIVE, "vision_config.")
    if vision.hidden_size % (4 * vision.num_attention_heads):
        raise ValueError(
            f"vision_config.hidden_size {vision.hidden_size} must be a multiple of 4 x num_attention_heads "
            f"{vision.num_attention_heads} (two axes of rotated pairs)"
        )
    return vision


def _refuse_not_positive(section: object, keys: tuple[str, ...], prefix: str) -> None:
    for key in keys:
        if getattr(section, key) <= 0:
            raise ValueError(f"{prefix}{key} is {getattr(section, key)}; it must be positive")


def _fields(cls: type, values: dict[str, Any], prefix: str) -> dict[str, Any]:
    """The typed values of a dataclass's fields; what the file says besides is ignored, as for any HF config."""
    kinds: dict[Any, Any] = {
        int: int,
        float: float,
        tuple[int, ...]: tuple,
        float | None: (float, type(None)),
        RopeScaling | None: (RopeScaling, type(None)),
    }
    return {field.name: _typed(values, field.name, kinds[field.type], prefix) for field in dataclasses.fields(cls)}


def _typed(values: dict[str, Any], key: str, kind: Any, prefix: str) -> Any:
    if key not in values:
        raise ValueError(f"{prefix}{key} is missing")
    value = values[key]
    if kind is int and type(value) is int and -1 <= value < _MAX_SIZE:
        return value
    if kind in (float, (float, type(None))) and type(value) in (int, float) and abs(value) < _MAX_NUMBER:  # not NaN
        return float(value)
    if kind is tuple and isinstance(value, list | tuple) and all(type(item) is int for item in value):
        return tuple(value)
    if isinstance(kind, tuple) and isinstance(value, kind):
        return value
    wanted = "a list of integers" if kind is tuple else "an integer" if kind is int else "a number"
    raise ValueError(f"{prefix}{key} is {value!r}; expected {wanted}")
