"""Parameters on a mesh: placement by rule, the same logits and picks, errors that name tensor and rule."""

from typing import Any

import jax
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from deepinfer_jax import load_config
from deepinfer_jax.weights.layout import ParamSpec, param_specs
from deepinfer_jax.weights.sharding import ShardingRules, auto_mesh, param_sharding, placed_shape
from tests.support.children import run_child
from tests.support.paths import GOLDEN_A

pytestmark = pytest.mark.real


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "experts"), [("1x8", 1), ("2x4", 2)])
def test_golden_a_is_the_same_on_eight_devices(shape: str, experts: int) -> None:
    found = run_child("sharded_forward", shape)
    assert found["devices"] == 8
    assert found["experts_per_device"] == [experts]
    assert found["different"] == []
    assert found["logits_error"] <= 1e-4  # the line of the issue; one device has 5e-6


@pytest.mark.slow
def test_number_of_devices_changes_no_bit_of_the_expert_sum() -> None:
    assert run_child("sharded_forward", "experts") == {"4": True, "96": True}


def released(name: str) -> ParamSpec:
    specs = param_specs(load_config(GOLDEN_A))
    return next(spec for spec in specs if spec.names[0] == name)


def mesh(data: int, expert: int) -> Any:
    """A mesh of devices that need not exist: placement is decided from its shape alone."""
    return AbstractMesh((data, expert), ("data", "expert"))


def test_experts_lie_over_expert_and_vocabulary_over_both() -> None:
    experts = released("layers.0.ffn.experts.0.w1.weight")
    assert param_sharding(experts, mesh(2, 4)).spec == PartitionSpec(("expert",), None, None)
    assert param_sharding(released("embed.weight"), mesh(2, 4)).spec == PartitionSpec(("data", "expert"), None)
    assert param_sharding(released("layers.0.attn.wq_b.weight"), mesh(2, 4)).spec == PartitionSpec(None, None)


def test_experts_and_table_rows_are_padded_to_the_devices() -> None:
    assert placed_shape(released("mtp.0.ffn.experts.0.w1.weight"), mesh(1, 8)) == (8, 32, 64)  # 4 experts
    assert placed_shape(released("layers.4.engram.embed.weight"), mesh(2, 4)) == (464, 32)  # 462 rows
    assert placed_shape(released("layers.0.ffn.experts.0.w1.weight"), mesh(1, 8)) == (8, 32, 64)


def test_an_axis_that_does_not_divide_names_tensor_rule_and_remedy() -> None:
    with pytest.raises(
        ValueError, match=r"embed\.weight: axis 0 \(vocab\) has 192 entries.*ShardingRules\(vocab=\(\)\)"
    ):
        param_sharding(released("embed.weight"), mesh(1, 7))
    # The scales of an FP8 matrix have one row for 32: they must divide as well.
    with pytest.raises(ValueError, match=r"layers\.0\.attn\.wq_b\.weight.*has 8 entries as stored, which 16 devices"):
        param_sharding(released("layers.0.attn.wq_b.weight"), mesh(1, 16), ShardingRules(heads=("expert",)))


def test_another_axis_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"axes \['model'\]"):
        auto_mesh(jax.make_mesh((1,), ("model",)))
