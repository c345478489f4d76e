"""What each backbone layer does, worked out once from the configuration (model.md §0.1, §5.8)."""

import dataclasses
import functools

from deepinfer_jax.config.model_config import TextConfig


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """The roles of one backbone layer.

    Attributes:
        index: layer number.
        ratio: tokens per compressed entry; 0 for a layer that sees its window only.
        kv_owner: layer whose compressed entries and index keys it reads; None at ratio 0.
        is_kv_source: it compresses its input into entries and index keys.
        is_index_source: it scores index keys and picks entries (a "full" or "reindex" layer).
        is_candidate_source: it publishes the candidate blocks.
        uses_candidates: its picks are restricted to those blocks (a "reindex" layer, model.md §5.7).
        engram: position of the layer among the Engram layers, or None.
        tap: its input streams feed DSpark (model.md §9).
    """

    index: int
    ratio: int
    kv_owner: int | None
    is_kv_source: bool
    is_index_source: bool
    is_candidate_source: bool
    uses_candidates: bool
    engram: int | None
    tap: bool


@functools.cache
def layer_plans(text: TextConfig) -> tuple[LayerPlan, ...]:
    """The plan of every backbone layer, in order."""
    return tuple(_plan(text, index) for index in range(text.num_hidden_layers))


def _plan(text: TextConfig, index: int) -> LayerPlan:
    compressed = text.compress_ratios[index] > 0
    is_index_source = index in text.index_source_layer_ids
    source = text.candidate_source_layer_id
    return LayerPlan(
        index=index,
        ratio=text.compress_ratios[index],
        kv_owner=max(i for i in text.kv_source_layer_ids if i <= index) if compressed else None,
        is_kv_source=index in text.kv_source_layer_ids,
        is_index_source=is_index_source,
        is_candidate_source=index == source,
        uses_candidates=is_index_source and 0 <= source < index,
        engram=text.engram_layer_ids.index(index) if index in text.engram_layer_ids else None,
        tap=bool(text.num_nextn_predict_layers) and index in text.dspark_target_layer_ids,
    )
