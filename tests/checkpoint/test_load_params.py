"""checkpoint/hf.py: exact values in every precision, and every corruption refused with file and tensor."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from deepinfer_jax.checkpoint import hf
from deepinfer_jax.checkpoint.leaves import leaf_form
from deepinfer_jax.checkpoint.safetensors import SafetensorsFile, write_safetensors
from deepinfer_jax.config.model_config import PRECISIONS, load_config
from deepinfer_jax.kernels.quantized_linear import dequantize
from deepinfer_jax.weights.layout import TensorSpec, layout
from deepinfer_jax.weights.params import Fp4Weight, Fp8Rows, Fp8Weight, Params
from tests.support.paths import GOLDEN

pytestmark = pytest.mark.real

QUANTIZED = (Fp8Weight, Fp4Weight, Fp8Rows)
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def load(folder: Path, precision: str, **options: Any) -> Params:
    return hf.load_params(folder, load_config(folder), precision=precision, **options)


@jax.jit
def _dequantize(leaf: jax.Array | Fp8Weight | Fp4Weight | Fp8Rows) -> jax.Array:
    return dequantize(leaf, jnp.float32).astype(jnp.float32)


def values(params: Params) -> list[np.ndarray]:
    """Every parameter as float32, in tree order."""
    leaves = jax.tree.leaves(params.replace(token_map=None), is_leaf=lambda leaf: isinstance(leaf, QUANTIZED))
    return [np.asarray(_dequantize(leaf)) for leaf in leaves]


def independent_values(folder: Path) -> list[np.ndarray]:
    """What the files say, by Kronecker products in float64 (model.md §2.2)."""
    file = SafetensorsFile(folder / "model.safetensors")

    def tensor(name: str) -> np.ndarray:
        data = file.view(name)
        scale_name = name.removesuffix("weight") + "scale"
        if scale_name == name or scale_name not in file.entries:
            return data.astype(np.float64)
        scale = np.exp2(file.view(scale_name).view(np.uint8).astype(np.float64) - 127)
        if data.dtype == np.int8:
            nibbles = np.stack([data.view(np.uint8) & 15, data.view(np.uint8) >> 4], -1).reshape(len(data), -1)
            data = MAGNITUDES[nibbles & 7] * np.where(nibbles & 8, -1, 1)
        rows = 32 if scale.shape[0] < data.shape[0] else 1
        return data.astype(np.float64) * np.kron(scale, np.ones((rows, 32)))[: len(data)]

    specs = jax.tree.leaves(layout(load_config(folder)))
    return [np.stack([tensor(n) for n in spec.names]) if spec.stacked else tensor(spec.names[0]) for spec in specs]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("folder", ["A_s28", "B_s15"])
def test_golden_loads_with_the_exact_values_of_its_files(folder: str, precision: str) -> None:
    params = load(GOLDEN / folder, precision)
    assert params.precision == precision
    for ours, theirs in zip(values(params), independent_values(GOLDEN / folder), strict=True):
        np.testing.assert_array_equal(ours, theirs.astype(np.float32))


@pytest.mark.parametrize("precision", ["bf16", "float32_exact"])
def test_golden_dequantises_to_the_published_bf16_weights(precision: str) -> None:
    bf16 = load(GOLDEN / "A_s28" / "bf16", precision, tokenizer=GOLDEN / "A_s28")
    assert bf16.token_map is not None
    for ours, theirs in zip(values(load(GOLDEN / "A_s28", precision)), values(bf16), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_token_map_is_the_golden_one() -> None:
    for folder in ("A_s28", "B_s15"):
        params = load(GOLDEN / folder, "reference")
        golden = np.load(GOLDEN / folder / "engram_tables.npz")["token_map"]
        assert params.token_map is not None and params.token_map.dtype == jnp.int32
        np.testing.assert_array_equal(params.token_map, golden)


def test_cpu_decodes_all_but_routed_experts_and_tables() -> None:
    layer = load(GOLDEN / "A_s28", "reference").layers[1]
    assert isinstance(layer.ffn.experts.w2, Fp4Weight)
    assert layer.ffn.experts.w2.codes.dtype == jnp.uint8
    assert layer.engram is not None and isinstance(layer.engram.embed, Fp8Rows)
    for leaf in (layer.attn.wq_a, layer.attn.wo_a, layer.ffn.gate, layer.attn_norm, layer.attn.attn_sink):
        assert leaf.dtype == jnp.float32


def test_other_devices_keep_the_storage_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf, "leaf_form", lambda spec, precision, _: leaf_form(spec, precision, "gpu"))
    params = load(GOLDEN / "A_s28", "reference")
    layer = params.layers[1]
    assert isinstance(layer.attn.wq_a, Fp8Weight)
    assert (layer.attn.wq_a.codes.dtype, layer.attn.wq_a.scales.dtype) == (jnp.float8_e4m3fn, jnp.uint8)
    assert (layer.ffn.gate.dtype, layer.ffn.bias.dtype) == (jnp.bfloat16, jnp.float32)
    for ours, theirs in zip(values(params), independent_values(GOLDEN / "A_s28"), strict=True):
        np.testing.assert_array_equal(ours, theirs.astype(np.float32))


@pytest.mark.parametrize("precision", ["float32", "float32_exact"])
def test_float32_precisions_hold_float_leaves_only(precision: str) -> None:
    params = load(GOLDEN / "B_s15", precision)
    assert {leaf.dtype for leaf in jax.tree.leaves(params.replace(token_map=None))} == {np.dtype(np.float32)}


def test_parameters_do_not_alias_the_file(tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(GOLDEN / "B_s15", folder)
    before = load(folder, "reference")
    path = folder / "model.safetensors"
    path.chmod(0o644)
    with path.open("r+b") as file:  # in place: a mapped page would show it
        file.seek(path.stat().st_size // 2)
        file.write(bytes(path.stat().st_size // 2))
    for ours, theirs in zip(values(before), independent_values(GOLDEN / "B_s15"), strict=True):
        np.testing.assert_array_equal(ours, theirs.astype(np.float32))


def test_the_model_prefix_is_accepted(tmp_path: Path) -> None:
    folder = rewritten(tmp_path, "B_s15", lambda tensors: {f"model.{name}": v for name, v in tensors.items()})
    for ours, theirs in zip(values(load(folder, "bf16")), values(load(GOLDEN / "B_s15", "bf16")), strict=True):
        np.testing.assert_array_equal(ours, theirs)


Tensors = dict[str, tuple[str, np.ndarray]]


def rewritten(tmp_path: Path, source: str, edit: Callable[[Tensors], Tensors]) -> Path:
    """A copy of a golden folder with edited tensors (name -> safetensors dtype, data)."""
    folder = tmp_path / "edited"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        if (GOLDEN / source / name).is_file():
            shutil.copyfile(GOLDEN / source / name, folder / name)
    file = SafetensorsFile(GOLDEN / source / "model.safetensors")
    tensors = edit({name: (entry.dtype, file.view(name)) for name, entry in file.entries.items()})
    specs = [TensorSpec(name, dtype, data.shape) for name, (dtype, data) in tensors.items()]
    write_safetensors(folder / "model.safetensors", specs, [data for _, data in tensors.values()])
    return folder


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


def with_tensor(name: str, dtype: str, data: np.ndarray) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: (dtype, data)}


def renamed(old: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {new if name == old else name: value for name, value in tensors.items()}


E8M0 = ml_dtypes.float8_e8m0fnu
CORRUPTIONS: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "missing": (without("layers.3.attn.q_norm.weight"), r"'layers.3.attn.q_norm.weight' \(BF16 .32.\) is missing"),
    # T21: exact names. bias_vl is there and does not stand in for bias.
    "bias for bias_vl": (without("layers.3.ffn.gate.bias"), r"'layers.3.ffn.gate.bias' .* is missing"),
    "missing draft expert": (without("mtp.2.ffn.shared_experts.w2.weight"), "shared_experts.w2.weight' .* is missing"),
    "missing FP8 scale": (
        without("layers.0.attn.wkv.scale"),
        r"safetensors: tensor 'layers.0.attn.wkv.weight' is F8_E4M3, but its scale 'layers.0.attn.wkv.scale'",
    ),
    "missing FP4 scale": (
        without("mtp.0.ffn.experts.3.w2.scale"),
        r"safetensors: tensor 'mtp.0.ffn.experts.3.w2.weight' is I8, but its scale 'mtp.0.ffn.experts.3.w2.scale'",
    ),
    "surplus": (
        with_tensor("layers.0.extra", "F32", np.zeros(2, np.float32)),
        "safetensors: .*'layers.0.extra' is not",
    ),
    "surplus layer": (
        renamed("layers.0.attn_norm.weight", "layers.99.attn_norm.weight"),
        "attn_norm.weight' .* missing",
    ),
    "prefix inside": (renamed("norm.weight", "model.model.norm.weight"), "'norm.weight' .* is missing"),
    "unfolded": (
        with_tensor("layers.0.hc_attn_norm.weight", "BF16", np.zeros(2, ml_dtypes.bfloat16)),
        "'layers.0.hc_attn_norm.weight' is an unfolded hyper-connection norm",
    ),
    "wrong shape": (
        with_tensor("layers.1.attn_norm.weight", "BF16", np.zeros(63, ml_dtypes.bfloat16)),
        r"safetensors: tensor 'layers.1.attn_norm.weight' has shape .63., expected .64.",
    ),
    "transposed": (
        with_tensor("layers.1.attn.wq_a.weight", "F8_E4M3", np.zeros((64, 32), ml_dtypes.float8_e4m3fn)),
        r"'layers.1.attn.wq_a.weight' has shape .64, 32., expected .32, 64.",
    ),
    "wrong dtype": (
        with_tensor("layers.1.hc_attn_scale", "BF16", np.zeros(3, ml_dtypes.bfloat16)),
        "safetensors: tensor 'layers.1.hc_attn_scale' has dtype BF16, expected F32",
    ),
    "wrong scale shape": (
        with_tensor("layers.1.attn.wq_a.scale", "F8_E8M0", np.ones((1, 1), E8M0)),
        r"'layers.1.attn.wq_a.scale' is F8_E8M0 .1, 1., expected F8_E8M0 .1, 2.",
    ),
    "wrong scale dtype": (
        with_tensor("layers.1.attn.wq_a.scale", "F32", np.ones((1, 2), np.float32)),
        r"'layers.1.attn.wq_a.scale' is F32 .1, 2., expected F8_E8M0",
    ),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_corrupt_checkpoint_is_refused_with_file_and_tensor(tmp_path: Path, name: str) -> None:
    edit, message = CORRUPTIONS[name]
    folder = rewritten(tmp_path, "A_s28", edit)
    with pytest.raises(ValueError, match=message) as caught:
        load(folder, "reference")
    assert str(folder) in str(caught.value)


def test_quantised_tensors_under_a_bf16_config_are_refused_and_the_reverse(tmp_path: Path) -> None:
    quantized, bf16 = load_config(GOLDEN / "A_s28"), load_config(GOLDEN / "A_s28" / "bf16")
    with pytest.raises(ValueError, match=r"has dtype F8_E4M3, expected BF16: .*without quantization_config"):
        hf.load_params(GOLDEN / "A_s28", bf16)
    with pytest.raises(ValueError, match=r"has dtype BF16, expected F8_E4M3: .*with quantization_config"):
        hf.load_params(GOLDEN / "A_s28" / "bf16", quantized)
    extra = with_tensor("layers.0.attn.wq_a.scale", "F8_E8M0", np.ones((1, 2), E8M0))
    folder = rewritten(tmp_path, "A_s28/bf16", extra)
    with pytest.raises(ValueError, match=r"'layers.0.attn.wq_a.scale' is a scale, but .* no quantization_config"):
        hf.load_params(folder, bf16)


def test_a_truncated_checkpoint_is_refused(tmp_path: Path) -> None:
    folder = rewritten(tmp_path, "B_s15", lambda tensors: tensors)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"model.safetensors: tensor '.*truncated"):
        load(folder, "reference")


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer.json compresses to \d+ ids, but .* 93"):
        load(GOLDEN / "A_s28", "reference", tokenizer=GOLDEN / "B_s15")


def test_without_a_tokenizer_the_token_map_is_none_and_said_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        params = load(GOLDEN / "A_s28" / "bf16", "bf16")
    assert params.token_map is None
    assert "tokenizer.json does not exist" in caplog.text


def test_without_engram_no_tokenizer_is_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def drop(tensors: Tensors) -> Tensors:
        return {name: value for name, value in tensors.items() if ".engram." not in name}

    folder = rewritten(tmp_path, "B_s15", drop)
    (folder / "tokenizer.json").unlink()
    raw = json.loads((folder / "config.json").read_text())
    raw["text_config"] |= {"engram_layer_ids": [], "engram_num_embeddings": []}
    (folder / "config.json").write_text(json.dumps(raw))
    params = load(folder, "reference")
    assert params.token_map is None and all(layer.engram is None for layer in params.layers)
    assert not caplog.records


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(ValueError, match="precision 'fp16' does not exist; choose one of reference"):
        load(GOLDEN / "B_s15", "fp16")


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no checkpoint"):
        hf.load_params(tmp_path, load_config(GOLDEN / "B_s15"))
