"""Packed rows against loops over sequences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax.runtime.packed_rows import pack_rows
from deepinfer_jax.runtime.paged_model import StepBatch

pytestmark = pytest.mark.toy

DATA, SEQUENCES, TIME, PACKED, SLOTS = 2, 3, 4, 8, 5
NUMBERS = st.lists(st.integers(0, TIME), min_size=SEQUENCES, max_size=SEQUENCES).filter(lambda n: sum(n) <= PACKED)


@jax.jit
def packed_and_back(numbers: jax.Array, batch: StepBatch, rows: jax.Array) -> tuple[StepBatch, jax.Array, jax.Array]:
    packing = pack_rows(numbers, PACKED)
    taken = packing.take(rows, TIME)
    return packing.batch(batch, SLOTS), taken, packing.spread(taken, TIME)


@given(st.lists(NUMBERS, min_size=DATA, max_size=DATA), st.integers(0, 1000))
def test_every_token_goes_to_its_place_and_back(numbers: list[list[int]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 100, (DATA, SEQUENCES, TIME))
    starts, slots = rng.integers(0, 30, (DATA, SEQUENCES)), rng.integers(0, SLOTS, (DATA, SEQUENCES))
    tables = rng.integers(0, 9, (DATA, SEQUENCES, 2))
    beside = StepBatch(*(jnp.asarray(a, jnp.int32) for a in (tokens, np.asarray(numbers), starts, slots, tables)))
    rows = rng.normal(size=(DATA * SEQUENCES * TIME, 2)).astype(np.float32)
    batch, taken, back = packed_and_back(jnp.asarray(numbers, jnp.int32), beside, rows)
    taken = np.asarray(taken).reshape(DATA, PACKED, 2)
    by_token = rows.reshape(DATA, SEQUENCES, TIME, 2)
    for d in range(DATA):
        places = [(i, j) for i in range(SEQUENCES) for j in range(numbers[d][i])]
        assert batch.lengths[d].tolist() == [1] * len(places) + [0] * (PACKED - len(places))
        assert (np.asarray(batch.slots)[d, len(places) :] == SLOTS).all()
        assert (np.asarray(batch.offsets)[d, len(places) :] == 0).all()
        for row, (i, j) in enumerate(places):
            found = [batch.tokens[d, row, 0], batch.starts[d, row], batch.slots[d, row], batch.offsets[d, row]]  # type: ignore[index]
            assert [int(x) for x in found] == [tokens[d, i, j], starts[d, i] + j, slots[d, i], j]
            assert batch.tables[d, row].tolist() == tables[d, i].tolist()
            np.testing.assert_array_equal(taken[d, row], by_token[d, i, j])
            np.testing.assert_array_equal(back[d * SEQUENCES + i, j], by_token[d, i, j])
