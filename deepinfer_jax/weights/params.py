"""The parameters of one model as a pytree, in the order and with the names of model.md §2.1.

Matrices are stored `[out, in]` (y = x Wᵀ). The comment of each leaf gives its shape in elements and its storage format
in the release: a type of plain arrays, or fp8 (`Fp8Weight`), fp4 (`Fp4Weight`), fp8_rows (`Fp8Rows`). On the device a
leaf has this format or is decoded to float32 (`checkpoint.leaves.leaf_form`). `layout.layout(config)` is this same tree
with a `ParamSpec` at each leaf.
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
        fn: projection of the flattened streams.
        base: added to the scaled projection.
        scale: one factor each for pre, post and comb.
    """

    fn: Any  # [hc·(hc + 2), hc·hidden] float32
    base: Any  # [hc·(hc + 2)] float32
    scale: Any  # [3] float32


@struct.dataclass
class Compressor:
    """Tokens to latents, at KV sources (model.md §5.5).

    Attributes:
        wkv: κ of a token.
        wgate: γ of a token; None at ratio 1.
        norm: of the latent.
    """

    wkv: Any  # [head_dim, hidden] bfloat16
    wgate: Any  # [head_dim, hidden] bfloat16
    norm: Any  # [head_dim] bfloat16


@struct.dataclass
class IndexKey:
    """Latents to index keys, at KV sources (model.md §5.5).

    Attributes:
        wk: latent to index key.
        k_norm: of the index key.
    """

    wk: Any  # [index_dim, head_dim] bfloat16
    k_norm: Any  # [index_dim] bfloat16


@struct.dataclass
class Indexer:
    """Scores of entries, at index sources (model.md §5.6).

    Attributes:
        wq_b: index queries.
        weights_proj: weights of the index heads.
    """

    wq_b: Any  # [index_heads·index_dim, q_lora] fp8
    weights_proj: Any  # [index_heads, hidden] bfloat16


@struct.dataclass
class Attention:
    """One layer's attention (model.md §5.1, §5.4).

    Attributes:
        wq_a, q_norm: input to query latent.
        wq_b: query latent to the heads' queries.
        wkv, kv_norm: input to window key, which is the value too.
        wo_a: grouped output projection.
        wo_b: groups to output.
        attn_sink: one logit per head.
        compressor: at KV sources, else None.
        index_key: at KV sources, else None.
        indexer: at index sources, else None.
    """

    wq_a: Any  # [q_lora, hidden] fp8
    q_norm: Any  # [q_lora] bfloat16
    wq_b: Any  # [heads·head_dim, q_lora] fp8
    wkv: Any  # [head_dim, hidden] fp8
    kv_norm: Any  # [head_dim] bfloat16
    wo_a: Any  # [o_groups·o_lora, heads·head_dim / o_groups] fp8
    wo_b: Any  # [hidden, o_groups·o_lora] fp8
    attn_sink: Any  # [heads] float32
    compressor: Compressor | None
    index_key: IndexKey | None
    indexer: Indexer | None


@struct.dataclass
class Experts:
    """SwiGLU experts; routed ones are stacked over a leading expert axis (model.md §6).

    Attributes:
        w1: gate projection.
        w3: up projection.
        w2: down projection.
    """

    w1: Any  # [experts, intermediate, hidden] fp4; shared: [intermediate, hidden] fp8
    w3: Any  # [experts, intermediate, hidden] fp4; shared: [intermediate, hidden] fp8
    w2: Any  # [experts, hidden, intermediate] fp4; shared: [hidden, intermediate] fp8


@struct.dataclass
class MoE:
    """Router, routed experts and shared expert (model.md §6).

    Attributes:
        gate: router.
        bias: selection bias of text tokens.
        bias_vl: selection bias of image tokens; None without a vision tower.
        experts: routed experts, stacked.
        shared_experts: the shared expert.
    """

    gate: Any  # [experts, hidden] bfloat16
    bias: Any  # [experts] float32
    bias_vl: Any  # [experts] float32
    experts: Experts
    shared_experts: Experts


@struct.dataclass
class Engram:
    """N-gram memory of one layer (model.md §7).

    Attributes:
        embed: the table.
        wkv: memory to a key for each stream and one value.
        q_weight, k_weight: norms of streams and keys.
    """

    embed: Any  # [rows, engram_dim] fp8_rows
    wkv: Any  # [(hc + 1)·hidden, (ngram - 1)·engram_heads·engram_dim] fp8
    q_weight: Any  # [hc, hidden] bfloat16
    k_weight: Any  # [hc, hidden] bfloat16


@struct.dataclass
class Layer:
    """One backbone or draft layer.

    Attributes:
        attn: attention.
        attn_norm: of its input.
        ffn: mixture of experts.
        ffn_norm: of its input.
        hc_attn: stream mixing around the attention.
        hc_ffn: stream mixing around the experts.
        engram: at Engram layers, else None.
    """

    attn: Attention
    attn_norm: Any  # [hidden] bfloat16
    ffn: MoE
    ffn_norm: Any  # [hidden] bfloat16
    hc_attn: HyperConnection
    hc_ffn: HyperConnection
    engram: Engram | None


@struct.dataclass
class Draft:
    """DSpark, the draft model (model.md §9).

    Attributes:
        layers: the draft layers `mtp.*`.
        main_proj, main_norm: taps to draft context.
        norm: of the final states.
        markov_embed, markov_head: what the token before adds to the logits.
        confidence: final state and Markov embedding to the confidence logit.
    """

    layers: tuple[Layer, ...]
    main_proj: Any  # [hidden, targets·hidden] fp8
    main_norm: Any  # [hidden] bfloat16
    norm: Any  # [hidden] bfloat16
    markov_embed: Any  # [vocab, rank] bfloat16
    markov_head: Any  # [vocab, rank] bfloat16
    confidence: Any  # [1, hidden + rank] bfloat16


@struct.dataclass
class VisionBlock:
    """One ViT block (model.md §10.2).

    Attributes:
        wqkv, wqkv_bias: queries, keys and values, one above the other.
        wo, wo_bias: output projection.
        w1: gate and up projections, one above the other.
        w2: down projection.
        norm1, norm2: before attention and before the MLP.
    """

    wqkv: Any  # [3·vit, vit] bfloat16
    wqkv_bias: Any  # [3·vit] bfloat16
    wo: Any  # [vit, vit] bfloat16
    wo_bias: Any  # [vit] bfloat16
    w1: Any  # [2·vit_ffn, vit] bfloat16
    w2: Any  # [vit, vit_ffn] bfloat16
    norm1: Any  # [vit] bfloat16
    norm2: Any  # [vit] bfloat16


@struct.dataclass
class Vision:
    """Vision tower, aligner and the delimiters' vectors (model.md §10, §3).

    Attributes:
        patch_proj, patch_bias: patches to rows.
        blocks: ViT blocks.
        norm: behind the last block.
        aligner_w1, aligner_b1, aligner_w2, aligner_b2: squares of patches to embedding rows.
        image_start, image_end, image_newline: the delimiters.
    """

    patch_proj: Any  # [vit, 3·patch²] bfloat16
    patch_bias: Any  # [vit] bfloat16
    blocks: tuple[VisionBlock, ...]
    norm: Any  # [vit] bfloat16
    aligner_w1: Any  # [hidden, vit·downsample²] bfloat16
    aligner_b1: Any  # [hidden] bfloat16
    aligner_w2: Any  # [hidden, hidden] bfloat16
    aligner_b2: Any  # [hidden] bfloat16
    image_start: Any  # [hidden] bfloat16
    image_end: Any  # [hidden] bfloat16
    image_newline: Any  # [hidden] bfloat16


@struct.dataclass
class Params:
    """All parameters of one model.

    Attributes:
        embed: rows of the token embedding.
        layers: backbone layers.
        norm: of the final states.
        head: not tied to the embedding.
        draft: DSpark, or None.
        vision: vision tower, or None.
        token_map: compressed id of each token id (model.md §7.1); None without Engram layers, or when the checkpoint
            folder has no tokenizer.
        precision: the precision that the leaves were prepared for (static).
        mesh: the mesh that the leaves are placed on, or None (static).
    """

    embed: Any  # [vocab, hidden] bfloat16
    layers: tuple[Layer, ...]
    norm: Any  # [hidden] bfloat16
    head: Any  # [vocab, hidden] bfloat16
    draft: Draft | None
    vision: Vision | None
    token_map: jax.Array | None  # [tokens] int32
    precision: str = struct.field(pytree_node=False)
    mesh: Mesh | None = struct.field(pytree_node=False, default=None)
