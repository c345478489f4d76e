"""Run in a process of its own with eight virtual CPU devices; prints one JSON object for `test_sharding.py`."""

import json
import os
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from deepinfer_jax import forward, load_config, load_params
from deepinfer_jax.model.expert_dispatch import dispatched_experts
from deepinfer_jax.weights.params import Experts
from deepinfer_jax.weights.sharding import auto_mesh
from tests.support.paths import GOLDEN_A

CAPTURE = ("layers.*.index_picks", "layers.*.expert_ids", "layers.*.engram.rows")


def golden_a(shape: tuple[int, int], axis_type: AxisType) -> dict[str, object]:
    """Golden A, case `short` (batch 2), float32_exact, against golden logits and the unsharded picks."""
    config, golden = load_config(GOLDEN_A), np.load(GOLDEN_A / "short.f32nq.npz")
    mesh = jax.make_mesh(shape, ("data", "expert"), axis_types=(axis_type, axis_type))
    plain = load_params(GOLDEN_A, config, precision="float32_exact")
    params = load_params(GOLDEN_A, config, precision="float32_exact", mesh=mesh)
    run = {"precision": "float32_exact", "capture": CAPTURE}
    expected, found = (forward(p, config, golden["input_ids"], **run) for p in (plain, params))
    w1 = params.layers[0].ffn.experts.w1
    return {
        "logits_error": float(np.abs(np.asarray(found.logits) - golden["prefill/logits"]).max()),
        "different": [
            name
            for name, value in expected.captured.items()
            if not np.array_equal(np.asarray(value), np.asarray(found.captured[name]))
        ],
        "experts_per_device": sorted({shard.data.shape[0] for shard in w1.addressable_shards}),
        "devices": len(found.logits.devices()),
    }


def expert_bits() -> dict[str, object]:
    """Whether the routed sum has the same bits on 2, 4 and 8 devices, in both tile and pair form."""
    rng = np.random.default_rng(0)
    experts, hidden, inner, k = 16, 32, 64, 3

    def array(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    params = Experts(
        w1=array(experts, inner, hidden), w3=array(experts, inner, hidden), w2=array(experts, hidden, inner)
    )
    equal = {}
    for tokens in (4, 96):
        x, weights = array(tokens, hidden), jnp.abs(array(tokens, k))
        ids = jnp.asarray(np.stack([rng.permutation(experts)[:k] for _ in range(tokens)]), jnp.int32)
        results = []
        for devices in (2, 4, 8):
            mesh = auto_mesh(jax.make_mesh((1, devices), ("data", "expert"), devices=jax.devices()[:devices]))
            run = jax.jit(
                lambda x, params, ids, weights, mesh=mesh: dispatched_experts(
                    x, params, ids, weights, mesh, limit=10.0, quantize_input=False
                )
            )
            results.append(np.asarray(run(x, params, ids, weights)))
        equal[str(tokens)] = all(np.array_equal(results[0], other) for other in results)
    return equal


if __name__ == "__main__":
    what = sys.argv[1]
    if what == "experts":
        print(json.dumps(expert_bits()))
    else:
        rows, columns = what.split("x")
        kind = AxisType.Explicit if rows == "2" else AxisType.Auto
        print(json.dumps(golden_a((int(rows), int(columns)), kind)))
