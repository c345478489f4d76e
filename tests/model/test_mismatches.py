"""Arguments that do not belong together, and configurations that would run wrongly, are refused with a sentence."""

import copy
import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from deepinfer_jax import draft, forward, init_cache, init_params
from deepinfer_jax.checkpoint.tiny_config import TINY
from deepinfer_jax.config.model_config import ModelConfig, parse_config

pytestmark = pytest.mark.real

TOKENS = np.array([[1, 2, 3]])


def tiny(**text: Any) -> ModelConfig:
    document = copy.deepcopy(TINY)
    document["text_config"] |= text
    return parse_config(document)


def abstract_params(config: ModelConfig) -> Any:
    """Parameters of the right shapes without values: refusals come before anything is computed."""
    return jax.eval_shape(lambda key: init_params(config, key, precision="float32_exact"), jax.random.key(0))


def altered(**text: Any) -> ModelConfig:
    return dataclasses.replace(tiny(), text=dataclasses.replace(tiny().text, **text))


@pytest.mark.parametrize(
    "other", [{"vocab_size": 1024}, {"hidden_size": 128}, {"num_hidden_layers": 5}, {"num_nextn_predict_layers": 1}]
)
def test_parameters_of_another_model_are_refused(other: dict[str, int]) -> None:
    params = abstract_params(tiny())
    with pytest.raises(ValueError, match="the parameters and the configuration belong to different models"):
        forward(params, altered(**other), TOKENS, precision="float32_exact")


@pytest.mark.parametrize("other", [{"sliding_window": 9}, {"head_dim": 32}, {"kv_source_layer_ids": (1,)}])
def test_a_cache_of_another_model_is_refused(other: dict[str, Any]) -> None:
    params = abstract_params(tiny())
    cache = init_cache(altered(**other), 1, 8, precision="float32_exact")
    with pytest.raises(ValueError, match="the cache and the configuration belong to different models"):
        forward(params, tiny(), TOKENS, cache=cache, precision="float32_exact")
    with pytest.raises(ValueError, match="the cache and the configuration belong to different models"):
        draft(params, tiny(), cache, TOKENS[:, 0], precision="float32_exact")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ({"engram_pad_token_id": 512}, "engram_pad_token_id is 512 with 512 ids"),
        ({"engram_pad_token_id": -1}, "engram_pad_token_id is -1"),
        ({"hc_sinkhorn_iters": 0}, "hc_sinkhorn_iters is 0"),
    ],
)
def test_configurations_that_would_be_clamped_silently_are_refused(text: dict[str, int], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        tiny(**text)
