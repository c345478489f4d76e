"""What a row does not own it never computes with: not what a former owner left, be it NaN, nor what a neighbour has."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from deepinfer_jax.cache.pools import CacheShape
from deepinfer_jax.kernels.choice import KernelChoice
from deepinfer_jax.runtime.paged_model import PagedModel, StepBatch
from tests.support.small_model import small_config, small_params
from tests.support.stepping import Stepping

pytestmark = pytest.mark.real

BLOCKS = [3, 14, 15, 9, 2, 6, 5, 0]
TEXT = np.random.default_rng(0).integers(4, 59, 64).astype(np.int32)
BAD = 60  # an id of which the parameters below have no finite row

KERNELS = {
    "xla": KernelChoice(),
    "triton": KernelChoice(sparse_attention="triton", interpret=True),
    "invariant": KernelChoice(batch_invariant=True),
}
CASES = [
    ("xla", "float32_exact", 3),
    *(
        pytest.param(kernels, precision, num_drafts, marks=pytest.mark.slow)
        for kernels, precision, num_drafts in (
            ("triton", "float32_exact", 3),
            ("xla", "float32_exact", 0),
            ("invariant", "float32_exact", 0),
            ("xla", "float32", 3),
            ("xla", "reference", 0),
            ("triton", "reference", 0),
            ("invariant", "reference", 3),
        )
    ),
]


def stepping(kernels: str, precision: str, num_drafts: int, *, clean: bool = False) -> Stepping:
    shape = CacheShape(data=1, slots=3, blocks=20, tokens_per_block=8, num_drafts=num_drafts)
    model = PagedModel(small_config(), precision, KERNELS[kernels])  # type: ignore[arg-type]
    params = small_params(precision)
    params = dataclasses.replace(params, embed=params.embed.at[BAD].set(np.nan))
    return Stepping(model, params, shape, clean=clean)


def answers(where: Stepping, slot: int, blocks: list[int]) -> np.ndarray:
    """Hidden states of a text in steps of every shape, which crosses windows, groups and blocks."""
    parts, done = [], 0
    for count, time in ((9, 16), (12, 1), (7, 7), (20, 16), (5, 1)):
        parts.append(where.feed(slot, blocks, done, TEXT[done : done + count], time))
        done += count
    return np.concatenate(parts).astype(np.float32)


@pytest.mark.parametrize(("kernels", "precision", "num_drafts"), CASES)
def test_poisoned_pools_give_the_bits_of_empty_ones(kernels: str, precision: str, num_drafts: int) -> None:
    clean, poisoned = (
        answers(stepping(kernels, precision, num_drafts, clean=clean), 1, BLOCKS) for clean in (True, False)
    )
    assert np.isfinite(clean).all()
    np.testing.assert_array_equal(poisoned, clean)


@pytest.mark.parametrize(("kernels", "precision", "num_drafts"), CASES)
def test_a_sequence_of_nan_infects_no_later_owner(kernels: str, precision: str, num_drafts: int) -> None:
    fresh = answers(stepping(kernels, precision, num_drafts, clean=True), 1, BLOCKS)
    where = stepping(kernels, precision, num_drafts, clean=True)
    bad = np.full(60, BAD, np.int32)
    assert np.isnan(where.feed(1, BLOCKS, 0, bad[:59], 16).astype(np.float32)).all()
    assert np.isnan(where.feed(1, BLOCKS, 59, bad[59:], 1).astype(np.float32)).all()
    np.testing.assert_array_equal(answers(where, 1, BLOCKS), fresh)


@pytest.mark.parametrize("time", [pytest.param(1, marks=pytest.mark.slow), 7])
@pytest.mark.parametrize("precision", ["float32_exact", pytest.param("reference", marks=pytest.mark.slow)])
def test_a_sequence_of_nan_infects_no_neighbour(precision: str, time: int) -> None:
    def beside(token: int) -> np.ndarray:
        where, found = stepping("xla", precision, 0, clean=True), []
        for start in range(0, 21, time):
            tokens = np.stack([np.full(time, token, np.int32), TEXT[start : start + time]])
            batch: dict[str, Any] = {
                "tokens": tokens[None],
                "lengths": np.full((1, 2), time, np.int32),
                "starts": np.full((1, 2), start, np.int32),
                "slots": np.array([[0, 1]], np.int32),
                "tables": np.array([[[10, 11, 12, 13], BLOCKS[:4]]], np.int32),
            }
            found.append(where.run(StepBatch(**batch)))
        return np.concatenate(found, axis=1).astype(np.float32)

    good, bad = beside(5), beside(BAD)
    assert np.isnan(bad[0]).all() and np.isfinite(good).all()
    # Close, not equal: the routed experts' tiles hold other rows.
    np.testing.assert_allclose(bad[1], good[1], atol=1e-5 if precision == "float32_exact" else 0.05)
