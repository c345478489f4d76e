"""`SamplingParams`: DeepInfer's defaults and limits, and a sentence for everything else."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest

from deepinfer_jax.engine.requests.sampling_params import SamplingParams

pytestmark = pytest.mark.pure


def test_defaults_are_deepinfers() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.ignore_eos) == (1.0, 1.0, -1, False)
    assert (params.max_tokens, params.top_logprobs, params.prompt_logprobs, params.eos_id) == (16, 0, False, 0)
    assert params.seq_seed is params.so_args is params.golden_token_ids is None
    assert not params.greedy


@pytest.mark.parametrize("temperature", [0, 0.0, 9e-6, np.float32(0)])
def test_a_tiny_temperature_is_greedy_and_switches_the_filters_off(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_p=0.5, top_k=3)
    assert params.greedy
    assert (params.temperature, params.top_p, params.top_k) == (1e-5, 1.0, -1)


def test_the_smallest_sampling_temperature_samples() -> None:
    assert not SamplingParams(temperature=1.01e-5).greedy
    assert not SamplingParams(temperature=1e-5, top_p=0.5).greedy


def test_a_copy_with_changes_stays_greedy_unless_its_temperature_changes() -> None:
    params = SamplingParams(temperature=0, max_tokens=3)
    for copied in (
        dataclasses.replace(params, max_tokens=5),
        copy.deepcopy(params),
        pickle.loads(pickle.dumps(params)),
    ):
        assert copied.greedy
    assert not dataclasses.replace(params, temperature=0.5).greedy


def test_values_at_the_limits_are_taken() -> None:
    params = SamplingParams(max_tokens=0, top_k=2**31 - 1, top_p=1, top_logprobs=1000, seq_seed=-1)
    assert (params.max_tokens, params.seq_seed) == (1, 2**64 - 1)
    assert SamplingParams(max_tokens=np.int64(5), seq_seed=2**64 + 3).seq_seed == 3
    flags = SamplingParams(ignore_eos=np.bool_(True), prompt_logprobs=1)  # type: ignore[arg-type]
    assert flags.ignore_eos is flags.prompt_logprobs is True


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", -0.1),
        ("temperature", 1e39),  # float32 infinity on the device: every logit would become 0 or NaN
        ("temperature", 10**400),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("top_k", 0),
        ("top_k", -2),
        ("top_k", 2**31),
        ("max_tokens", -1),
        ("max_tokens", 2**31),
        ("top_logprobs", -1),
        ("top_logprobs", 1001),
        ("so_args", {"json": {}}),
        ("golden_token_ids", [5, -2]),
        ("min_p", -0.1),
        ("min_p", float("nan")),
        ("presence_penalty", 2.1),
        ("frequency_penalty", float("nan")),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("logit_bias", {5: 101.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {5: 1.0, "5": 2.0}),
        ("logit_bias", dict.fromkeys(range(301), 1.0)),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", "\ufffd"),
        ("stop_token_ids", [-1]),
        ("min_tokens", -1),
        ("min_tokens", 17),  # above max_tokens
        ("n", 0),
        ("logprobs_mode", "raw_logits"),
        ("golden_token_ids", [2**70]),
    ],
)
def test_values_beyond_the_limits_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    # Filters are checked before greedy switches them off.
    if field.startswith("top_"):
        with pytest.raises(ValueError, match=field):
            SamplingParams(temperature=0, **{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("max_tokens", 2.0), ("top_k", "5"), ("seq_seed", 1.5), ("temperature", "0.5"), ("top_p", None)],
        *[("temperature", b"1"), ("ignore_eos", "no"), ("ignore_eos", None), ("prompt_logprobs", 5)],
        *[("prompt_logprobs", np.asarray([1, 2])), ("prompt_logprobs", [])],
        *[("logit_bias", [1]), ("logit_bias", {"x": 1.0}), ("logit_bias", {5: "1"}), ("stop", 5), ("stop", ["a", 5])],
        *[("stop_token_ids", ["5"]), ("stop_token_ids", 0), ("logit_bias", 0), ("logit_bias", np.arange(2))],
        *[("n", 1.5), ("min_tokens", "1"), ("min_p", "0.1")],
    ],
)
def test_values_of_another_type_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(TypeError, match=field):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


def test_golden_tokens_force_by_output_index() -> None:
    params = SamplingParams(golden_token_ids=[7, -1])
    assert [params.forced_token(i) for i in range(4)] == [7, -1, -1, -1]


def test_new_fields_take_what_they_allow() -> None:
    params = SamplingParams(
        temperature=0,
        min_p=0.5,
        logit_bias={"7": 1, np.int64(8): -100},
        stop="ab",
        stop_token_ids=np.asarray([3, 4]),
        n=2,
    )
    assert (params.logit_bias, params.stop, params.stop_token_ids) == ({7: 1.0, 8: -100.0}, ["ab"], [3, 4])
    assert params.min_p == 0  # greedy
    assert dataclasses.replace(params) == params
    assert SamplingParams(stop=[], stop_token_ids=[], logit_bias={}) == SamplingParams()


def test_edits_are_biases_and_the_bans_of_what_would_stop_it() -> None:
    forever = 2**31 - 1
    assert SamplingParams(eos_id=1).edits(10) == []
    assert SamplingParams(eos_id=1, min_tokens=3, stop_token_ids=[9]).edits(10) == [(1, -np.inf, 13), (9, -np.inf, 13)]
    assert SamplingParams(eos_id=1, min_tokens=3, ignore_eos=True).edits(10) == []
    assert SamplingParams(eos_id=1, first_n_token_no_eos=1, logit_bias={5: 2}).edits(10) == [
        (5, 2.0, forever),
        (1, -np.inf, 11),
    ]
    most = {"logit_bias": dict.fromkeys(range(300), 1.0), "min_tokens": 1}
    assert len(SamplingParams(stop_token_ids=list(range(1, 20)), **most).edits(0)) == 320  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="makes 321 changes of logits; at most 320"):
        SamplingParams(stop_token_ids=list(range(1, 21)), **most)  # type: ignore[arg-type]
