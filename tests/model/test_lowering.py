"""The programs lower for GPU and TPU on a machine that has neither, in every precision (issue 2 d)."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from deepinfer_jax import Params, draft, forward, init_cache, load_config
from deepinfer_jax.checkpoint.folder import CheckpointFolder
from deepinfer_jax.checkpoint.leaves import Leaf, build_leaf, leaf_form
from deepinfer_jax.weights.layout import ParamSpec, layout
from tests.support.golden import MODES
from tests.support.marks import slow
from tests.support.paths import GOLDEN_A

pytestmark = pytest.mark.real

BATCH, PROMPT = 2, 6


def abstract_params(folder: Path, precision: str, platform: str) -> Params:
    """Shapes and dtypes of the parameters as `load_params` puts them on devices of a platform."""
    config, files = load_config(folder), CheckpointFolder(folder)

    def leaf(spec: ParamSpec) -> Leaf:
        return build_leaf(
            spec,
            leaf_form(spec, precision, platform),
            files,
            lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype),  # type: ignore[arg-type, return-value]
        )

    params: Params = jax.tree.map(leaf, layout(config))
    token_map = jax.ShapeDtypeStruct((config.text.vocab_size,), jnp.int32)
    return dataclasses.replace(params, token_map=token_map, precision=precision)  # type: ignore[arg-type]


def generate(params: Params, tokens: jax.Array, lengths: jax.Array, roles: jax.Array, images: jax.Array) -> jax.Array:
    """A prefill with images, one decode step and a draft: every path of the forward pass in one program."""
    config, precision = load_config(GOLDEN_A), params.precision
    cache = init_cache(config, BATCH, 2 * PROMPT, precision=precision)
    first = forward(
        params,
        config,
        tokens,
        cache=cache,
        lengths=lengths,
        token_types=roles,
        image_embeds=images,
        precision=precision,
    )
    assert first.logits is not None and first.cache is not None
    step = forward(params, config, jnp.argmax(first.logits[:, -1:], -1), cache=first.cache, precision=precision)
    assert step.logits is not None and step.cache is not None
    return draft(params, config, step.cache, jnp.argmax(step.logits[:, -1], -1), precision=precision).tokens


@pytest.mark.parametrize(
    ("precision", "stored_for"),
    # The float32 precisions hold float32 on every platform.
    [
        *((precision, "cpu") if precision == "reference" else slow(precision, "cpu") for precision in MODES),
        ("reference", "gpu"),
        slow("bf16", "gpu"),
    ],
)
def test_prefill_decode_and_draft_lower_for_cuda_and_tpu(precision: str, stored_for: str) -> None:
    """With parameters as on a CPU (decoded once) and as on an accelerator (in storage format)."""
    config = load_config(GOLDEN_A)
    integers = jax.ShapeDtypeStruct((BATCH, PROMPT), jnp.int32)
    traced = jax.jit(generate).trace(
        abstract_params(GOLDEN_A, precision, stored_for),
        integers,
        jax.ShapeDtypeStruct((BATCH,), jnp.int32),
        integers,
        jax.ShapeDtypeStruct((3, config.text.hidden_size), jnp.float32),
    )
    for platform in ("cuda", "tpu"):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert text.count("stablehlo.dot_general") > 10 * config.text.num_hidden_layers
        # bf16 products go to the matrix units as they are; on a CPU they would have been widened.
        narrow = [line for line in text.splitlines() if "dot_general" in line and "bf16" in line]
        assert bool(narrow) == (precision in ("reference", "bf16")), platform
        assert "f64" not in text
