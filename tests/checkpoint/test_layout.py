"""layout.py reproduces the published inventory of the release from the configuration alone (model.md §2.1)."""

import json
from collections import Counter

import jax
import pytest

from deepinfer_jax.checkpoint.init import init_params
from deepinfer_jax.checkpoint.safetensors import read_header
from deepinfer_jax.checkpoint.tiny_config import TINY
from deepinfer_jax.config.model_config import ModelConfig, load_config, parse_config
from deepinfer_jax.weights.layout import param_specs, released_tensors
from tests.support.paths import GOLDEN, RELEASED_CONFIG

pytestmark = pytest.mark.pure


@pytest.fixture(scope="module")
def released() -> ModelConfig:
    return parse_config(json.loads(RELEASED_CONFIG.read_text()))


def test_the_release_has_96085_tensors_and_510286023000_bytes(released: ModelConfig) -> None:
    tensors = list(released_tensors(released))
    assert len(tensors) == len({tensor.name for tensor in tensors}) == 96_085
    assert sum(tensor.nbytes for tensor in tensors) == 510_286_023_000
    assert Counter(tensor.dtype for tensor in tensors) == {
        "BF16": 520,
        "F32": 387,
        "F8_E4M3": 357,
        "F8_E8M0": 47_589,
        "I8": 47_232,
    }


def test_the_release_s_parts_have_the_published_bytes(released: ModelConfig) -> None:
    def part(name: str) -> str:
        if name.startswith("mtp."):
            return "mtp"
        if name.startswith(("vision.", "aligner.", "image_")):
            return "vision"
        return "experts" if ".ffn.experts." in name else "tables" if ".engram.embed." in name else "resident"

    sizes: Counter[str] = Counter()
    for tensor in released_tensors(released):
        sizes[part(tensor.name)] += tensor.nbytes
    assert sizes == {
        "resident": 9_846_748_608,
        "experts": 288_777_830_400,
        "tables": 202_758_032_400,
        "vision": 970_536_960,
        "mtp": 7_932_874_632,
    }


def test_the_released_parameter_tree_is_abstract(released: ModelConfig) -> None:
    """500 GB of parameters are described, not made; and axes and shapes agree in every one of them."""
    tree = jax.eval_shape(lambda key: init_params(released, key), jax.random.key(0))
    assert tree.layers[39].ffn.experts.w1.codes.shape == (384, 2304, 2560)
    for spec in param_specs(released):
        assert len(spec.axes) == len(spec.full_shape), spec.names[0]


def test_tiny_has_642_tensors_and_1562058_bytes() -> None:
    tensors = list(released_tensors(parse_config(TINY)))
    assert (len(tensors), sum(tensor.nbytes for tensor in tensors)) == (642, 1_562_058)
    histogram = Counter(tensor.dtype for tensor in tensors)
    assert histogram == {"BF16": 90, "F32": 72, "F8_E4M3": 72, "F8_E8M0": 240, "I8": 168}


@pytest.mark.parametrize("folder", ["A_s28", "B_s15", "A_s28/bf16"])
def test_the_golden_files_hold_exactly_the_declared_tensors(folder: str) -> None:
    path = GOLDEN / folder
    stored = read_header(path / "model.safetensors")
    declared = {tensor.name: (tensor.dtype, tensor.shape) for tensor in released_tensors(load_config(path))}
    assert declared == {name: (entry.dtype, entry.shape) for name, entry in stored.items()}
