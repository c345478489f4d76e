"""The forward pass against the model authors' outputs, from token ids to logits (tests/golden/README.md)."""

import numpy as np
import pytest

from tests.support.golden import LOGIT_TOLERANCE, STREAM_TOLERANCE, Case, model, same_picks, visible_entries, worst
from tests.support.replay import cache_array, replay

pytestmark = pytest.mark.real

EXACT = [Case("A_s28", name, "f32nq") for name in ("short", "long", "inc", "img")] + [Case("B_s15", "blong", "f32nq")]
# The cases in which no value lies so near the edge of a quantiser's bin that summation order moves it (README).
ROUNDED = [Case("A_s28", "short", "f32"), Case("B_s15", "blong", "f32")]
CASES = EXACT + ROUNDED


def parametrize(cases: list[Case]) -> pytest.MarkDecorator:
    slow = [pytest.mark.slow]  # B's programs in a second precision; A's at a second length and with images
    return pytest.mark.parametrize(
        "case", [pytest.param(c, marks=slow if c in (EXACT[1], EXACT[3], ROUNDED[1]) else [], id=str(c)) for c in cases]
    )


every_case = parametrize(CASES)
decoded_case = parametrize([case for case in CASES if case.steps])
full_case = parametrize([case for case in CASES if case.has("L0/out")])


def points(case: Case) -> list[int | None]:
    """The prefill (None), then every decode step."""
    return [None, *range(case.steps)]


@every_case
def test_logits_are_the_golden_ones_at_every_position(case: Case) -> None:
    run = replay(case)
    for step in points(case):
        assert worst(run.get("logits", step), case.get("logits", step)) < LOGIT_TOLERANCE, step


@every_case
def test_every_expert_and_entry_is_picked_as_in_the_golden_data(case: Case) -> None:
    run = replay(case)
    for step in points(case):
        for layer, key, wanted in case.layer_arrays(step):
            if key == "router_idx":
                assert np.array_equal(run.get(f"L{layer}/{key}", step), wanted), (step, layer)
            if key == "index_picks":
                assert same_picks(run.get(f"L{layer}/{key}", step), wanted), (step, layer)


@every_case
def test_every_engram_row_is_the_golden_one(case: Case) -> None:
    run = replay(case)
    for step in points(case):
        assert np.array_equal(run.get("engram_ids", step), case.get("engram_ids", step)), step


@every_case
def test_candidate_blocks_are_the_golden_ones_wherever_entries_are_visible(case: Case) -> None:
    config, _ = model(case.folder, "float32_exact")
    run, source = replay(case), config.text.candidate_source_layer_id
    for step in points(case):
        wanted = case.get(f"L{source}/candidates", step)
        found = run.get(f"L{source}/candidates", step)[..., : wanted.shape[-1]]
        positions = np.arange(case.prefill_length) if step is None else np.array([case.prefill_length + step])
        visible = np.arange(wanted.shape[-1]) < visible_entries(config, source, positions)[:, None]
        assert np.array_equal(found & visible, wanted & visible), step


@every_case
def test_tensors_along_the_way_are_the_golden_ones(case: Case) -> None:
    run = replay(case)
    for step in points(case):
        for key in ("embed", "main_hidden", "final_norm"):
            assert worst(run.get(key, step), case.get(key, step)) < STREAM_TOLERANCE, (step, key)
        for layer, key, wanted in case.layer_arrays(step):
            found = run.get(f"L{layer}/{key}", step)
            if key == "index_scores":
                found = found[..., : wanted.shape[-1]]
                assert np.array_equal(np.isneginf(found), np.isneginf(wanted)), (step, layer)
                found, wanted = (np.where(np.isneginf(wanted), 0, scores) for scores in (found, wanted))
            if key not in ("index_picks", "candidates", "router_idx"):
                assert worst(found, wanted) < STREAM_TOLERANCE, (step, layer, key)


@decoded_case
def test_drafts_are_the_golden_ones_after_every_step(case: Case) -> None:
    run = replay(case)
    assert len(run.drafts) == case.steps
    for step, drafted in enumerate(run.drafts):
        assert np.array_equal(drafted.tokens, case.get("spec_ids", step)[:, 1:]), step
        assert worst(drafted.logits, case.get("spec_logits", step)) < LOGIT_TOLERANCE, step
        assert worst(drafted.confidence, case.get("spec_conf", step)) < STREAM_TOLERANCE, step


@full_case
def test_caches_hold_the_golden_contents_and_nothing_else(case: Case) -> None:
    config, _ = model(case.folder, "float32_exact")
    run = replay(case)
    for place, cache in (("prefill/cache", run.after_prefill), ("decode_end", run.at_end)):
        for layer in range(config.text.num_hidden_layers):
            for key in ("window_kv", "compress_kv", "index_k"):
                wanted = case.arrays.get(f"{place}/L{layer}/{key}")
                if wanted is not None:
                    found = cache_array(cache, config, layer, key)
                    assert worst(found[:, : wanted.shape[1]], wanted) < STREAM_TOLERANCE, (place, layer, key)
                    assert not found[:, wanted.shape[1] :].any(), (place, layer, key)
    assert (np.asarray(run.at_end.lengths) == case.tokens.shape[1]).all()


@pytest.mark.parametrize("mode", ["fp8", pytest.param("bf16", marks=pytest.mark.slow)])
def test_the_first_layer_is_bit_identical_in_the_low_precisions(mode: str) -> None:
    """The whole program rounds where the reference does; later layers amplify the first flip.

    Measured on A short: fp8 has no flip in three layers and 0.02 % in the fourth's streams, bf16 0.02 % in the first's.
    With plain casts in place of `round_to`, XLA leaves roundings out: 28 % and 66 % of the FFN outputs differ.
    """
    case = Case("A_s28", "short", mode)
    run = replay(case)
    for key in ("attn_in", "attn_out", "ffn_out", "out"):
        assert (run.get(f"L0/{key}") != case.get(f"L0/{key}")).mean() < 1e-3, key
    assert np.array_equal(run.get("L0/router_idx"), case.get("L0/router_idx"))
