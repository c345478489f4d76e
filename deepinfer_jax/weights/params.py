"""The parameters of one model as a pytree, in the order and with the names of model.md §2.1.

Matrices are stored `[out, in]` (y = x Wᵀ). A weight is a plain array or, in storage format, an `Fp8Weight`,
`Fp4Weight` or `Fp8Rows`. `layout.layout(config)` is this same tree with a `ParamSpec` at each leaf.
"""

from typing import Any

import jax
from flax import struct
from jax.sharding import Mesh

from deepinfer_jax.kernels.weights import Fp4Weight, Fp8Rows, Fp8Weight, Weight

__all__ = ["Fp4Weight", "Fp8Rows", "Fp8Weight", "Weight"]


@struct.dataclass
class HyperConnection:
    """Coefficients of one sublayer's stream mixing (model.md §4).

    Attributes:
        fn: projection of the flattened streams. float32 [hc·(hc + 2), hc·hidden].
        base: float32 [hc·(hc + 2)].
        scale: for pre, post and comb. float32 [3].
    """

    fn: Any
    base: Any
    scale: Any


@struct.dataclass
class Compressor:
    """Tokens to latents, at KV sources (model.md §5.5).

    Attributes:
        wkv: [head_dim, hidden].
        wgate: [head_dim, hidden]; None at ratio 1.
        norm: [head_dim].
    """

    wkv: Any
    wgate: Any
    norm: Any


@struct.dataclass
class IndexKey:
    """Latents to index keys, at KV sources (model.md §5.5).

    Attributes:
        wk: [index_dim, head_dim].
        k_norm: [index_dim].
    """

    wk: Any
    k_norm: Any


@struct.dataclass
class Indexer:
    """Scores of entries, at index sources (model.md §5.6).

    Attributes:
        wq_b: [index_heads·index_dim, q_lora].
        weights_proj: [index_heads, hidden].
    """

    wq_b: Any
    weights_proj: Any


@struct.dataclass
class Attention:
    """One layer's attention (model.md §5.1, §5.4).

    Attributes:
        wq_a: [q_lora, hidden].
        q_norm: [q_lora].
        wq_b: [heads·head_dim, q_lora].
        wkv: [head_dim, hidden].
        kv_norm: [head_dim].
        wo_a: grouped output projection. [o_groups·o_lora, heads·head_dim / o_groups].
        wo_b: [hidden, o_groups·o_lora].
        attn_sink: one logit per head. float32 [heads].
        compressor: at KV sources, else None.
        index_key: at KV sources, else None.
        indexer: at index sources, else None.
    """

    wq_a: Any
    q_norm: Any
    wq_b: Any
    wkv: Any
    kv_norm: Any
    wo_a: Any
    wo_b: Any
    attn_sink: Any
    compressor: Compressor | None
    index_key: IndexKey | None
    indexer: Indexer | None


@struct.dataclass
class Experts:
    """SwiGLU experts; routed ones are stacked over a leading expert axis (model.md §6).

    Attributes:
        w1: gate projection. [(experts,) intermediate, hidden].
        w3: up projection. [(experts,) intermediate, hidden].
        w2: down projection. [(experts,) hidden, intermediate].
    """

    w1: Any
    w3: Any
    w2: Any


@struct.dataclass
class MoE:
    """Router, routed experts and shared expert (model.md §6).

    Attributes:
        gate: [experts, hidden].
        bias: selection bias of text tokens. float32 [experts].
        bias_vl: selection bias of image tokens. float32 [experts]; None without a vision tower.
        experts: routed experts, stacked.
        shared_experts: the shared expert.
    """

    gate: Any
    bias: Any
    bias_vl: Any
    experts: Experts
    shared_experts: Experts


@struct.dataclass
class Engram:
    """N-gram memory of one layer (model.md §7).

    Attributes:
        embed: the table. [rows, engram_head_dim].
        wkv: [(hc + 1)·hidden, (ngram - 1)·heads·engram_head_dim].
        q_weight: [hc, hidden].
        k_weight: [hc, hidden].
    """

    embed: Any
    wkv: Any
    q_weight: Any
    k_weight: Any


@struct.dataclass
class Layer:
    """One backbone or draft layer.

    Attributes:
        attn: attention.
        attn_norm: [hidden].
        ffn: mixture of experts.
        ffn_norm: [hidden].
        hc_attn: stream mixing around the attention.
        hc_ffn: stream mixing around the experts.
        engram: at Engram layers, else None.
    """

    attn: Attention
    attn_norm: Any
    ffn: MoE
    ffn_norm: Any
    hc_attn: HyperConnection
    hc_ffn: HyperConnection
    engram: Engram | None


@struct.dataclass
class Draft:
    """DSpark, the draft model (model.md §9).

    Attributes:
        layers: the draft layers `mtp.*`.
        main_proj: taps to draft context. [hidden, targets·hidden].
        main_norm: [hidden].
        norm: [hidden].
        markov_embed: [vocab, rank].
        markov_head: [vocab, rank].
        confidence: [1, hidden + rank].
    """

    layers: tuple[Layer, ...]
    main_proj: Any
    main_norm: Any
    norm: Any
    markov_embed: Any
    markov_head: Any
    confidence: Any


@struct.dataclass
class VisionBlock:
    """One ViT block (model.md §10.2).

    Attributes:
        wqkv, wqkv_bias: [3·vit, vit], [3·vit].
        wo, wo_bias: [vit, vit], [vit].
        w1: gate and up projections, one above the other. [2·vit_ffn, vit].
        w2: [vit, vit_ffn].
        norm1, norm2: [vit].
    """

    wqkv: Any
    wqkv_bias: Any
    wo: Any
    wo_bias: Any
    w1: Any
    w2: Any
    norm1: Any
    norm2: Any


@struct.dataclass
class Vision:
    """Vision tower, aligner and the delimiters' vectors (model.md §10, §3).

    Attributes:
        patch_proj, patch_bias: [vit, 3·patch²], [vit].
        blocks: ViT blocks.
        norm: [vit].
        aligner_w1, aligner_b1: [hidden, vit·downsample²], [hidden].
        aligner_w2, aligner_b2: [hidden, hidden], [hidden].
        image_start, image_end, image_newline: [hidden] each.
    """

    patch_proj: Any
    patch_bias: Any
    blocks: tuple[VisionBlock, ...]
    norm: Any
    aligner_w1: Any
    aligner_b1: Any
    aligner_w2: Any
    aligner_b2: Any
    image_start: Any
    image_end: Any
    image_newline: Any


@struct.dataclass
class Params:
    """All parameters of one model.

    Attributes:
        embed: [vocab, hidden].
        layers: backbone layers.
        norm: [hidden].
        head: [vocab, hidden].
        draft: DSpark, or None.
        vision: vision tower, or None.
        token_map: compressed id of each token id (model.md §7.1). int32 [tokenizer size]; None without Engram
            layers, or when the checkpoint folder has no tokenizer.
        precision: the precision that the leaves were prepared for (static).
        mesh: the mesh that the leaves are placed on, or None (static).
    """

    embed: Any
    layers: tuple[Layer, ...]
    norm: Any
    head: Any
    draft: Draft | None
    vision: Vision | None
    token_map: jax.Array | None
    precision: str = struct.field(pytree_node=False)
    mesh: Mesh | None = struct.field(pytree_node=False, default=None)
