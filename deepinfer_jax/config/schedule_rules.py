"""The rules that a layer schedule must obey (model.md §1.3), each a sentence and a check."""

from collections.abc import Callable, Mapping
from typing import Any

Text = Mapping[str, Any]


def _ratio_count(text: Text) -> str | None:
    ratios, layers, drafts = (
        text["compress_ratios"],
        text["num_hidden_layers"],
        text["num_nextn_predict_layers"],
    )
    if len(ratios) != layers + drafts:
        return f"there are {len(ratios)} ratios for {layers} layers and {drafts} draft layers"
    if any(ratios[layers:]):
        return f"the draft layers' ratios are {list(ratios[layers:])}"
    if any(ratio < 0 for ratio in ratios):
        return f"the ratios are {list(ratios)}"
    return None


def _increasing(text: Text) -> str | None:
    for key in ("kv_source_layer_ids", "index_source_layer_ids"):
        ids = list(text[key])
        if ids != sorted(set(ids)) or any(not 0 <= i < text["num_hidden_layers"] for i in ids):
            return f"{key} is {ids} with {text['num_hidden_layers']} layers"
    return None


def _kv_in_index(text: Text) -> str | None:
    missing = sorted(set(text["kv_source_layer_ids"]) - set(text["index_source_layer_ids"]))
    return f"KV sources {missing} are no index sources" if missing else None


def _sources_compress(text: Text) -> str | None:
    windows = [i for i in text["index_source_layer_ids"] if text["compress_ratios"][i] == 0]
    return f"layers {windows} have ratio 0" if windows else None


def _owners(text: Text) -> str | None:
    ratios = text["compress_ratios"]
    for layer in range(text["num_hidden_layers"]):
        if ratios[layer] == 0:
            continue
        owners = [source for source in text["kv_source_layer_ids"] if source <= layer]
        if not owners:
            return f"layer {layer} has ratio {ratios[layer]} and no KV source at or before it"
        if ratios[owners[-1]] != ratios[layer]:
            return f"layer {layer} has ratio {ratios[layer]}, its KV source {owners[-1]} has {ratios[owners[-1]]}"
    return None


def _candidate_source(text: Text) -> str | None:
    source = text["candidate_source_layer_id"]
    if source == -1:
        return None
    if source not in text["kv_source_layer_ids"]:
        return f"candidate_source_layer_id is {source}, the KV sources are {list(text['kv_source_layer_ids'])}"
    ratios = text["compress_ratios"]
    others = [i for i in text["index_source_layer_ids"] if i > source and ratios[i] != ratios[source]]
    return f"layers {others} use its candidates with another ratio" if others else None


def _candidate_capacity(text: Text) -> str | None:
    if text["candidate_source_layer_id"] == -1:
        return None
    blocks, size, topk = (
        text["candidate_topk_blocks"],
        text["candidate_block_size"],
        text["index_topk"],
    )
    if blocks < 1 or size < 1 or (blocks - 1) * size + 1 < topk:
        return f"({blocks} - 1) x {size} + 1 < {topk}"
    return None


def _heads(text: Text) -> str | None:
    heads, groups = text["num_attention_heads"], text["o_groups"]
    return f"{heads} heads, {groups} groups" if groups < 1 or heads % groups else None


def _sinkhorn(text: Text) -> str | None:
    rounds = text["hc_sinkhorn_iters"]
    return f"hc_sinkhorn_iters is {rounds}" if rounds < 1 else None


def _rope(text: Text) -> str | None:
    rope, head = text["qk_rope_head_dim"], text["head_dim"]
    widest = min(head, text["index_head_dim"]) if text["index_source_layer_ids"] else head
    return f"it is {rope}, the heads have {widest}" if rope % 2 or not 0 < rope <= widest else None


def _experts(text: Text) -> str | None:
    pairs = [(text["n_routed_experts"], text["num_experts_per_tok"])]
    if text["num_nextn_predict_layers"]:
        pairs.append((text["dspark_n_routed_experts"], text["dspark_num_experts_per_tok"]))
    wrong = [pair for pair in pairs if not 1 <= pair[1] <= pair[0]]
    return f"(experts, experts per token) are {wrong}" if wrong else None


def _engram(text: Text) -> str | None:
    ids, rows = list(text["engram_layer_ids"]), text["engram_num_embeddings"]
    if not ids:
        return None
    if ids != sorted(set(ids)) or any(not 0 <= i < text["num_hidden_layers"] for i in ids):
        return f"engram_layer_ids is {ids} with {text['num_hidden_layers']} layers"
    if len(rows) != len(ids):
        return f"{len(ids)} Engram layers and {len(rows)} table sizes"
    if text["engram_max_ngram_size"] < 2 or text["engram_n_heads"] < 1:
        return f"n-grams up to {text['engram_max_ngram_size']} with {text['engram_n_heads']} heads"
    if not 0 <= text["engram_pad_token_id"] < text["vocab_size"]:
        return f"engram_pad_token_id is {text['engram_pad_token_id']} with {text['vocab_size']} ids"
    if text["engram_compressed_vocab_size"] < 1:
        return f"engram_compressed_vocab_size is {text['engram_compressed_vocab_size']}"
    return None


def _drafts(text: Text) -> str | None:
    if not text["num_nextn_predict_layers"]:
        return None
    targets = list(text["dspark_target_layer_ids"])
    if not targets or any(not 0 <= i < text["num_hidden_layers"] for i in targets):
        return f"dspark_target_layer_ids is {targets} with {text['num_hidden_layers']} layers"
    if text["dspark_block_size"] < 1 or text["dspark_markov_rank"] < 1:
        return f"block size {text['dspark_block_size']}, Markov rank {text['dspark_markov_rank']}"
    if not 0 <= text["dspark_noise_token_id"] < text["vocab_size"]:
        return f"dspark_noise_token_id is {text['dspark_noise_token_id']}"
    return None


_RULES: tuple[tuple[str, Callable[[Text], str | None]], ...] = (
    ("one compression ratio for each backbone and draft layer, 0 for drafts", _ratio_count),
    ("source layer lists are strictly increasing layer numbers", _increasing),
    ("every KV source is an index source", _kv_in_index),
    ("no source layer has ratio 0", _sources_compress),
    ("every compressed layer has a KV source of its own ratio at or before it", _owners),
    ("the candidate source is -1 or a KV source of its users' ratio", _candidate_source),
    ("(candidate_topk_blocks - 1) x candidate_block_size + 1 >= index_topk", _candidate_capacity),
    ("num_attention_heads is a multiple of o_groups", _heads),
    ("hyper-connections normalise their mix at least once", _sinkhorn),
    ("qk_rope_head_dim is even and fits the attention and index heads", _rope),
    ("experts per token are between 1 and the number of experts", _experts),
    ("Engram layers are backbone layers with one table size each and a padding id", _engram),
    ("draft layers read taps of backbone layers and have a block and a noise id", _drafts),
)


def schedule_violations(text: Text) -> list[tuple[str, str | None]]:
    """Checks every rule of model.md §1.3 on `text_config` values (defaults filled in).

    Returns:
        One (rule, reason) per rule, in a fixed order; the reason is None when the rule holds. A rule that cannot be
        judged because an earlier one broke the lists says so.
    """
    rows: list[tuple[str, str | None]] = []
    for rule, check in _RULES:
        try:
            rows.append((rule, check(text)))
        except (IndexError, KeyError, TypeError) as error:
            rows.append((rule, f"cannot be judged: {type(error).__name__} {error}"))
    return rows
