"""The declaration: every parameter's released tensor names, shape, storage format and logical axes (model.md §2.1).

Loader, random initialisation, shardings, the tiny-checkpoint writer and all memory accounts read this one tree.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Literal

import jax

from deepinfer_jax.config.layer_plan import LayerPlan, layer_plans
from deepinfer_jax.config.model_config import ModelConfig, TextConfig, VisionConfig
from deepinfer_jax.weights.params import (
    Attention,
    Compressor,
    Draft,
    Engram,
    Experts,
    HyperConnection,
    Indexer,
    IndexKey,
    Layer,
    MoE,
    Params,
    Vision,
    VisionBlock,
)

Format = Literal["BF16", "F32", "FP8", "FP4", "FP8_ROWS"]
Init = Literal["normal", "norm", "sink", "hc_base", "hc_scale"]

DTYPE_BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}

_BLOCK = 32  # rows and columns of an FP8 scale block; inputs of an FP4 or table scale group (T5, T6)


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """One tensor of the released files: its name, safetensors dtype and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One parameter.

    Attributes:
        names: released tensor names: one, or one per expert when `stacked`.
        shape: shape of one released tensor in elements, `[out, in]` for a matrix.
        format: storage format of the released tensors.
        axes: logical axis of each dimension of the parameter, a leading "expert" included when `stacked`.
        stacked: the tensors are stacked over a leading axis.
        init: how random initialisation fills it.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    format: Format
    axes: tuple[str | None, ...]
    stacked: bool = False
    init: Init = "normal"

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Shape of the parameter in elements, with the leading expert axis."""
        return (len(self.names), *self.shape) if self.stacked else self.shape

    @property
    def dtype(self) -> str:
        """Safetensors dtype of each released tensor."""
        return {"FP8": "F8_E4M3", "FP8_ROWS": "F8_E4M3", "FP4": "I8"}.get(self.format, self.format)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of each released tensor (FP4 packs two inputs in a byte)."""
        return (*self.shape[:-1], self.shape[-1] // 2) if self.format == "FP4" else self.shape

    @property
    def scale_shape(self) -> tuple[int, ...] | None:
        """Shape of each tensor's E8M0 scales, or None for an unquantised format."""
        if self.format == "FP8":
            return (-(-self.shape[0] // _BLOCK), -(-self.shape[1] // _BLOCK))
        if self.format in ("FP4", "FP8_ROWS"):
            return (self.shape[0], self.shape[1] // _BLOCK)
        return None

    def scale_name(self, name: str) -> str:
        """`X.scale` of `X.weight` (DB §13.3)."""
        return name.removesuffix("weight") + "scale"

    def stored(self, name: str) -> list[TensorSpec]:
        """The released tensor `name` of this parameter, and its scales if it has them."""
        weight = TensorSpec(name, self.dtype, self.stored_shape)
        if self.scale_shape is None:
            return [weight]
        return [weight, TensorSpec(self.scale_name(name), "F8_E8M0", self.scale_shape)]

    def tensors(self) -> Iterator[TensorSpec]:
        """The released tensors of this parameter, each followed by its scales."""
        for name in self.names:
            yield from self.stored(name)


def layout(config: ModelConfig) -> Params:
    """The parameter tree of `config` with a `ParamSpec` at every leaf; nothing is allocated."""
    text = config.text
    declare = _Declare(config.quantized, bool(config.vision.num_hidden_layers))
    return Params(
        embed=declare.bf16("embed.weight", (text.vocab_size, text.hidden_size), ("vocab", "hidden")),
        layers=tuple(declare.layer(text, plan) for plan in layer_plans(text)),
        norm=declare.norm("norm.weight", text.hidden_size),
        head=declare.bf16("head.weight", (text.vocab_size, text.hidden_size), ("vocab", "hidden")),
        draft=declare.draft(text) if text.num_nextn_predict_layers else None,
        vision=declare.vision(config.vision, text) if config.vision.num_hidden_layers else None,
        token_map=None,
        precision="released",
    )


def param_specs(config: ModelConfig) -> list[ParamSpec]:
    """Every `ParamSpec` of `layout(config)`, in tree order."""
    return jax.tree.leaves(layout(config), is_leaf=lambda leaf: isinstance(leaf, ParamSpec))


def released_tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor that a checkpoint of `config` holds (released config: 96,085 of 510,286,023,000 bytes)."""
    for spec in param_specs(config):
        yield from spec.tensors()


@dataclasses.dataclass(frozen=True)
class _Declare:
    """Writes down parameters; unquantised checkpoints hold every quantised matrix in BF16 (model.md §2.1)."""

    quantized: bool
    has_vision: bool

    def bf16(self, name: str, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> ParamSpec:
        return ParamSpec((name,), shape, "BF16", axes)

    def norm(self, name: str, size: int, axis: str | None = "hidden") -> ParamSpec:
        return ParamSpec((name,), (size,), "BF16", (axis,), init="norm")

    def f32(self, name: str, shape: tuple[int, ...], axes: tuple[str | None, ...], init: Init) -> ParamSpec:
        return ParamSpec((name,), shape, "F32", axes, init=init)

    def fp8(self, name: str, shape: tuple[int, int], axes: tuple[str | None, ...]) -> ParamSpec:
        return ParamSpec((name,), shape, "FP8" if self.quantized else "BF16", axes)

    def hyper_connection(self, prefix: str, text: TextConfig) -> HyperConnection:
        streams = text.hc_mult
        mixes = streams * (streams + 2)
        return HyperConnection(
            fn=self.f32(f"{prefix}_fn", (mixes, streams * text.hidden_size), (None, "streams_hidden"), "normal"),
            base=self.f32(f"{prefix}_base", (mixes,), (None,), "hc_base"),
            scale=self.f32(f"{prefix}_scale", (3,), (None,), "hc_scale"),
        )

    def attention(self, prefix: str, text: TextConfig, plan: LayerPlan | None) -> Attention:
        hidden, heads, head = text.hidden_size, text.num_attention_heads, text.head_dim
        compressor = index_key = indexer = None
        if plan is not None and plan.is_kv_source:
            compressor = Compressor(
                wkv=self.bf16(f"{prefix}.compressor.wkv.weight", (head, hidden), ("head_dim", "hidden")),
                wgate=self.bf16(f"{prefix}.compressor.wgate.weight", (head, hidden), ("head_dim", "hidden"))
                if plan.ratio > 1
                else None,
                norm=self.norm(f"{prefix}.compressor.norm.weight", head, "head_dim"),
            )
            index_key = IndexKey(
                wk=self.bf16(f"{prefix}.indexer.wk.weight", (text.index_head_dim, head), ("index_dim", "head_dim")),
                k_norm=self.norm(f"{prefix}.indexer.k_norm.weight", text.index_head_dim, "index_dim"),
            )
        if plan is not None and plan.is_index_source:
            indexer = Indexer(
                wq_b=self.fp8(
                    f"{prefix}.indexer.wq_b.weight",
                    (text.index_n_heads * text.index_head_dim, text.q_lora_rank),
                    ("index_heads", "q_lora"),
                ),
                weights_proj=self.bf16(
                    f"{prefix}.indexer.weights_proj.weight",
                    (text.index_n_heads, hidden),
                    ("index_heads", "hidden"),
                ),
            )
        o_rank = text.o_groups * text.o_lora_rank
        return Attention(
            wq_a=self.fp8(f"{prefix}.wq_a.weight", (text.q_lora_rank, hidden), ("q_lora", "hidden")),
            q_norm=self.norm(f"{prefix}.q_norm.weight", text.q_lora_rank, "q_lora"),
            wq_b=self.fp8(f"{prefix}.wq_b.weight", (heads * head, text.q_lora_rank), ("heads", "q_lora")),
            wkv=self.fp8(f"{prefix}.wkv.weight", (head, hidden), ("head_dim", "hidden")),
            kv_norm=self.norm(f"{prefix}.kv_norm.weight", head, "head_dim"),
            wo_a=self.fp8(f"{prefix}.wo_a.weight", (o_rank, heads * head // text.o_groups), ("o_lora", None)),
            wo_b=self.fp8(f"{prefix}.wo_b.weight", (hidden, o_rank), ("hidden", "o_lora")),
            attn_sink=self.f32(f"{prefix}.attn_sink", (heads,), ("heads",), "sink"),
            compressor=compressor,
            index_key=index_key,
            indexer=indexer,
        )

    def moe(self, prefix: str, text: TextConfig, experts: int) -> MoE:
        hidden, inner = text.hidden_size, text.moe_intermediate_size

        def routed(matrix: str, shape: tuple[int, int], axes: tuple[str, str]) -> ParamSpec:
            names = tuple(f"{prefix}.experts.{e}.{matrix}.weight" for e in range(experts))
            return ParamSpec(names, shape, "FP4" if self.quantized else "BF16", ("expert", *axes), stacked=True)

        def shared(matrix: str, shape: tuple[int, int], axes: tuple[str, str]) -> ParamSpec:
            return self.fp8(f"{prefix}.shared_experts.{matrix}.weight", shape, axes)

        up, down = ("expert_ffn", "hidden"), ("hidden", "expert_ffn")
        return MoE(
            gate=self.bf16(f"{prefix}.gate.weight", (experts, hidden), (None, "hidden")),
            bias=self.f32(f"{prefix}.gate.bias", (experts,), (None,), "sink"),
            bias_vl=self.f32(f"{prefix}.gate.bias_vl", (experts,), (None,), "sink") if self.has_vision else None,
            experts=Experts(
                w1=routed("w1", (inner, hidden), up),
                w3=routed("w3", (inner, hidden), up),
                w2=routed("w2", (hidden, inner), down),
            ),
            shared_experts=Experts(
                w1=shared("w1", (inner, hidden), up),
                w3=shared("w3", (inner, hidden), up),
                w2=shared("w2", (hidden, inner), down),
            ),
        )

    def engram(self, prefix: str, text: TextConfig, rows: int) -> Engram:
        width = (text.engram_max_ngram_size - 1) * text.engram_n_heads * text.engram_head_dim
        gate_shape, gate_axes = (text.hc_mult, text.hidden_size), (None, "hidden")
        return Engram(
            embed=ParamSpec(
                (f"{prefix}.embed.weight",),
                (rows, text.engram_head_dim),
                "FP8_ROWS" if self.quantized else "BF16",
                ("engram_rows", None),
            ),
            wkv=self.fp8(
                f"{prefix}.wkv.weight",
                ((text.hc_mult + 1) * text.hidden_size, width),
                ("streams_hidden", None),
            ),
            q_weight=self.bf16(f"{prefix}.q_weight", gate_shape, gate_axes),
            k_weight=self.bf16(f"{prefix}.k_weight", gate_shape, gate_axes),
        )

    def _layer(self, prefix: str, text: TextConfig, plan: LayerPlan | None, experts: int) -> Layer:
        engram = None
        if plan is not None and plan.engram is not None:
            engram = self.engram(f"{prefix}.engram", text, text.engram_num_embeddings[plan.engram])
        return Layer(
            attn=self.attention(f"{prefix}.attn", text, plan),
            attn_norm=self.norm(f"{prefix}.attn_norm.weight", text.hidden_size),
            ffn=self.moe(f"{prefix}.ffn", text, experts),
            ffn_norm=self.norm(f"{prefix}.ffn_norm.weight", text.hidden_size),
            hc_attn=self.hyper_connection(f"{prefix}.hc_attn", text),
            hc_ffn=self.hyper_connection(f"{prefix}.hc_ffn", text),
            engram=engram,
        )

    def layer(self, text: TextConfig, plan: LayerPlan) -> Layer:
        return self._layer(f"layers.{plan.index}", text, plan, text.n_routed_experts)

    def draft(self, text: TextConfig) -> Draft:
        first, last = "mtp.0", f"mtp.{text.num_nextn_predict_layers - 1}"
        hidden, rank, targets = text.hidden_size, text.dspark_markov_rank, len(text.dspark_target_layer_ids)
        return Draft(
            layers=tuple(
                self._layer(f"mtp.{i}", text, None, text.dspark_n_routed_experts)
                for i in range(text.num_nextn_predict_layers)
            ),
            main_proj=self.fp8(f"{first}.main_proj.weight", (hidden, targets * hidden), ("hidden", None)),
            main_norm=self.norm(f"{first}.main_norm.weight", hidden),
            norm=self.norm(f"{last}.norm.weight", hidden),
            markov_embed=self.bf16(f"{last}.markov_head.embed.weight", (text.vocab_size, rank), ("vocab", None)),
            markov_head=self.bf16(f"{last}.markov_head.head.weight", (text.vocab_size, rank), ("vocab", None)),
            confidence=self.bf16(f"{last}.confidence_head.proj.weight", (1, hidden + rank), (None, None)),
        )

    def vision_block(self, prefix: str, width: int, inner: int) -> VisionBlock:
        return VisionBlock(
            wqkv=self.bf16(f"{prefix}.attn.wqkv.weight", (3 * width, width), (None, None)),
            wqkv_bias=self.bf16(f"{prefix}.attn.wqkv.bias", (3 * width,), (None,)),
            wo=self.bf16(f"{prefix}.attn.wo.weight", (width, width), (None, None)),
            wo_bias=self.bf16(f"{prefix}.attn.wo.bias", (width,), (None,)),
            w1=self.bf16(f"{prefix}.mlp.w1.weight", (2 * inner, width), (None, None)),
            w2=self.bf16(f"{prefix}.mlp.w2.weight", (width, inner), (None, None)),
            norm1=self.norm(f"{prefix}.norm1.weight", width, None),
            norm2=self.norm(f"{prefix}.norm2.weight", width, None),
        )

    def vision(self, vision: VisionConfig, text: TextConfig) -> Vision:
        width, hidden = vision.hidden_size, text.hidden_size
        return Vision(
            patch_proj=self.bf16("vision.patch_embed.proj.weight", (width, 3 * vision.patch_size**2), (None, None)),
            patch_bias=self.bf16("vision.patch_embed.proj.bias", (width,), (None,)),
            blocks=tuple(
                self.vision_block(f"vision.blocks.{b}", width, vision.intermediate_size)
                for b in range(vision.num_hidden_layers)
            ),
            norm=self.norm("vision.norm.weight", width, None),
            aligner_w1=self.bf16("aligner.w1.weight", (hidden, width * vision.downsample_ratio**2), (None, None)),
            aligner_b1=self.bf16("aligner.w1.bias", (hidden,), (None,)),
            aligner_w2=self.bf16("aligner.w2.weight", (hidden, hidden), (None, None)),
            aligner_b2=self.bf16("aligner.w2.bias", (hidden,), (None,)),
            image_start=self.bf16("image_start", (hidden,), ("hidden",)),
            image_end=self.bf16("image_end", (hidden,), ("hidden",)),
            image_newline=self.bf16("image_newline", (hidden,), ("hidden",)),
        )
