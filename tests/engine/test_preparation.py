"""`prepare`: what each refusal says and ends with, and that every door says the same of the same request."""

import asyncio
import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from deepinfer_jax.engine.async_engine import AsyncLLMEngine
from deepinfer_jax.engine.images.request_images import RequestImages
from deepinfer_jax.engine.llm import LLM
from deepinfer_jax.engine.llm_engine import LLMEngine
from deepinfer_jax.engine.requests.preparation import Prepared, Refusal, RequestRules, prepare, with_opened_images
from deepinfer_jax.engine.requests.sampling_params import SamplingParams
from deepinfer_jax.scheduler import Limits
from deepinfer_jax.tokenization import ImageError, ImagePrompt
from tests.support.async_toy import read
from tests.support.toy import MAX_POSITIONS, VOCAB, run, toy_engine, toy_parts

pytestmark = [pytest.mark.toy, pytest.mark.unoptimised]

RULES = RequestRules(
    vocab_size=VOCAB,
    lengths=Limits(
        max_num_seqs=4,
        max_model_len=MAX_POSITIONS,
        max_num_batched_tokens=MAX_POSITIONS,
        prompt_limit=MAX_POSITIONS,
        num_blocks=20,
        tokens_per_block=4,
        decodes=True,
    ),
)
SEEING = dataclasses.replace(RULES, has_vision_tower=True)
IMAGES = {"image_bytes": [b"x"]}
PLAIN = SamplingParams()


def regex(**fields: Any) -> SamplingParams:
    return SamplingParams(so_args={"schema_type": "regex", "schema": "a+"} | fields)


# What is wrong, the sentence, and whether `add_request` drops it with a line in the log.
INVALID: list[tuple[Any, SamplingParams, Any, str, bool]] = [
    ([], PLAIN, None, "prompt must not be empty", False),
    ([1.5], PLAIN, None, "prompt token ids must be integers", False),
    (5, PLAIN, None, "prompt token ids must be one list of integers", False),
    ([[5], [6, 7]], PLAIN, None, "prompt token ids must be one list of integers", False),
    ([5, -1], PLAIN, None, "token id -1 at position 1 is outside the vocabulary", True),
    ([VOCAB], PLAIN, None, f"token id {VOCAB} at position 0 stands for a part of an image", True),
    ([5], SamplingParams(golden_token_ids=[-1, VOCAB + 9]), None, f"golden_token_ids: token id {VOCAB + 9}", True),
    ([5], SamplingParams(logit_bias={VOCAB: 1}), None, f"logit_bias: token id {VOCAB}", True),
    ([5], SamplingParams(stop_token_ids=[99]), None, "stop_token_ids: token id 99", True),
    ([5], regex(trigger_token_ids=[5, 99]), None, "trigger_token_ids: token id 99 at position 1", True),
    ([5], regex(trigger_token_ids=[5], bound_token_id=99), None, "bound_token_id: token id 99", True),
    ([5], PLAIN, IMAGES, "the model has no vision tower", False),
    ([5], PLAIN, {"images": []}, "multi_modal_data has unknown keys", False),
    ([5], PLAIN, [b""], "multi_modal_data must be a dict", False),
]
TOO_LONG: list[tuple[Any, SamplingParams, Any, str]] = [
    (list(range(4, 5 + MAX_POSITIONS)), PLAIN, None, f"the prompt has {MAX_POSITIONS + 1} tokens, the limit is"),
]


def refused(ids: Any, params: SamplingParams, images: Any, rules: RequestRules = RULES, **kwargs: Any) -> Refusal:
    refusal = prepare(ids, params, images, rules, **kwargs)
    assert isinstance(refusal, Refusal)
    return refusal


@pytest.mark.parametrize(("ids", "params", "images", "sentence", "drops"), INVALID)
def test_what_is_wrong_is_an_invalid_prompt(
    ids: Any, params: SamplingParams, images: Any, sentence: str, drops: bool
) -> None:
    refusal = refused(ids, params, images)
    assert refusal.sentence.startswith(sentence)
    assert (refusal.finish_reason, refusal.drops, refusal.is_too_long) == ("invalid_prompt", drops, False)
    assert refusal.params is params


@pytest.mark.parametrize(("ids", "params", "images", "sentence"), TOO_LONG)
def test_what_is_only_too_long_keeps_its_ids(ids: Any, params: SamplingParams, images: Any, sentence: str) -> None:
    refusal = refused(ids, params, images)
    assert refusal.sentence.startswith(sentence)
    assert (refusal.finish_reason, refusal.drops, refusal.is_too_long) == ("prompt_length_exceeded", False, True)
    assert refusal.token_ids.tolist() == ids


def test_a_pool_that_a_request_does_not_fit_into_refuses_it_with_the_arithmetic() -> None:
    small = dataclasses.replace(RULES, lengths=dataclasses.replace(RULES.lengths, num_blocks=5))
    refusal = refused([5] * 20, SamplingParams(max_tokens=9), None, small)
    assert refusal.is_too_long and "need 7 blocks of 4 tokens, the pool has 5" in refusal.sentence


def test_what_depends_on_the_engine_is_checked_by_its_rules() -> None:
    several = SamplingParams(n=2)
    assert refused([5], several, None).sentence == "a request is one completion, got n=2; LLM.generate gives several"
    assert isinstance(prepare([5], several, None, RULES, several=True), Prepared)
    replayed = dataclasses.replace(RULES, keep_tokens=8)
    assert (
        "only those of its last 8 tokens" in refused([5], SamplingParams(prompt_logprobs=True), None, replayed).sentence
    )
    assert isinstance(prepare([5], SamplingParams(prompt_logprobs=True), None, RULES), Prepared)
    assert isinstance(prepare([5, VOCAB + 1], PLAIN, IMAGES, SEEING), Prepared)  # a part of its image
    assert refused([5, VOCAB + 5], PLAIN, IMAGES, SEEING).drops


def test_what_is_prepared_is_a_copy_with_everything_read() -> None:
    ids, data = np.asarray([5, 6], np.int64), {"image_bytes": [b"x"], "image_sizes": [(3, 4)]}
    prepared = prepare(ids, regex(), data, SEEING)
    ids[:] = 0
    data["image_bytes"].clear()
    assert isinstance(prepared, Prepared) and prepared.structured is not None and prepared.unopened is not None
    assert (prepared.token_ids.tolist(), prepared.token_ids.dtype) == ([5, 6], np.int32)
    assert prepared.unopened.data() == {"image_bytes": [b"x"], "image_sizes": [(3, 4)]}
    assert prepare(ids, PLAIN, prepared.unopened, SEEING).unopened is prepared.unopened  # type: ignore[union-attr]


@pytest.mark.parametrize("data", [None, {}, {"image_bytes": [], "image_sizes": []}])
def test_no_image_is_text(data: Any) -> None:
    prepared = prepare([5], PLAIN, data, RULES)
    assert isinstance(prepared, Prepared) and not prepared.with_images


def test_images_that_never_arrived_are_found_when_they_are_opened() -> None:
    prepared = prepare([5], PLAIN, {"image_bytes": None}, SEEING)
    assert isinstance(prepared, Prepared) and prepared.unopened is not None
    assert prepared.unopened.data()["image_bytes"] is None
    assert RequestImages.of(prepared.unopened) is prepared.unopened


def test_opened_images_change_the_prompt_or_end_the_request() -> None:
    prepared = prepare([5], PLAIN, IMAGES, SEEING)
    assert isinstance(prepared, Prepared)

    def opened(length: int) -> ImagePrompt:
        ids = np.full(length, VOCAB + 1, np.int32)
        return ImagePrompt(ids, np.zeros_like(ids), ())

    changed = with_opened_images(prepared, opened(9), SEEING)
    assert isinstance(changed, Prepared) and len(changed.token_ids) == 9 and changed.unopened is None
    again = prepare("is not looked at", PLAIN, opened(9), SEEING)
    assert isinstance(again, Prepared) and len(again.token_ids) == 9
    assert refused([5], PLAIN, opened(9)).sentence.startswith("the model has no vision tower")
    for outcome, reason in [
        (opened(MAX_POSITIONS + 1), "prompt_length_exceeded"),
        (ImageError("bad bytes"), "ve_error"),
        (ValueError("no place"), "invalid_prompt"),
    ]:
        refusal = with_opened_images(prepared, outcome, SEEING)
        assert isinstance(refusal, Refusal) and refusal.finish_reason == reason


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deepinfer_jax.engine.llm_engine.load_parts", toy_parts)
        llm = LLM("toy", max_num_seqs=6, tokens_per_block=4, decode_sequence=False)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def engine() -> Iterator[LLMEngine]:
    engine = toy_engine()
    yield engine
    engine.close()


class Asynchronous:
    """An `AsyncLLMEngine` for one call after another, each on an event loop of its own."""

    def __init__(self) -> None:
        self.engine = AsyncLLMEngine.from_engine(toy_engine())

    def says(self, ids: Any, params: SamplingParams, images: Any) -> str:
        """The error of a request, or the message of its one output."""

        async def main() -> str:
            try:
                (output,) = await read(self.engine.generate(ids, params, "r", multi_modal_data=images))
            except ValueError as error:
                return str(error)
            return output.message

        return asyncio.run(main())


@pytest.fixture(scope="module")
def asynchronous() -> Iterator[Asynchronous]:
    asynchronous = Asynchronous()
    yield asynchronous
    asyncio.run(asynchronous.engine.close())


@pytest.mark.parametrize(("ids", "params", "images", "sentence", "drops"), INVALID)
def test_every_door_says_the_same_of_a_wrong_request(
    ids: Any,
    params: SamplingParams,
    images: Any,
    sentence: str,
    drops: bool,
    llm: LLM,
    engine: LLMEngine,
    asynchronous: Asynchronous,
    caplog: pytest.LogCaptureFixture,
) -> None:
    whole = refused(ids, params, images, engine.rules).sentence
    assert whole.startswith(sentence)

    def generate(on_invalid: Any) -> Any:
        return llm.generate(None, [params, PLAIN], [ids, [5]], False, [images, None], on_invalid=on_invalid)

    with pytest.raises(ValueError, match=r"^prompt 0: ") as raised:
        generate("raise")
    assert str(raised.value) == f"prompt 0: {whole}"
    (output,), others = generate("report")
    assert (output.finish_reason, output.message, output.finished) == ("invalid_prompt", whole, True)
    assert others[-1].finish_reason == "length" and llm.last_errors == {0: f"prompt 0: {whole}"}

    if drops:
        with caplog.at_level("INFO"):
            assert engine.add_request("u", "r", params, ids, images) is None
        assert f"request r is dropped: {whole}" in caplog.text
    else:
        with pytest.raises(ValueError) as raised:
            engine.add_request("u", "r", params, ids, images)
        assert str(raised.value) == f"request r: {whole}"
    assert not engine.has_unfinished_requests()

    assert asynchronous.says(ids, params, images) == f"request r: {whole}"


@pytest.mark.parametrize(("ids", "params", "images", "sentence"), TOO_LONG)
def test_every_door_accepts_what_is_too_long_and_says_so_in_one_output(
    ids: Any,
    params: SamplingParams,
    images: Any,
    sentence: str,
    llm: LLM,
    engine: LLMEngine,
    asynchronous: Asynchronous,
) -> None:
    whole = refused(ids, params, images, engine.rules).sentence
    ((output,),) = llm.generate(None, params, [ids], False, on_invalid="report")
    assert (output.finish_reason, output.message) == ("prompt_length_exceeded", whole)
    engine.add_request("u", "r", params, ids)
    (output,) = run(engine)["r"]
    assert (output.finish_reason, output.message) == ("prompt_length_exceeded", f"request r: {whole}")
    assert asynchronous.says(ids, params, images) == f"request r: {whole}"
