"""Images inside step programs: golden A's prompt with images, beside one of text, by places and a pool of features."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import load_config, load_params
from deepinfer_jax.cache.pools import CacheShape
from deepinfer_jax.kernels.choice import KernelChoice
from deepinfer_jax.model.embedding import END_PLACE, NEWLINE_PLACE, START_PLACE, TEXT_PLACE
from deepinfer_jax.runtime.paged_model import PagedModel
from deepinfer_jax.runtime.runner import Runner
from deepinfer_jax.runtime.slot_sampling import SAMPLING_FIELDS
from deepinfer_jax.runtime.step_result import StepResult
from deepinfer_jax.scheduler import Bucket, BucketTable, DecodeStep, PrefillStep
from deepinfer_jax.tokenization import ImageTokenOffset
from tests.support.golden import log_softmax
from tests.support.paths import GOLDEN_A

pytestmark = pytest.mark.real

IMAGES, TEXT = GOLDEN = [dict(np.load(GOLDEN_A / f"{case}.f32nq.npz")) for case in ("img", "long")]
VOCAB, TOKENS_PER_BLOCK, DECODED = 192, 16, 6
ROWS, WIDTH = 2, 5
PREFILL, DECODE = Bucket(ROWS, 64, WIDTH), Bucket(ROWS, 1, WIDTH)
FIRST_ROWS = 7, 2
"""Where the features of the two images lie in the pool; all its other rows are NaN."""


def prompt_ids() -> list[np.ndarray]:
    """The two prompts, of 40 and 64 tokens; images are spelled with ids outside the vocabulary."""
    prompt, length = IMAGES["input_ids"][0].copy(), int(IMAGES["prefill_len"])
    roles = IMAGES["token_types"][0]
    prompt[roles >= 0] = VOCAB + ImageTokenOffset.IMAGE_PAD
    prompt[roles == 0] = VOCAB + ImageTokenOffset.IMAGE
    return [prompt[:length], TEXT["input_ids"][0, : int(TEXT["prefill_len"])]]


def image_places() -> np.ndarray:
    """Of the image prompt, from its roles by counting."""
    places, image, row = [], -1, 0
    for role in IMAGES["token_types"][0, : int(IMAGES["prefill_len"])].tolist():
        if role == 0:
            image, row = image + 1, 0
        if role == 1:
            places.append(FIRST_ROWS[image] + row)
            row += 1
        else:
            places.append({-1: TEXT_PLACE, 0: START_PLACE, 2: NEWLINE_PLACE, 3: END_PLACE}[role])
    return np.asarray(places, np.int32)


def features() -> Any:
    pool = np.full((13, 64), np.nan, np.float32)
    for image, first in enumerate(FIRST_ROWS):
        rows = IMAGES[f"image{image}/embeds"]
        pool[first : first + len(rows)] = rows
    return jnp.asarray(pool)


@functools.cache
def runner() -> Runner:
    config = load_config(GOLDEN_A)
    made = Runner(
        PagedModel(config, "float32_exact", KernelChoice()),
        load_params(GOLDEN_A, config, precision="float32_exact"),
        buckets=BucketTable(decode=(DECODE,), prefill=(PREFILL,)),
        shape=CacheShape(data=1, slots=ROWS, blocks=ROWS * WIDTH, tokens_per_block=TOKENS_PER_BLOCK),
        table_width=WIDTH,
        features=features(),
    )
    made.warm_up()
    return made


def given(slots: list[int], number: int) -> np.ndarray:
    """The golden tokens behind the prompts, which the decode steps are given; what a step samples is not."""
    tokens = [case["input_ids"][0, int(case["prefill_len"]) :] for case in GOLDEN]
    return np.asarray([tokens[slot][number] if number < DECODED else 0 for slot in slots], np.int32)


def where(slots: list[int], starts: list[int], ends: list[int], most: int) -> dict[str, Any]:
    """What both kinds of step say about rows whose slots have blocks 5·slot, 5·slot + 1, …"""
    first = [-(-start // TOKENS_PER_BLOCK) for start in starts]
    new_blocks = np.full((len(slots), most), -1, np.int32)
    for own, slot, low, end in zip(new_blocks, slots, first, ends, strict=True):
        numbers = range(low, -(-end // TOKENS_PER_BLOCK))
        own[: len(numbers)] = [WIDTH * slot + number for number in numbers]
    count = len(slots)
    return {
        "sequences": [None] * count,
        "dp_rank": np.zeros(count, np.int32),
        "row": np.arange(count, dtype=np.int32),
        "slots": np.asarray(slots, np.int32),
        "first_new_block": np.asarray(first, np.int32),
        "new_blocks": new_blocks,
    }


def prefill(slots: list[int], starts: list[int], ends: list[int]) -> StepResult:
    """One chunk of the prompts in these slots; slot 0 has the images."""
    prompts, count = prompt_ids(), len(slots)
    tokens, places = np.zeros((count, PREFILL.time), np.int32), np.full((count, PREFILL.time), TEXT_PLACE, np.int32)
    for row, (slot, start, end) in enumerate(zip(slots, starts, ends, strict=True)):
        tokens[row, : end - start] = prompts[slot][start:end]
        if slot == 0:
            places[row, : end - start] = image_places()[start:end]
    complete = np.asarray([end == len(prompts[slot]) for slot, end in zip(slots, ends, strict=True)])
    step = PrefillStep(
        bucket=PREFILL,
        starts=np.asarray(starts, np.int32),
        num_new_tokens=np.asarray(ends, np.int32) - np.asarray(starts, np.int32),
        tokens=tokens,
        completes=complete,
        samples=complete,
        **where(slots, starts, ends, PREFILL.time // TOKENS_PER_BLOCK),
    )
    following = [0 if done else prompts[slot][end] for done, slot, end in zip(complete, slots, ends, strict=True)]
    off = {name: np.full(count, field.off, field.dtype) for name, field in SAMPLING_FIELDS.items()}
    zeros, ones = np.zeros(count, np.int32), np.ones(count, np.bool_)
    columns = {
        **off,
        **dict.fromkeys(("masked", "kept_from", "seed_low", "seed_high"), zeros),
        **dict.fromkeys(("greedy", "raw_logprobs", "wants_top", "wants_prompt_logprobs"), ones),
        "forced": given(slots, 0),
        "next_token": np.asarray(following, np.int32),
        "limit": np.full(count, 1 << 20, np.int32),
    }
    return runner().prefill(step, columns, (places, features())).result()


def distribution(result: StepResult, row: int) -> np.ndarray:
    """Log-probabilities of all tokens, by id."""
    assert result.top_tokens is not None and result.top_logprobs is not None
    found = np.empty(VOCAB, np.float32)
    found[result.top_tokens[row, 0]] = result.top_logprobs[row, 0]
    return found


def near(found: Any, wanted: np.ndarray) -> None:
    """1e-4 is what the golden README demands of logits end to end in this precision."""
    np.testing.assert_allclose(found, wanted, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_images_in_chunks_beside_text_give_the_golden_logits_and_so_do_decode_steps(chunk: int) -> None:
    """The spans stand at 5…12 and 22…25, so that chunks of 1 and 5 cut both; text runs beside them as one chunk."""
    prompts = prompt_ids()
    ends = [*range(chunk, len(prompts[0]), chunk), len(prompts[0])]
    along: list[float] = []
    for start, end in zip([0, *ends], ends, strict=False):
        slots = [0, 1] if start == 0 else [0]
        result = prefill(slots, [start, 0][: len(slots)], [end, len(prompts[1])][: len(slots)])
        assert result.prompt_logprobs is not None and result.finite.all()
        along += result.prompt_logprobs[0, : end - start].tolist()
        if start == 0:
            near(distribution(result, 1), log_softmax(TEXT["prefill/logits"][0, -1]))
    near(distribution(result, 0), log_softmax(IMAGES["prefill/logits"][0, -1]))
    assert distribution(result, 0).argmax() == IMAGES["prefill/out_ids"][0]

    targets = prompts[0][1:]
    wanted = log_softmax(IMAGES["prefill/logits"][0])[np.arange(len(targets)), np.minimum(targets, VOCAB - 1)]
    near(along[:-1], np.where(targets < VOCAB, wanted, -9999))  # an id outside the vocabulary has no probability

    lengths = [len(prompt) for prompt in prompts]
    for number in range(DECODED):
        starts = [length + number for length in lengths]
        step = DecodeStep(bucket=DECODE, **where([0, 1], starts, [start + 1 for start in starts], 1))
        result = runner().decode(step, given([0, 1], 1 + number)[:, None], None, True).result()
        assert result.finite.all()
        for row, case in enumerate(GOLDEN):
            near(distribution(result, row), log_softmax(case["decode/logits"][number, 0, 0]))
            assert distribution(result, row).argmax() == case["decode/out_ids"][number, 0]
