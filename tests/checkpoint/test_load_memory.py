"""Loading holds one tensor in host memory at a time, measured in a child process on a 1 GB checkpoint (L7)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from deepinfer_jax.checkpoint.safetensors import DTYPES, write_safetensors
from deepinfer_jax.checkpoint.tiny_config import TINY
from deepinfer_jax.config.model_config import parse_config
from deepinfer_jax.weights.layout import TensorSpec, param_specs, released_tensors

pytestmark = pytest.mark.real

SHARD_BYTES = 150_000_000

SIZES = {
    "vocab_size": 16384,
    "hidden_size": 1024,
    "moe_intermediate_size": 1024,
    "num_attention_heads": 8,
    "head_dim": 128,
    "q_lora_rank": 256,
    "o_lora_rank": 256,
    "n_routed_experts": 64,
    "dspark_n_routed_experts": 16,
    "engram_vocab_size": 100_000,
    "engram_num_embeddings": [600_402, 601_280],
    "engram_head_dim": 128,
}

CHILD = """
import json, resource, sys
import jax
from deepinfer_jax.checkpoint.hf import load_params
from deepinfer_jax.config.model_config import load_config

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

folder = sys.argv[1]
config = load_config(folder)
jax.block_until_ready(jax.device_put(0.0))
before = resident()
params = load_params(folder, config)
# Not ru_maxrss: that of a new process starts with what the process that made it held.
peak = int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) * 1024
final = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
print(json.dumps({"before": before, "peak": peak, "after": resident(), "final": final}))
"""


def write_zeros(folder: Path) -> None:
    """A sharded checkpoint of zeros; only its size matters here."""
    raw = TINY | {"text_config": TINY["text_config"] | SIZES}
    (folder / "config.json").write_text(json.dumps(raw))
    shards: list[list[TensorSpec]] = [[]]
    for tensor in released_tensors(parse_config(raw)):
        if sum(other.nbytes for other in shards[-1]) + tensor.nbytes > SHARD_BYTES:
            shards.append([])
        shards[-1].append(tensor)
    weight_map = {}
    for number, shard in enumerate(shards):
        name = f"{number}.safetensors"
        write_safetensors(folder / name, shard, (np.zeros(t.shape, DTYPES[t.dtype]) for t in shard))
        weight_map |= {tensor.name: name for tensor in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_peak_memory_is_the_parameters_plus_one_parameter_and_one_shard(tmp_path: Path) -> None:
    write_zeros(tmp_path)
    config = parse_config(json.loads((tmp_path / "config.json").read_text()))
    stored = sum(tensor.nbytes for tensor in released_tensors(config))
    assert stored > 950_000_000
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path)],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert child.returncode == 0, child.stderr
    measured = json.loads(child.stdout)
    largest = max(sum(tensor.nbytes for tensor in spec.tensors()) for spec in param_specs(config))
    assert largest < SHARD_BYTES < stored / 4  # else the bound would say nothing
    assert measured["after"] - measured["before"] > 0.9 * measured["final"], "the parameters are not in memory yet"
    assert measured["peak"] - measured["before"] - measured["final"] <= largest + SHARD_BYTES, measured
