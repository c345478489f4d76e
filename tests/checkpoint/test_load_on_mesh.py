"""load_params on eight virtual CPU devices: the same values, and each device holds only its slice."""

import os
import subprocess
import sys

import pytest

from tests.support.paths import GOLDEN_A

pytestmark = pytest.mark.real

CHILD = """
import sys
import jax, numpy as np
from jax.sharding import AxisType
from deepinfer_jax.checkpoint import hf
from deepinfer_jax.checkpoint.hf import load_params
from deepinfer_jax.checkpoint.leaves import leaf_form
from deepinfer_jax.config.model_config import load_config
from deepinfer_jax.weights.layout import layout
from deepinfer_jax.weights.params import Fp4Weight, Fp8Rows, Fp8Weight

folder = sys.argv[1]
config = load_config(folder)
quantized = (Fp8Weight, Fp4Weight, Fp8Rows)
for shape, kind in (((1, 8), AxisType.Auto), ((2, 4), AxisType.Explicit)):
    mesh = jax.make_mesh(shape, ("data", "expert"), axis_types=(kind,) * 2)
    for precision in ("reference", "float32"):
        single = load_params(folder, config, precision=precision)
        placed = load_params(folder, config, precision=precision, mesh=mesh)
        assert placed.mesh is not None and len(placed.mesh.devices.flat) == 8
        for one, many in zip(jax.tree.leaves(single), jax.tree.leaves(placed), strict=True):
            one, many = np.asarray(one), np.asarray(many)
            np.testing.assert_array_equal(one, many[: len(one)])
            assert not many[len(one) :].astype(np.float32).any()  # padding rows are zero
        w1 = jax.tree.leaves(placed.layers[0].ffn.experts.w1)[0]
        assert w1.addressable_shards[0].data.shape[0] == 8 // shape[1]
        table = jax.tree.leaves(placed.layers[1].engram.embed)[0]
        rows = config.text.engram_num_embeddings[0]
        assert table.addressable_shards[0].data.shape[0] == -(-rows // 8)
        assert placed.embed.addressable_shards[0].data.shape[0] == config.text.vocab_size // 8
        assert placed.token_map.sharding.is_fully_replicated

# As on a GPU, where FP8 weights keep their codes and scales: scales have fewer rows than codes.
mesh = jax.make_mesh((2, 4), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)
hf.leaf_form = lambda spec, precision, platform: leaf_form(spec, precision, "gpu")
single, placed = load_params(folder, config), load_params(folder, config, mesh=mesh)
assert isinstance(single.layers[0].attn.wq_b, Fp8Weight)
for one, many in zip(jax.tree.leaves(single.layers[0].attn), jax.tree.leaves(placed.layers[0].attn), strict=True):
    np.testing.assert_array_equal(np.asarray(one), np.asarray(many))

mesh = jax.make_mesh((5,), ("data",), devices=jax.devices()[:5])
try:
    load_params(folder, config, mesh=mesh)
except ValueError as error:
    assert "embed.weight" in str(error) and "vocab" in str(error), error
else:
    raise AssertionError("192 vocabulary rows were divided over five devices")
print("done")
"""


def test_golden_a_is_placed_by_rule_on_1x8_and_2x4() -> None:
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(GOLDEN_A)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert child.returncode == 0, child.stderr
    assert child.stdout.strip() == "done"
