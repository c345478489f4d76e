"""checkpoint/init.py: the tree of load_params, filled at random."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.checkpoint import hf, init
from deepinfer_jax.checkpoint.leaves import leaf_form
from deepinfer_jax.config.model_config import ModelConfig, load_config
from deepinfer_jax.kernels.quantized_linear import dequantize
from deepinfer_jax.weights.params import Fp4Weight, Fp8Rows, Fp8Weight, Params
from tests.support.paths import GOLDEN

pytestmark = pytest.mark.real

QUANTIZED = (Fp8Weight, Fp4Weight, Fp8Rows)


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return load_config(GOLDEN / "B_s15")


@pytest.fixture(scope="module")
def drawn(config: ModelConfig) -> Params:
    return init.init_params(config, jax.random.key(0))


def shapes(params: Params) -> Params:
    return jax.tree.map(lambda leaf: (leaf.shape, jnp.dtype(leaf.dtype)), params)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("precision", ["reference", "float32"])
@pytest.mark.parametrize("folder", ["A_s28", "B_s15"])
def test_the_tree_is_that_of_load_params(
    folder: str, precision: str, platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (hf, init):
        monkeypatch.setattr(module, "leaf_form", lambda spec, precision, _: leaf_form(spec, precision, platform))
    config = load_config(GOLDEN / folder)
    loaded = hf.load_params(GOLDEN / folder, config, precision=precision)
    abstract = jax.eval_shape(lambda key: init.init_params(config, key, precision=precision), jax.random.key(0))
    assert jax.tree.structure(abstract) == jax.tree.structure(loaded)
    assert shapes(abstract) == shapes(loaded)


def test_products_keep_unit_size(drawn: Params) -> None:
    """Every matrix maps unit-size inputs to outputs of size 0.5 … 2 (scales are powers of two)."""
    layer = drawn.layers[0]
    for weight in (layer.attn.wq_b, layer.attn.wo_b, layer.ffn.experts.w1, layer.ffn.shared_experts.w2, drawn.head):
        matrix = dequantize(weight, jnp.float32)
        gain = float(jnp.sqrt(jnp.mean(jnp.sum(matrix**2, axis=-1))))
        assert 0.5 < gain < 2
    assert layer.engram is not None
    table = dequantize(layer.engram.embed, jnp.float32)
    assert 0.5 < float(jnp.std(table)) < 2 and np.isfinite(table).all()
    assert float(jnp.mean(layer.attn_norm)) == pytest.approx(1, abs=0.1)  # 64 values of deviation 0.1


def test_parameters_differ_by_name_and_key_and_repeat(config: ModelConfig, drawn: Params) -> None:
    again = init.init_params(config, jax.random.key(0))
    other = init.init_params(config, jax.random.key(1))
    for one, same, different in zip(*(jax.tree.leaves(p) for p in (drawn, again, other)), strict=True):
        np.testing.assert_array_equal(one, same)
        constant = one.dtype in (jnp.uint8, jnp.int32) and jnp.array_equal(one, different)  # scales, token map
        assert constant or not jnp.array_equal(one, different)
    assert not jnp.array_equal(drawn.layers[0].attn.wq_a, drawn.layers[1].attn.wq_a)
    assert not jnp.array_equal(drawn.layers[0].ffn.experts.w1.codes, drawn.layers[0].ffn.experts.w3.codes)


def test_token_map_spreads_the_vocabulary_over_the_compressed_ids(config: ModelConfig, drawn: Params) -> None:
    vocabulary, compressed = config.text.vocab_size, config.text.engram_compressed_vocab_size
    assert drawn.token_map is not None
    assert drawn.token_map.tolist() == [i * compressed // vocabulary for i in range(vocabulary)]


def test_an_unknown_precision_is_refused(config: ModelConfig) -> None:
    with pytest.raises(ValueError, match="precision 'int8' does not exist"):
        init.init_params(config, jax.random.key(0), precision="int8")
