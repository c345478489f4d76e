"""The comments in weights/params.py say what `init_params` makes: every leaf's shape and storage format."""

import copy
import dataclasses
import functools
import inspect
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from deepinfer_jax import ModelConfig, Params, init_params
from deepinfer_jax.checkpoint.tiny_config import TINY
from deepinfer_jax.config.model_config import parse_config
from deepinfer_jax.weights import params as params_module
from deepinfer_jax.weights.params import Fp4Weight, Fp8Rows, Fp8Weight

pytestmark = pytest.mark.pure

CONFIG = parse_config(copy.deepcopy(TINY))
Form = tuple[str, str]  # shape, storage format
Leaf = tuple[str, Form, dict[str, int], Any]  # path, what its comment says, sizes of the axes, what it is


@functools.cache
def commented(kind: type) -> dict[str, list[Form]]:
    """What the comments of a class say of its leaves; of experts, first the routed ones, then the shared."""
    lines = re.findall(r"^    (\w+): .*?# (\[.*)$", inspect.getsource(kind), re.MULTILINE)
    return {name: re.findall(r"\[([^\]]+)\] (\w+)", comment) for name, comment in lines}


def sizes_of(config: ModelConfig) -> dict[str, int]:
    text, vision = config.text, config.vision
    return {
        "hc": text.hc_mult,
        "hidden": text.hidden_size,
        "head_dim": text.head_dim,
        "heads": text.num_attention_heads,
        "q_lora": text.q_lora_rank,
        "o_lora": text.o_lora_rank,
        "o_groups": text.o_groups,
        "index_heads": text.index_n_heads,
        "index_dim": text.index_head_dim,
        "experts": text.n_routed_experts,
        "intermediate": text.moe_intermediate_size,
        "ngram": text.engram_max_ngram_size,
        "engram_heads": text.engram_n_heads,
        "engram_dim": text.engram_head_dim,
        "targets": len(text.dspark_target_layer_ids),
        "rank": text.dspark_markov_rank,
        "vocab": text.vocab_size,
        "tokens": text.vocab_size,  # `init_params` maps every id of the vocabulary
        "vit": vision.hidden_size,
        "vit_ffn": vision.intermediate_size,
        "patch": vision.patch_size,
        "downsample": vision.downsample_ratio,
    }


def leaves(node: Any, path: str, sizes: dict[str, int]) -> list[Leaf]:
    """Every leaf below a node of the tree; each array must be either a child class, a tuple of them, or commented."""
    comments, found = commented(type(node)), []
    for field in dataclasses.fields(node):
        value, own = getattr(node, field.name), f"{path}.{field.name}"
        if field.name in comments:
            forms = comments[field.name]
            form = forms[-1] if ".shared_experts." in own else forms[0]
            found += [] if value is None else [(own, form, sizes, value)]
        elif isinstance(value, tuple):
            for index, child in enumerate(value):
                found += leaves(child, f"{own}.{index}", sizes | rows_of(own, index))
        elif type(value).__module__ == params_module.__name__:
            experts = CONFIG.text.dspark_n_routed_experts if field.name == "draft" else sizes["experts"]
            found += leaves(value, own, sizes | {"experts": experts})
        else:
            assert field.name in ("precision", "mesh") or value is None, f"{own} has no comment"
    return found


def rows_of(path: str, layer: int) -> dict[str, int]:
    """The Engram table of a backbone layer."""
    text = CONFIG.text
    if path != "params.layers" or layer not in text.engram_layer_ids:
        return {}
    return {"rows": text.engram_num_embeddings[text.engram_layer_ids.index(layer)]}


def shape_of(shape: str, sizes: dict[str, int]) -> tuple[int, ...]:
    formulas = shape.replace("·", "*").replace("²", "**2").replace("/", "//").split(",")
    return tuple(eval(formula, {}, dict(sizes)) for formula in formulas)


@functools.cache
def all_leaves(precision: str) -> list[Leaf]:
    """As they lie on an accelerator, in storage format."""
    make = functools.partial(init_params, CONFIG, precision=precision, platform="gpu")
    params: Params = jax.eval_shape(make, jax.random.key(0))
    return leaves(params, "params", sizes_of(CONFIG))


def test_the_comments_are_about_every_leaf() -> None:
    arrays = sum(len(jax.tree.leaves(value)) for *_, value in all_leaves("reference"))
    params = jax.eval_shape(functools.partial(init_params, CONFIG, platform="gpu"), jax.random.key(0))
    assert arrays == len(jax.tree.leaves(params))
    assert CONFIG.quantized and CONFIG.vision.num_hidden_layers and CONFIG.text.num_nextn_predict_layers
    assert {form for _, (_, form), *_ in all_leaves("reference")} == {
        *("float32", "bfloat16", "int32", "fp8", "fp4", "fp8_rows")
    }


def test_every_leaf_has_the_shape_and_the_storage_format_of_its_comment() -> None:
    for path, (shape, form), sizes, leaf in all_leaves("reference"):
        *lead, last = wanted = shape_of(shape, sizes)
        if form == "fp8":
            assert isinstance(leaf, Fp8Weight), path
            assert (leaf.codes.shape, leaf.codes.dtype) == (wanted, jnp.float8_e4m3fn), path
            assert leaf.scales.shape == (*lead[:-1], -(-lead[-1] // 32), -(-last // 32)), path
        elif form == "fp4":
            assert isinstance(leaf, Fp4Weight), path
            assert (leaf.codes.shape, leaf.codes.dtype) == ((*lead, last // 2), jnp.uint8), path
            assert leaf.scales.shape == (*lead, last // 32), path
        elif form == "fp8_rows":
            assert isinstance(leaf, Fp8Rows), path
            assert (leaf.codes.shape, leaf.codes.dtype) == (wanted, jnp.float8_e4m3fn), path
            assert leaf.scales.shape == (*lead, last // 32), path
        else:
            assert (leaf.shape, leaf.dtype) == (wanted, form), path


@pytest.mark.parametrize("precision", ["float32", "float32_exact"])
def test_the_float32_precisions_hold_the_same_shapes_in_float32(precision: str) -> None:
    for path, (shape, form), sizes, leaf in all_leaves(precision):
        wanted = "int32" if form == "int32" else "float32"
        assert (leaf.shape, leaf.dtype) == (shape_of(shape, sizes), wanted), path
