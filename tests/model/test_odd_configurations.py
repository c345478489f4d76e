"""Schedules and sizes that no golden folder has: prefill, chunks and decode agree (model.md §5.10, T40).

Nothing of the two golden configurations may be baked into the model. Four rows of different lengths go through one
padded prefill, through padded chunks of three, and token by token; in float32_exact only the order of fp32 sums may
differ between the three.
"""

import copy
import dataclasses
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
import pytest

from deepinfer_jax import ModelConfig, draft, forward, init_cache, init_params
from deepinfer_jax.checkpoint.tiny_config import TINY
from deepinfer_jax.config.model_config import parse_config
from deepinfer_jax.tokenization import engram_primes
from tests.support.golden import same_picks, worst

pytestmark = [pytest.mark.real, pytest.mark.unoptimised]

Array = npt.NDArray[Any]

# What the golden figures allow to another order of the same fp32 sums (golden README: 5.5e-6 in chunks), with room
# for logits that leave unit size.
TOLERANCE = 3e-5
NO_ENGRAM: dict[str, Any] = {"engram_layer_ids": [], "engram_num_embeddings": []}


def odd_config(*, drafts: int = 0, vision: bool = False, **text: Any) -> ModelConfig:
    """TINY of model.md §14 with other values in `text_config`; the Engram table sizes follow from the primes."""
    document = copy.deepcopy(TINY)
    values = document["text_config"]
    values |= text
    ratios = values["compress_ratios"]
    values |= {
        "num_hidden_layers": len(ratios),
        "compress_ratios": [*ratios, *[0] * drafts],
        "num_nextn_predict_layers": drafts,
        "dspark_target_layer_ids": values["dspark_target_layer_ids"] if drafts else [],
    }
    if values["engram_layer_ids"]:
        primes = engram_primes(
            values["engram_layer_ids"],
            values["engram_vocab_size"],
            values["engram_max_ngram_size"],
            values["engram_n_heads"],
        )
        values["engram_num_embeddings"] = primes.sum(axis=(1, 2)).tolist()
    if not vision:
        document["vision_config"] = None
    return parse_config(document)


@dataclasses.dataclass(frozen=True)
class Odd:
    """One configuration: the changes to TINY, and the rows' longest length."""

    text: dict[str, Any]
    drafts: int = 0
    longest: int = 14


def sources(kv: list[int], index: list[int], candidates: int = -1) -> dict[str, Any]:
    return {
        "kv_source_layer_ids": kv,
        "index_source_layer_ids": index,
        "candidate_source_layer_id": candidates,
    }


CASES = {
    "no compressed layer at all, window of one": Odd(
        {"compress_ratios": [0, 0], "sliding_window": 1, "dspark_target_layer_ids": [1, 0]}
        | NO_ENGRAM
        | sources([], []),
        drafts=1,
    ),
    "ratios 4 and 3, no candidates": Odd({"compress_ratios": [4, 3]} | NO_ENGRAM | sources([0, 1], [0, 1])),
    "top-1 router, Engram with 2-grams and three heads first and last": Odd(
        {
            "compress_ratios": [2, 1],
            "num_experts_per_tok": 1,
            "engram_layer_ids": [0, 1],
            "engram_max_ngram_size": 2,
            "engram_n_heads": 3,
        }
        | sources([0, 1], [0, 1])
    ),
    "one expert, one output group, two streams, one Sinkhorn round": Odd(
        {
            "compress_ratios": [1],
            "n_routed_experts": 1,
            "num_experts_per_tok": 1,
            "o_groups": 1,
            "hc_mult": 2,
            "hc_sinkhorn_iters": 1,
        }
        | NO_ENGRAM
        | sources([0], [0])
    ),
    "reindex at ratio 2, then another source under its candidates": Odd(
        {"compress_ratios": [2, 2, 2], "index_topk": 3, "candidate_topk_blocks": 2, "candidate_block_size": 2}
        | NO_ENGRAM
        | sources([0, 2], [0, 1, 2], candidates=0),
        longest=25,
    ),
    "candidate blocks of one entry, one pick": Odd(
        {"compress_ratios": [1, 1], "index_topk": 1, "candidate_topk_blocks": 1, "candidate_block_size": 1}
        | NO_ENGRAM
        | sources([0], [0, 1], candidates=0)
    ),
    "every channel rotates, no YaRN, more picks than entries": Odd(
        {
            "compress_ratios": [1, 2],
            "head_dim": 32,
            "qk_rope_head_dim": 32,
            "rope_scaling": None,
            "index_topk": 512,
            "max_position_embeddings": 8,
            "vocab_size": 517,
        }
        | NO_ENGRAM
        | sources([0, 1], [0, 1])
    ),
    "released window and a prompt of five windows": Odd(
        {
            "compress_ratios": [0, 2, 1, 1],
            "sliding_window": 128,
            "engram_layer_ids": [3],
            "dspark_target_layer_ids": [3, 1],
        }
        | sources([1, 2], [1, 2, 3], candidates=2),
        drafts=1,
        longest=640,
    ),
}
SLOW = {
    "top-1 router, Engram with 2-grams and three heads first and last",
    "one expert, one output group, two streams, one Sinkhorn round",
    "candidate blocks of one entry, one pick",
    "every channel rotates, no YaRN, more picks than entries",
    "reindex at ratio 2, then another source under its candidates",
    "released window and a prompt of five windows",
    "ratios 4 and 3, no candidates",
}


@dataclasses.dataclass
class Run:
    """What a way of feeding gave at each position, and the draft after the last token."""

    logits: Array
    picks: dict[str, Array]
    drafts: Array | None


def capture_of(config: ModelConfig) -> tuple[str, ...]:
    picks = ("layers.*.index_picks",) if config.text.index_source_layer_ids else ()
    return ("layers.*.expert_ids", *picks)


def run(config: ModelConfig, params: Any, tokens: Array, lengths: Array, widths: list[int]) -> Run:
    """Feeds the rows in calls of the given widths, each row as far as its length goes."""
    rows, longest = tokens.shape
    cache = init_cache(config, rows, longest, precision="float32_exact")
    logits = np.zeros((rows, longest, config.text.vocab_size), np.float32)
    picks: dict[str, Array] = {}
    done = 0
    for width in widths:
        new = np.clip(lengths - done, 0, width)
        columns = np.minimum(done + np.arange(width), longest - 1)
        out = forward(
            params,
            config,
            tokens[:, columns],
            cache=cache,
            lengths=new,
            precision="float32_exact",
            capture=capture_of(config),
        )
        assert out.cache is not None and out.logits is not None
        cache = out.cache
        row, time = np.nonzero(np.arange(width) < new[:, None])
        logits[row, done + time] = np.asarray(out.logits)[row, time]
        for name, value in out.captured.items():
            kept = picks.setdefault(name, np.full((rows, longest, value.shape[-1]), -1, np.int32))
            kept[row, done + time] = np.asarray(value)[row, time]
        done += width
    drafts = None
    if config.text.num_nextn_predict_layers:
        drafts = np.asarray(draft(params, config, cache, tokens[:, 0], precision="float32_exact").logits)
    return Run(logits, picks, drafts)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in CASES]
)
def test_prefill_chunks_and_decode_agree(name: str) -> None:
    case = CASES[name]
    config = odd_config(drafts=case.drafts, **case.text)
    params = init_params(config, jax.random.key(3), precision="float32_exact")
    longest = case.longest
    lengths = np.array([longest, longest - 1, 5, 1])
    tokens = np.random.default_rng(7).integers(0, config.text.vocab_size, (4, longest))
    whole = run(config, params, tokens, lengths, [longest])
    assert whole.logits.std() > 0.1  # else agreement says little
    # Five windows of single tokens would take minutes: the long prompt decodes its last 20 only.
    singles = min(longest, 20)
    ways = {
        "chunks": run(config, params, tokens, lengths, [3] * -(-longest // 3) if longest < 100 else [100] * 7),
        "decode": run(config, params, tokens, lengths, [longest - singles] * (longest > singles) + [1] * singles),
    }
    for way, found in ways.items():
        assert worst(found.logits, whole.logits) < TOLERANCE, way
        for key, wanted in whole.picks.items():
            assert same_picks(found.picks[key], wanted), (way, key)
        if whole.drafts is not None and found.drafts is not None:
            assert worst(found.drafts, whole.drafts) < TOLERANCE, way


@pytest.mark.parametrize("ratio", [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_one_token_without_a_cache_is_the_first_of_a_prefill(ratio: int) -> None:
    """Above ratio 1 there is room for no entry at all: index scores, picks and candidates have width 0."""
    config = odd_config(compress_ratios=[ratio, ratio], **NO_ENGRAM, **sources([0], [0, 1], candidates=0))
    params = init_params(config, jax.random.key(3), precision="float32_exact")
    alone = forward(params, config, np.array([[5]]), precision="float32_exact", capture="*index_picks")
    first = forward(params, config, np.array([[5, 9, 2, 7]]), precision="float32_exact")
    assert alone.logits is not None and first.logits is not None
    assert worst(alone.logits[0, 0], first.logits[0, 0]) < TOLERANCE
    assert alone.captured["layers.0.attention.index_picks"].shape == (1, 1, 1 if ratio == 1 else 0)
