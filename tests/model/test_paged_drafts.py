"""Drafts from paged caches are the model authors' at every step, also right behind drafts that were rejected.

Every golden step is run as a verifying step: the teacher-forced token and the drafts of the step before, which the next
golden token is not; only the first row is kept.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.cache.pools import CacheShape
from deepinfer_jax.kernels.choice import KernelChoice
from deepinfer_jax.runtime.paged_model import Drafted, PagedModel, StepModel
from tests.support.golden import LOGIT_TOLERANCE, STREAM_TOLERANCE, Case, model, worst
from tests.support.stepping import Stepping

pytestmark = pytest.mark.real

SLOT, CHUNK = 3, 16
BLOCKS = [7, 2, 9, 4, 11]  # of 16 tokens, in any order


def rows_of(*cases: Case) -> list[Any]:
    """Every row of every case, as parameters."""
    return [pytest.param(case, row, id=f"{case}-{row}") for case in cases for row in range(len(case.tokens))]


@functools.partial(jax.jit, static_argnums=(0, 5))
def drafted(model: StepModel, params: Any, cache: Any, lengths: jax.Array, tokens: jax.Array, count: int) -> Drafted:
    """Beside an idle row. Their logits in the place of log-probabilities."""

    def pick(number: int, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), logits

    idle = 5
    slots = jnp.asarray([[idle, SLOT]])
    return model.draft(params, cache, slots, jnp.stack([0 * lengths, lengths], 1), tokens, count, pick)


@pytest.mark.parametrize(("case", "row"), rows_of(Case("A_s28", "inc", "f32nq"), Case("A_s28", "long", "f32nq")))
def test_drafts_from_pages_are_the_golden_ones_behind_rejected_rows(case: Case, row: int) -> None:
    check(case, row)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "row"), rows_of(Case("B_s15", "blong", "f32nq")))
def test_drafts_from_pages_are_those_of_golden_b(case: Case, row: int) -> None:
    check(case, row)


def check(case: Case, row: int) -> None:
    config, params = model(case.folder, "float32_exact")
    block = config.text.dspark_block_size
    text_model = PagedModel(config, "float32_exact", KernelChoice())
    shape = CacheShape(data=1, slots=5, blocks=13, tokens_per_block=16, num_drafts=block)
    on = Stepping(text_model, params, shape)  # full of NaN where nothing was written
    tokens, start = case.tokens[row], case.prefill_length
    on.feed(SLOT, BLOCKS, 0, tokens[:start], CHUNK)
    junk = tokens[:block][::-1]
    for step in range(case.steps):
        position = start + step
        hidden = on.step(SLOT, BLOCKS, position, np.concatenate([tokens[position : position + 1], junk]), 1 + block)
        logits = text_model.logits(params, jnp.asarray(hidden)[None])[0, 0]
        assert worst(logits, case.get("logits", step)[row, 0]) < LOGIT_TOLERANCE, step
        given = jnp.asarray([[0, case.get("out_ids", step)[row]]], jnp.int32).reshape(1, 2)
        for count in (block, 1):
            found = drafted(text_model, params, on.cache, jnp.asarray([position + 1]), given, count)
            assert np.array_equal(found.tokens[1], case.get("spec_ids", step)[row, 1 : 1 + count]), step
            assert worst(found.logprobs[1], case.get("spec_logits", step)[row, :count]) < LOGIT_TOLERANCE, step
            assert worst(found.confidences[1], case.get("spec_conf", step)[row, :count]) < STREAM_TOLERANCE, step
            if count == block:
                junk = np.asarray(found.tokens[1])
