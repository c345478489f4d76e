"""Images through the engine on golden A: what the model authors' code computed, however a prompt is cut and in whatever
company, and nothing in common between prompts that differ in an image only.

Golden decode steps are teacher-forced; `golden_token_ids` forces the engine along. In "float32_exact" no rounding can
flip a token (design.md §5).
"""

import dataclasses
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from deepinfer_jax import LLM, RequestOutput, SamplingParams
from deepinfer_jax.scheduler.chunks import PrefillPolicy
from tests.support.drafting import drafts
from tests.support.engine_runs import drain
from tests.support.golden import log_softmax
from tests.support.paths import GOLDEN_A
from tests.support.real_model import long_golden_a, tokens_of

pytestmark = pytest.mark.real

GOLDEN = np.load(GOLDEN_A / "img.f32nq.npz")
IDS, PREFILL = GOLDEN["input_ids"][0], int(GOLDEN["prefill_len"])
PROMPT, FORCED = IDS[:PREFILL].tolist(), IDS[PREFILL:].tolist()
IMAGES = [GOLDEN["image0/rgb"], GOLDEN["image1/rgb"]]
VOCAB, IMAGE = 192, 188
LOGITS = np.concatenate([GOLDEN["prefill/logits"][0, -1:], GOLDEN["decode/logits"][:, 0, 0]])
SIZES: dict[str, Any] = {
    "precision": "float32_exact",
    "max_num_seqs": 4,
    "max_model_len": 160,
    "tokens_per_block": 8,
    "decode_sequence": False,
}
TEXT = np.random.default_rng(5).integers(3, IMAGE, 40).tolist()
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
ALONG = SamplingParams(max_tokens=7, ignore_eos=True, golden_token_ids=FORCED, top_logprobs=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return long_golden_a(tmp_path_factory.mktemp("models") / "a")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    """Without drafts; its prefill programs take up to 64 tokens."""
    with drafts(0):
        llm = LLM(folder, max_num_batched_tokens=64, **SIZES)
    yield llm
    llm.close()


def images(*sources: Any) -> dict[str, Any]:
    return {"image_bytes": list(sources)}


def ask(llm: LLM, *requests: tuple[list[int], Any], params: SamplingParams = GREEDY) -> list[list[RequestOutput]]:
    """Outputs of requests, (ids, multi_modal_data) each; afterwards nothing is held."""
    results: list[list[RequestOutput]] = llm.generate(
        prompt_token_ids=[ids for ids, _ in requests],
        sampling_params=params,
        multi_modal_data=[data for _, data in requests],
        use_tqdm=False,
    )
    check_idle(llm)
    return results


def check_idle(llm: LLM) -> None:
    stats = llm.llm_engine.stats()
    assert (stats["free_blocks"], stats["free_slots"]) == (stats["total_blocks"], stats["total_slots"])
    assert stats["num_requests_awaiting_images"] == 0


def check_golden(outputs: list[RequestOutput]) -> None:
    reference = log_softmax(LOGITS)
    assert [output.token_id for output in outputs[:-1]] == FORCED
    for output, wanted in zip(outputs, reference, strict=True):
        assert output.top_token_ids[:3] == np.argsort(-wanted, kind="stable")[:3].tolist()
        # 1e-4 is what the golden README demands end to end in this precision.
        np.testing.assert_allclose(output.top_logprobs[:3], np.sort(wanted)[::-1][:3], atol=1e-4)


def spelled(how: str) -> list[int]:
    """The golden prompt, which has 188 wherever an image is."""
    spans = [(5, 13), (22, 26)]
    ids: list[int] = []
    at = 0
    for start, stop in spans:
        ids += PROMPT[at:start]
        ids += {"single": [IMAGE], "deepinfer": [VOCAB + 2] + [VOCAB + 1] * (stop - start - 1)}[how]
        at = stop
    return ids + PROMPT[at:]


def test_every_spelling_of_the_golden_prompt_gives_the_golden_tokens(llm: LLM) -> None:
    compiled = llm.llm_engine.compile_count
    alone = ask(llm, (TEXT, None), params=ALONG)[0]
    kinds = [IMAGES, [Image.fromarray(image) for image in IMAGES], [png(image) for image in IMAGES]]
    prompts = [PROMPT, spelled("single"), spelled("deepinfer")]
    requests = [(ids, images(*sources)) for ids, sources in zip(prompts, kinds, strict=True)]
    *found, text = ask(llm, *requests, (TEXT, None), params=ALONG)
    for outputs in found:
        check_golden(outputs)
        assert outputs[0].prompt_len == PREFILL
    assert [o.top_token_ids[:3] for o in text] == [o.top_token_ids[:3] for o in alone]
    assert llm.llm_engine.compile_count == compiled


def png(image: np.ndarray, form: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, form)
    return buffer.getvalue()


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_a_prompt_cut_anywhere_gives_the_same_tokens(llm: LLM, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut in the middle of its images too, which are encoded once."""
    policy = PrefillPolicy
    whole = policy._count
    monkeypatch.setattr(policy, "_count", lambda *args, **kwargs: min(whole(*args, **kwargs), chunk))
    before = llm.llm_engine.stats()
    fresh = [np.roll(image, chunk, 0) for image in IMAGES]  # not seen before
    adjacent = [7, IMAGE, IMAGE, 9]
    ends = [IMAGE, 8, IMAGE]
    (golden,) = ask(llm, (PROMPT, images(*IMAGES)), params=dataclasses.replace(ALONG, prompt_logprobs=True))
    check_golden(golden)  # with prompt_logprobs nothing is reused
    others = ask(llm, (adjacent, images(*fresh)), (ends, images(*fresh)))
    after = llm.llm_engine.stats()
    assert after["num_images_encoded"] - before["num_images_encoded"] <= 4
    monkeypatch.undo()
    again = ask(llm, (adjacent, images(*fresh)), (ends, images(*fresh)))
    assert tokens_of(others) == tokens_of(again)
    assert llm.llm_engine.stats()["num_images_encoded"] == after["num_images_encoded"]


def test_prompts_that_differ_in_an_image_only_share_nothing_from_there_on(llm: LLM) -> None:
    ids = [*TEXT[20:], IMAGE, *TEXT[:20]]
    first, second = IMAGES[0], 255 - IMAGES[0]
    cold = [ask(llm, (ids, images(image)))[0] for image in (first, second)]
    assert tokens_of([cold[0]]) != tokens_of([cold[1]])
    assert cold[0][0].num_cached_tokens == 0
    assert cold[1][0].num_cached_tokens <= 16  # the blocks before the image, if anything
    encoded = llm.llm_engine.stats()["num_images_encoded"]
    warm = [ask(llm, (ids, images(image)))[0] for image in (first, second)]
    assert tokens_of(warm) == tokens_of(cold)
    assert [outputs[0].num_cached_tokens for outputs in warm] == [40, 40]  # of 48 tokens at least one is computed
    assert llm.llm_engine.stats()["num_images_encoded"] == encoded


def test_damaged_images_end_alone(llm: LLM) -> None:
    """What still opens is answered; the text beside it gives its tokens, and nothing is held afterwards."""
    rng = np.random.default_rng(0)
    (alone,) = ask(llm, (TEXT, None))
    requests: list[tuple[list[int], Any]] = []
    for number in range(32):
        data = bytearray(png(IMAGES[0], ("PNG", "JPEG", "WEBP", "GIF")[number % 4]))
        for _ in range(3):
            data[rng.integers(len(data))] = rng.integers(256)
        requests.append(([5, IMAGE, 6], images(bytes(data[: rng.integers(1, len(data))] if number % 3 else data))))
    for number, (ids, data) in enumerate([(TEXT, None), *requests]):
        llm.llm_engine.add_request("u", str(number), GREEDY, ids, data)
    found = drain(llm.llm_engine)
    check_idle(llm)
    assert tokens_of([found["0"]]) == tokens_of([alone])
    reasons = [found[str(number)][-1].finish_reason for number in range(1, 33)]
    assert set(reasons) == {"ve_error", "length"}
    assert all(
        "image 0 of the request" in found[str(i + 1)][-1].message for i, r in enumerate(reasons) if r != "length"
    )


@pytest.mark.slow
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_preemption_and_drafts_change_nothing(folder: Path, llm: LLM, num_drafts: int) -> None:
    requests = [
        ([*TEXT[: 3 * i], IMAGE, *TEXT[: 20 - i], IMAGE], images(IMAGES[i % 2], np.roll(IMAGES[0], i, 1)))
        for i in range(6)
    ]
    params = dataclasses.replace(GREEDY, max_tokens=30)
    wanted = tokens_of(ask(llm, *requests, params=params))
    with drafts(num_drafts):
        tight = LLM(folder, **SIZES | {"num_kv_blocks": 24})
    found = ask(tight, *requests, params=params)
    assert tokens_of(found) == wanted
    assert tight.llm_engine.stats()["num_preemptions"] > 0
    check_golden(ask(tight, (PROMPT, images(*IMAGES)), params=ALONG)[0])
    tight.close()
