"""State that leaves a slot and its blocks and comes back elsewhere is the same state, of every kind."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.cache.pools import CacheShape
from deepinfer_jax.kernels.choice import KernelChoice
from deepinfer_jax.runtime.paged_model import PagedModel
from tests.support.dummy_kind import DummyKindModel
from tests.support.marks import slow
from tests.support.small_model import small_config, small_params
from tests.support.stepping import Stepping
from tests.support.toy import make_table

pytestmark = pytest.mark.real

SHAPE = CacheShape(data=1, slots=3, blocks=20, tokens_per_block=8)
OWN, OTHER = [3, 14, 15, 9, 2, 6, 5, 0], [1, 4, 7, 10, 11, 12, 13, 8]
REFERENCE = pytest.param("reference", True, marks=pytest.mark.slow)
UNPACKED = pytest.param("reference", False, marks=pytest.mark.slow)
MODELS = pytest.mark.parametrize(
    ("precision", "packed"), [("dummy", True), ("float32_exact", True), REFERENCE, UNPACKED]
)
# Around edges of n-grams (3), groups (2), blocks (8) and the window (16).
LENGTHS = [1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 18, 31, 32, 33, 40]


def stepping(precision: str, packed: bool = True, shape: CacheShape = SHAPE) -> Stepping:
    if precision == "dummy":
        return Stepping(DummyKindModel(), jnp.asarray(make_table()), shape)
    model = PagedModel(small_config(), precision, KernelChoice(), packed=packed)  # type: ignore[arg-type]
    return Stepping(model, small_params(precision), shape)


def text(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(4, 59, 64).astype(np.int32)


def move(source: Stepping, target: Stepping, length: int) -> None:
    """Slot 0 and its blocks to slot 2 and other blocks."""
    target.put_state(2, length, source.state(0, length))
    for own, other in zip(OWN[: -(-length // 8)], OTHER, strict=False):
        target.put_block(other, source.block(own))


@MODELS
def test_moved_state_goes_on_as_if_it_had_stayed(precision: str, packed: bool) -> None:
    for length in LENGTHS:
        source, target = stepping(precision, packed), stepping(precision, packed)
        source.feed(0, OWN, 0, text()[:length], 16)
        target.feed(1, [16, 17, 18], 0, text(1)[:20], 16)  # a neighbour
        neighbour = target.state(1, 20)
        move(source, target, length)
        np.testing.assert_array_equal(target.state(2, length), source.state(0, length))
        np.testing.assert_array_equal(target.state(1, 20), neighbour)
        for count, time in ((3, 1), (18, 16)):
            rest = text()[length : length + count]
            stayed, moved = source.feed(0, OWN, length, rest, time), target.feed(2, OTHER, length, rest, time)
            np.testing.assert_array_equal(moved, stayed)
            assert np.isfinite(moved.astype(np.float32)).all()
            length += count


@pytest.mark.parametrize(("precision", "packed"), [("dummy", True), ("float32_exact", True), REFERENCE])
def test_a_state_has_the_same_bytes_for_any_number_of_drafts(precision: str, packed: bool) -> None:
    """So that it can go to an engine with other drafts."""
    for length in (1, 9, 40):
        narrow, wide = (stepping(precision, packed, dataclasses.replace(SHAPE, num_drafts=size)) for size in (0, 5))
        for where in (narrow, wide):
            where.feed(0, OWN, 0, text()[:length], 16)
        np.testing.assert_array_equal(wide.state(0, length), narrow.state(0, length))
        move(narrow, wide, length)
        np.testing.assert_array_equal(wide.state(2, length), narrow.state(0, length))


ROLLBACKS = [
    *(("dummy", num_drafts) if num_drafts in (0, 3, 6) else slow("dummy", num_drafts) for num_drafts in range(7)),
    *(pytest.param("float32_exact", num_drafts, marks=pytest.mark.slow) for num_drafts in range(7)),
]


@pytest.mark.parametrize(("precision", "num_drafts"), ROLLBACKS)
def test_rejected_tokens_leave_nothing(precision: str, num_drafts: int) -> None:
    """Steps that end in `num_drafts` tokens or fewer that are then taken back, against steps without them."""
    shape = dataclasses.replace(SHAPE, num_drafts=num_drafts)
    plain, tried = stepping(precision, shape=shape), stepping(precision, shape=shape)
    done = 5 + 3 * num_drafts
    for where in (plain, tried):
        where.feed(0, OWN, 0, text()[:done], 16)
    for accepted in [*range(1, num_drafts + 2), 1, 1]:
        own, junk = text()[done : done + accepted], text(2)[done : done + num_drafts + 1 - accepted]
        expected = plain.step(0, OWN, done, own, 7)
        found = tried.step(0, OWN, done, np.concatenate([own, junk]), 7)[:accepted]
        np.testing.assert_array_equal(found, expected)
        done += accepted
        np.testing.assert_array_equal(tried.state(0, done), plain.state(0, done))
        if accepted % 2:
            one = text()[done : done + 1]
            np.testing.assert_array_equal(tried.step(0, OWN, done, one, 1), plain.step(0, OWN, done, one, 1))
            done += 1
