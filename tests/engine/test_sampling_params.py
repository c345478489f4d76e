"""`SamplingParams`: DeepInfer's defaults and limits, and a sentence for everything else."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest

from deepinfer_jax.engine.sampling_params import SamplingParams


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
    ],
)
def test_values_of_another_type_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(TypeError, match=field):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


def test_golden_tokens_force_by_output_index() -> None:
    params = SamplingParams(golden_token_ids=[7, -1])
    assert [params.forced_token(i) for i in range(4)] == [7, -1, -1, -1]
