"""Step programs write pools where they lie: there is no room for a second one, and no time to copy it."""

import dataclasses
from typing import get_args

import jax
import jax.numpy as jnp
import pytest

from deepinfer_jax.cache.paged import paged_state
from deepinfer_jax.cache.pools import CacheShape, init_pools
from deepinfer_jax.config.model_config import Precision
from deepinfer_jax.kernels.choice import KernelChoice
from deepinfer_jax.model.bounded_replay import Replay
from deepinfer_jax.runtime.aot import copied_pools
from deepinfer_jax.runtime.paged_model import PagedModel
from deepinfer_jax.runtime.slot_table import init_slot_table
from deepinfer_jax.runtime.state_ops import WRITES, StateOp, state_op_input_shapes, state_op_program
from deepinfer_jax.runtime.step_program import Kind, step_program
from deepinfer_jax.runtime.steps import StepState
from deepinfer_jax.scheduler import Bucket
from tests.support.marks import slow
from tests.support.small_model import small_config, small_params

pytestmark = [pytest.mark.real, pytest.mark.unoptimised]

SHAPE = CacheShape(data=1, slots=11, blocks=37, tokens_per_block=8)  # primes: no other array has a pool's size


@pytest.mark.parametrize(
    ("kind", "bucket", "num_drafts", "replay"),
    [
        slow("decode", Bucket(4, 4, 8), 3, None),
        ("decode", Bucket(4, 4, 8, packed=9), 3, None),
        slow("decode", Bucket(4, 1, 8), 0, None),
        ("prefill", Bucket(2, 40, 8), 3, None),
        # Passes rings through a branch.
        slow("prefill", Bucket(2, 40, 8), 0, Replay("compact", 20)),
    ],
)
def test_no_pool_is_copied(kind: Kind, bucket: Bucket, num_drafts: int, replay: Replay | None) -> None:
    model = PagedModel(small_config(), "reference", KernelChoice(), replay=replay)
    shape = dataclasses.replace(SHAPE, num_drafts=num_drafts)
    program, arguments = step_program(model, kind, shape, bucket, "cpu", feature_rows=13 if kind == "prefill" else 0)
    compiled = jax.jit(program, donate_argnums=1).lower(*arguments).compile().as_text()
    # A ring: 11 slots of 16 keys of 64 channels.
    assert compiled is not None and f"u8[1,11,{16 + num_drafts},64]" in compiled
    state, table = arguments[1], arguments[1].table
    assert copied_pools(compiled, state.cache) == []
    # Of the slot table the large ones: steps add to the counts, read them and the masks in a branch, and write drafts.
    large = [table.adjustments.counts, table.adjustments.masks]
    large += [table.drafts.logprobs] if num_drafts else []
    assert copied_pools(compiled, large) == []


@pytest.mark.parametrize("precision", [slow("float32"), "reference"])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("move", get_args(StateOp))
def test_no_move_copies_a_pool(move: StateOp, packed: bool, precision: Precision) -> None:
    model = PagedModel(small_config(), precision, KernelChoice(), packed=packed)
    shape, width = dataclasses.replace(SHAPE, num_drafts=3), 8
    cache = jax.eval_shape(lambda: init_pools(model.state(shape.tokens_per_block), shape))
    state = StepState(cache, jax.eval_shape(lambda: init_slot_table(shape, width, model.vocab_size)))
    params = small_params(precision)
    program = jax.jit(state_op_program(model, move, shape), donate_argnums=1 if move in WRITES else ())
    compiled = program.lower(params, state, *state_op_input_shapes(model, move, shape, width)).compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None and copied_pools(text, cache) == []
    if move in WRITES:
        held = sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(cache))
        assert memory is not None and memory.alias_size_in_bytes >= held


def test_a_copied_pool_is_found() -> None:
    """XLA keeps the old array of one that is written and read in no order."""
    cache = init_pools(paged_state(small_config(), "reference", tokens_per_block=SHAPE.tokens_per_block), SHAPE)

    def write_and_sum(pool: jax.Array) -> tuple[jax.Array, jax.Array]:
        return pool.at[0, 3].set(1), jnp.sum(pool, dtype=jnp.int32)

    compiled = jax.jit(write_and_sum, donate_argnums=0).lower(cache.entries[0].codes).compile().as_text()
    assert compiled is not None and copied_pools(compiled, cache)
