"""Requests with images on the toy model: waiting, failing, aborting, and what they have in common with text."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from deepinfer_jax.engine.async_engine import AsyncLLMEngine
from deepinfer_jax.engine.llm import LLM
from deepinfer_jax.engine.llm_engine import LLMEngine
from deepinfer_jax.engine.requests.sampling_params import SamplingParams
from deepinfer_jax.structured import pool
from tests.support.async_toy import read
from tests.support.engine_runs import while_unfinished
from tests.support.interrupts import Interrupt
from tests.support.toy import IMAGE, VOCAB, greedy_twin, make_table, random_prompt, run, tokens, toy_engine
from tests.support.toy_grammar import TOKENIZER, constrained_twin
from tests.support.toy_images import HeldProcessor, expanded, image_engine, image_parts, toy_image

pytestmark = [pytest.mark.toy, pytest.mark.unoptimised]

TABLE = make_table()
IDS, TEXT = [5, IMAGE, 6], [5, 9, 6]


def greedy(count: int = 5, **kwargs: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, **kwargs)


def images(*sources: Any) -> dict[str, Any]:
    return {"image_bytes": list(sources)}


@pytest.fixture(scope="module")
def engine() -> Iterator[LLMEngine]:
    engine = image_engine()
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def nothing_is_left(engine: LLMEngine) -> Iterator[None]:
    yield
    held(engine).may.set()
    assert not engine.has_unfinished_requests()
    engine.step()  # what has started or ended gives its room back
    stats = engine.stats()
    assert (stats["num_requests_awaiting_images"], stats["image_bytes_waiting"]) == (0, 0)
    assert (stats["free_blocks"], stats["free_slots"]) == (stats["total_blocks"], stats["total_slots"])


def held(engine: LLMEngine) -> HeldProcessor:
    processor = engine.images._processor
    assert isinstance(processor, HeldProcessor)
    return processor


def test_images_take_their_places_in_every_spelling_beside_text(engine: LLMEngine) -> None:
    wide = expanded((8, 4))
    prompts = {
        "single": ([5, IMAGE, 6, IMAGE], [5, *expanded(), 6, *wide]),
        "reference": ([5, *[IMAGE] * 4, 6, *[IMAGE] * 5], [5, *expanded(), 6, *wide]),
        "deepinfer": ([5, *expanded(), 6, *wide], [5, *expanded(), 6, *wide]),
        "adjacent": ([IMAGE, IMAGE, 7], [*expanded(), *wide, 7]),
    }
    compiled = engine.compile_count
    for name, (ids, _) in prompts.items():
        engine.add_request("u", name, greedy(), ids, images(toy_image(), toy_image((8, 4))))
        engine.add_request("u", f"text {name}", greedy(), random_prompt(9))
    found = run(engine)
    for name, (_, whole) in prompts.items():
        assert tokens(found[name]) == greedy_twin(TABLE, whole, 5), name
        assert found[name][0].prompt_len == len(whole)
        assert tokens(found[f"text {name}"]) == greedy_twin(TABLE, random_prompt(9), 5)
    assert engine.compile_count == compiled


def test_a_request_waits_for_its_images_without_spinning_while_others_run(engine: LLMEngine) -> None:
    held(engine).may.clear()
    sequence = engine.add_request("u", "a", greedy(), IDS, images(toy_image()))
    assert sequence is not None and not sequence.schedulable
    engine.add_request("u", "text", greedy(4), TEXT)
    order, steps = [], 0
    while len(order) < 4:
        order += [output.request_id for output in engine.step()]
    assert order == ["text"] * 4
    stats = engine.stats()
    assert (stats["num_waiting"], stats["num_requests_awaiting_images"]) == (1, 1)
    threading.Timer(0.3, held(engine).may.set).start()
    outputs = []
    for _ in while_unfinished(engine):
        outputs += engine.step()
        steps += 1
    assert tokens(outputs) == greedy_twin(TABLE, [5, *expanded(), 6], 5)
    assert steps < 100  # of steps that wait for nothing there would be thousands


def test_a_request_may_be_aborted_while_its_images_are_opened_and_its_name_is_free(engine: LLMEngine) -> None:
    held(engine).may.clear()
    engine.add_request("u", "a", greedy(), IDS, images(toy_image()))
    engine.step()
    assert engine.abort_request("a") == (1, 3)
    (output,) = run(engine)["a"]
    assert output.finish_reason == "abort"
    held(engine).may.set()
    engine.add_request("u", "a", greedy(), IDS, images(toy_image()))
    assert tokens(run(engine)["a"]) == greedy_twin(TABLE, [5, *expanded(), 6], 5)


def test_what_is_wrong_with_images_ends_their_request_alone(engine: LLMEngine) -> None:
    engine.add_request("u", "text", greedy(), TEXT)
    wrong = {
        "bytes": (IDS, images(b"no image"), "ve_error", "image 0 of the request: 8 bytes are not an image"),
        "gone": (IDS, {"image_bytes": None}, "ve_error", "the images of the request never arrived"),
        "count": (TEXT, images(toy_image()), "invalid_prompt", "0 runs of image tokens"),
        "size": (IDS, images(toy_image()) | {"image_sizes": [(5, 4)]}, "ve_error", "its declared size is 5 x 4"),
        "long": (
            [*range(5, 40), IMAGE, IMAGE],
            images(toy_image(), toy_image()),
            "prompt_length_exceeded",
            "43 tokens",
        ),
        "gap": ([5, VOCAB + 1], images(toy_image()), "invalid_prompt", f"id {VOCAB + 1} at position 1"),
    }
    for name, (ids, data, _, _) in wrong.items():
        engine.add_request("u", name, greedy(), ids, data)
    found = run(engine)
    for name, (_, _, reason, sentence) in wrong.items():
        (output,) = found[name]
        assert (output.finish_reason, output.finished) == (reason, True), name
        assert sentence in output.message and output.message.startswith(f"request {name}: ")
    assert found["long"][0].prompt_len == 43
    assert tokens(found["text"]) == greedy_twin(TABLE, TEXT, 5)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"images": [b""]}, "request a: multi_modal_data has unknown keys"),
        ([b""], "request a: multi_modal_data must be a dict"),
        ({"image_bytes": b""}, "must be a list of images, not a bytes"),
        ({"image_bytes": [7]}, "image 0 of the request: an image is given as bytes"),
        ({"image_bytes": [b""], "image_sizes": 3}, "must be a list of sizes"),
        ({"image_bytes": [b""], "image_sizes": []}, "1 images but 0 sizes"),
    ],
)
def test_what_is_no_image_data_is_an_error_at_once(engine: LLMEngine, data: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        engine.add_request("u", "a", greedy(), IDS, data)


def test_ids_are_checked_at_once_and_no_image_is_text(engine: LLMEngine, caplog: pytest.LogCaptureFixture) -> None:
    assert engine.add_request("u", "a", greedy(), [5, VOCAB + 5, IMAGE], images(toy_image())) is None
    assert engine.add_request("u", "a", greedy(), [5, VOCAB + 2]) is None
    for name, data in (("a", None), ("b", {}), ("c", {"image_bytes": [], "image_sizes": []})):
        sequence = engine.add_request("u", name, greedy(), IDS, data)
        assert sequence is not None and sequence.schedulable
    found = run(engine)
    assert [tokens(found[name]) for name in "abc"] == [greedy_twin(TABLE, IDS, 5)] * 3
    assert "there is no image; it is ordinary text" in caplog.text


@pytest.mark.parametrize("last", ["grammar", "images"])
def test_a_request_may_wait_for_a_grammar_and_for_images(last: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, may_compile = image_engine(tokenizer=TOKENIZER), threading.Event()
    compile_grammar = pool.compile_grammar
    monkeypatch.setattr(pool, "compile_grammar", lambda *args: may_compile.wait(60) and compile_grammar(*args))
    held(engine).may.clear()
    so_args = {"schema_type": "regex", "schema": "[0-9]{3}[a-f]+"}
    sequence = engine.add_request("u", "a", greedy(so_args=so_args), IDS, images(toy_image()))
    assert sequence is not None
    engine.step()
    first, then = (held(engine).may, may_compile) if last == "grammar" else (may_compile, held(engine).may)
    first.set()
    while len(sequence.request.awaits) == 2:
        engine.step()
    assert not sequence.schedulable and engine.step() == []
    then.set()
    assert tokens(run(engine)["a"]) == constrained_twin([5, *expanded(), 6], so_args, 5)
    engine.close()


def test_a_step_that_fails_leaves_a_request_that_waits_for_its_images(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    held(engine).may.clear()
    engine.add_request("u", "a", greedy(), IDS, images(toy_image()))
    engine.add_request("u", "text", greedy(), TEXT)
    with monkeypatch.context() as patch:
        patch.setattr(engine.core.runner, "prefill", lambda *_: (_ for _ in ()).throw(RuntimeError("gone")))
        with pytest.raises(RuntimeError, match="gone"):
            engine.step()
    held(engine).may.set()
    found = run(engine)
    assert "a step of the engine failed" in found["text"][0].message
    assert tokens(found["a"]) == greedy_twin(TABLE, [5, *expanded(), 6], 5)


@pytest.mark.parametrize("number", [0, 1], ids=["add_request", "step"])
def test_an_interrupt_at_any_line_leaves_nobody_waiting_for_images(engine: LLMEngine, number: int) -> None:
    def opened() -> None:
        """A step that finds the images of the request opened."""
        if engine.images.pending:
            engine.images.wait(60)
        engine.step()

    def lines_of_call(at: int | None) -> int:
        """Lines of call `number`, which is interrupted at one of them."""
        interrupt = Interrupt(at)
        calls = [lambda: engine.add_request("u", "a", greedy(1), IDS, images(toy_image())), opened]
        for place, call in enumerate(calls):
            interrupt.during(call, None) if place == number else call()
        for _ in range(1000):
            if not engine.has_unfinished_requests():
                break
            engine.step()
        assert not engine.has_unfinished_requests(), f"wedged by an interrupt at line {at}"
        engine.step()
        assert engine.stats()["image_bytes_waiting"] == 0, at
        return interrupt.lines

    # A step begins with the images; the rest of it is the same for text, and tested with it.
    for at in range(1, min(lines_of_call(None), 200)):
        lines_of_call(at)


def test_images_that_were_opened_elsewhere_need_a_vision_tower_too(engine: LLMEngine) -> None:
    (opened,) = engine.images.open_all([(np.asarray(IDS, np.int32), images(toy_image()))])
    with_tower, without = engine, toy_engine()
    with_tower.add_request("u", "a", greedy(), [], opened)
    assert tokens(run(with_tower)["a"]) == greedy_twin(TABLE, [5, *expanded(), 6], 5)
    with pytest.raises(ValueError, match="request a: the model has no vision tower"):
        without.add_request("u", "a", greedy(), [], opened)
    without.close()


def test_the_callers_data_is_read_once_and_not_changed(engine: LLMEngine) -> None:
    held(engine).may.clear()
    data, ids = images(toy_image()), np.asarray(IDS)
    engine.add_request("u", "a", greedy(), ids, data)
    assert data.keys() == {"image_bytes"} and len(data["image_bytes"]) == 1
    data["image_bytes"].clear()
    ids[:] = 0
    held(engine).may.set()
    assert tokens(run(engine)["a"]) == greedy_twin(TABLE, [5, *expanded(), 6], 5)


def test_llm_answers_texts_and_images_in_order_and_completions_share_their_image(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("deepinfer_jax.engine.llm_engine.load_parts", image_parts)
    llm = LLM("toy", max_num_seqs=6, tokens_per_block=4, decode_sequence=False)
    data = [images(toy_image()), None, {"image_bytes": [], "image_sizes": []}]
    found: Any = llm.generate(["5<image>6", "569", "A"], [greedy(n=3), greedy(), greedy()], multi_modal_data=data)
    whole = greedy_twin(TABLE, [5, *expanded(), 6], 5)
    assert [tokens(one) for one in found[0]] == [whole] * 3
    assert [tokens(one) for one in found[1:]] == [greedy_twin(TABLE, ids, 5) for ids in ([5, 6, 9], [17])]
    assert llm.llm_engine.stats()["num_images_opened"] == 1
    (single,) = llm.generate("5<image>6", greedy(), multi_modal_data=images(toy_image()))
    assert tokens(single) == whole

    steps = llm.llm_engine.stats()["num_steps"]
    bad = [images(toy_image()), images(b"x"), images(toy_image(), toy_image()), images(toy_image())]
    prompts = ["5<image>6", "<image>", "<image>", "A" * 37 + "<image>"]
    with pytest.raises(ValueError, match="prompt 1: image 0 of the request: 1 bytes are not an image"):
        llm.generate(prompts, greedy(), multi_modal_data=bad)
    assert llm.llm_engine.stats()["num_steps"] == steps  # nothing ran
    found = llm.generate(prompts, greedy(), multi_modal_data=bad, on_invalid="report")
    assert tokens(found[0]) == whole
    reasons = [outputs[-1].finish_reason for outputs in found[1:]]
    assert reasons == ["ve_error", "invalid_prompt", "prompt_length_exceeded"]
    assert list(llm.last_errors) == [1, 2, 3] and found[3][-1].prompt_len == 41
    llm.close()


def test_warn_does_what_deepinfer_does_with_images_that_do_not_match() -> None:
    engine = image_engine(on_image_mismatch="warn")
    engine.add_request("u", "more", greedy(), IDS, images(toy_image(), toy_image()))
    engine.add_request("u", "none", greedy(), TEXT, images(toy_image()))
    found = run(engine)
    assert tokens(found["more"]) == greedy_twin(TABLE, [5, *expanded(), 6], 5)
    assert tokens(found["none"]) == greedy_twin(TABLE, TEXT, 5)
    engine.close()


def test_requests_with_images_stream_and_can_be_left() -> None:
    async def main() -> None:
        llm_engine = image_engine()
        async with AsyncLLMEngine.from_engine(llm_engine) as engine:
            outputs = await read(engine.generate(IDS, greedy(), multi_modal_data=images(toy_image())))
            assert tokens(outputs) == greedy_twin(TABLE, [5, *expanded(), 6], 5)
            with pytest.raises(ValueError, match="unknown keys"):
                await read(engine.generate(IDS, greedy(), multi_modal_data={"image": 1}))
            held(llm_engine).may.clear()
            left = asyncio.create_task(read(engine.generate(IDS, greedy(), "a", multi_modal_data=images(toy_image()))))
            while not (await engine.stats())["num_requests_awaiting_images"]:
                pass
            left.cancel()
            await asyncio.gather(left, return_exceptions=True)
            while (await engine.stats())["num_waiting"]:
                pass
            held(llm_engine).may.set()
            (output,) = await read(engine.generate(IDS, greedy(), "a", multi_modal_data=images(b"x")))
            assert output.finish_reason == "ve_error"
            llm_engine.core.scheduler.check_idle()

    asyncio.run(main())
