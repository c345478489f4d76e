"""The programs of the forward pass name the stages of model.md, so that a profile reads like it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import draft, encode_image, forward, init_cache
from tests.support.small_model import small_config, small_params

pytestmark = [pytest.mark.toy, pytest.mark.unoptimised]

PRECISION = "float32_exact"
INTEGERS = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)


def _forward(params: Any, cache: Any, tokens: Any, roles: Any, images: Any) -> Any:
    options = {"cache": cache, "token_types": roles, "image_embeds": images}
    return forward(params, small_config(), tokens, precision=PRECISION, **options)


def _draft(params: Any, cache: Any, tokens: Any) -> Any:
    return draft(params, small_config(), cache, tokens, precision=PRECISION)


def _encode(params: Any, patches: Any) -> Any:
    return encode_image(params, small_config(), patches, 6, 9, precision=PRECISION)


ATTENTION = {f"attention.{stage}" for stage in ("query", "window", "sparse", "output")}
EXPERTS = {f"moe.{stage}" for stage in ("router", "experts", "shared")}
STAGES = {
    _forward: {"embed", "engram", "hc_mix", "attention.compress", "attention.index", "head", "draft", "layers.0"}
    | ATTENTION
    | EXPERTS,
    _draft: {"draft", "embed", "hc_mix", "mtp.0"} | ATTENTION | EXPERTS,
    _encode: {"vision", "vision.blocks.0"},
}


def scopes(lowered: Any) -> set[str]:
    """Every part of every operation's path, e.g. "jit(_forward)/layers.0/moe.router/dot_general"."""
    text = lowered.as_text(debug_info=True)
    paths = [part for part in text.split('"') if "/" in part]
    return {name for path in paths for name in path.split("/")}


@pytest.mark.parametrize("function", STAGES, ids=lambda function: function.__name__)
def test_every_stage_has_its_name_in_the_program(function: Any) -> None:
    config = small_config()
    params = small_params(PRECISION)
    cache = jax.eval_shape(lambda: init_cache(config, 2, 32, precision=PRECISION))
    images = jax.ShapeDtypeStruct((3, config.text.hidden_size), np.float32)
    patches = jax.ShapeDtypeStruct((54, 3 * config.vision.patch_size**2), np.float32)
    arguments = {
        _forward: (cache, INTEGERS((2, 20)), INTEGERS((2, 20)), images),
        _draft: (cache, INTEGERS((2,))),
        _encode: (patches,),
    }[function]
    assert STAGES[function] - scopes(jax.jit(function).lower(params, *arguments)) == set()
