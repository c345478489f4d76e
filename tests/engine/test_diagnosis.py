"""A request whose logits are no distribution fails alone, and its message names the first bad tensor and position."""

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import Params, encode_image, forward, load_config, load_params
from deepinfer_jax.engine import diagnosis
from deepinfer_jax.engine.args import EngineArgs
from deepinfer_jax.engine.diagnosis import CHUNK, explain_failures, first_fault, make_diagnosis
from deepinfer_jax.engine.llm_engine import LLMEngine
from deepinfer_jax.engine.requests.outputs import RequestOutput
from deepinfer_jax.engine.requests.sampling_params import SamplingParams
from deepinfer_jax.kernels.choice import KernelChoice
from deepinfer_jax.scheduler import SequenceStatus
from deepinfer_jax.tokenization import MultimodalProcessor, get_hf_tokenizer
from tests.support.engine_runs import drain
from tests.support.paths import GOLDEN_A
from tests.support.sequences import running_sequence

pytestmark = pytest.mark.real

PRECISION = "float32"
POISONED = 77  # a token
TEXT = np.random.default_rng(0).integers(100, 192, CHUNK + 40).astype(np.int32)


@pytest.fixture(scope="module")
def params() -> Params:
    return load_params(GOLDEN_A, load_config(GOLDEN_A), precision=PRECISION)


def spoiled(params: Params, path: str, change: Callable[[jax.Array], jax.Array]) -> Params:
    """With the parameter at `path`, such as "layers.3.attn.wo_b", changed."""

    def of(node: Any, names: list[str]) -> Any:
        if not names:
            return change(node)
        if isinstance(node, tuple | list):
            index = int(names[0])
            return type(node)([*node[:index], of(node[index], names[1:]), *node[index + 1 :]])
        return dataclasses.replace(node, **{names[0]: of(getattr(node, names[0]), names[1:])})

    return of(params, path.split("."))


def fault(params: Params, text: np.ndarray = TEXT) -> str | None:
    return first_fault(params, load_config(GOLDEN_A), text, precision=PRECISION, kernels=KernelChoice())


def test_a_sound_text_has_no_fault(params: Params) -> None:
    assert fault(params) is None


@pytest.mark.parametrize(
    ("path", "value", "clause"),
    [
        ("layers.3.attn.wo_b", np.nan, "layers.3.attention.output at position 0 is not finite"),
        ("layers.6.ffn.shared_experts.w2", np.inf, "layers.6.moe.output at position 0 is not finite"),
        ("layers.4.hc_ffn.base", np.nan, "layers.4.streams at position 0 is not finite"),
        ("head", np.nan, "logits at position 0 is not finite"),
        ("norm", 0.0, f"final_norm at position {len(TEXT) - 1} is all zero"),
        ("head", 0.0, f"logits at position {len(TEXT) - 1} is all zero"),
    ],
)
def test_a_spoiled_weight_is_named_by_the_tensor_that_it_spoils_first(
    params: Params, path: str, value: float, clause: str
) -> None:
    assert fault(spoiled(params, path, lambda weight: jnp.full_like(weight, value))) == clause


@pytest.mark.parametrize("position", [0, 17, CHUNK, CHUNK + 39])
def test_a_spoiled_token_is_found_where_it_stands(params: Params, position: int) -> None:
    text = TEXT.copy()
    text[position] = POISONED
    assert fault(poisoned_token(params), text) == f"embed at position {position} is not finite"
    assert fault(poisoned_token(params)) is None


def poisoned_token(params: Params) -> Params:
    return spoiled(params, "embed", lambda table: table.at[POISONED].set(jnp.nan))


def test_a_spoiled_expert_is_found_at_the_first_token_that_it_serves(params: Params) -> None:
    name = "layers.5.moe.expert_ids"
    run = forward(params, load_config(GOLDEN_A), TEXT[None], precision=PRECISION, capture=[name], return_logits=False)
    served = (np.asarray(run.captured[name])[0] == 6).any(axis=-1)
    first = int(served.argmax())
    assert 0 < first < CHUNK  # so that the rows before it are unharmed neighbours
    broken = spoiled(params, "layers.5.ffn.experts.w2", lambda weight: weight.at[6].set(jnp.nan))
    assert fault(broken) == f"layers.5.moe.output at position {first} is not finite"


@pytest.mark.slow
def test_images_are_encoded_again_and_their_first_bad_row_is_found(
    params: Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of 10 tokens, 6 of them rows; the second stands across a chunk's border."""
    config = load_config(GOLDEN_A)
    processor = MultimodalProcessor(
        config.vision, get_hf_tokenizer(GOLDEN_A), image_token_id=config.image_token_id, vocab_size=192
    )
    ids = np.insert(TEXT, [5, CHUNK - 14], config.image_token_id)
    noise = np.random.default_rng(0).integers(256, size=(2, 60, 100, 3), dtype=np.uint8)
    prompt = processor.overwrite_prompt(ids, {"image_bytes": list(noise)})
    assert [(image.start, image.stop) for image in prompt.images] == [(5, 15), (CHUNK - 4, CHUNK + 6)]

    def found(params: Params) -> str | None:
        return first_fault(params, config, prompt.token_ids, prompt, precision=PRECISION, kernels=KernelChoice())

    assert found(params) is None
    broken = spoiled(params, "vision.aligner_w1", lambda weight: jnp.full_like(weight, jnp.nan))
    assert found(broken) == "embed at position 6 is not finite"

    def second_image_ends_badly(*given: Any, **options: Any) -> Any:
        vit, rows = encode_image(*given, **options)
        is_second = np.array_equal(given[2], prompt.images[1].image.patches())
        return vit, rows.at[-1].set(jnp.nan) if is_second else rows

    monkeypatch.setattr(diagnosis, "encode_image", second_image_ends_badly)
    last_row = prompt.images[1].stop - 3  # then a new line and the end
    assert found(params) == f"embed at position {last_row} is not finite"


def test_a_second_failure_is_told_and_ends_nothing(params: Params, monkeypatch: pytest.MonkeyPatch) -> None:
    diagnose = make_diagnosis(params, load_config(GOLDEN_A), PRECISION, KernelChoice())
    too_long = np.zeros(diagnosis.LONGEST_TEXT + 1, np.int32)
    assert diagnose(too_long, None).startswith("its 32769 tokens were not run again")

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(diagnosis, "_run", broken)
    assert "failed too (RuntimeError: out of memory)" in diagnose(TEXT, None)


def test_drafts_that_the_step_accepted_belong_to_the_text_that_is_run_again() -> None:
    sequences = [
        running_sequence("good", [7, 11, 12, 13]),
        running_sequence("bad", [7, 21, 22]),
        running_sequence("spoiled", [7, 8]),
    ]
    for sequence in sequences[1:]:
        sequence.status = SequenceStatus.FINISHED_FAILED
    seen = []

    def diagnose(text: np.ndarray, image_prompt: Any) -> str:
        assert image_prompt is None
        seen.append(text.tolist())
        return "because"

    step: Any = SimpleNamespace(sequences=sequences)
    explain_failures(step, [(0, 3), (1, 2), (2, 0)], diagnose)
    prompt = sequences[0].prompt_token_ids.tolist()
    assert seen == [[*prompt, 7, 21, 22], [*prompt, 7, 8]]
    last = len(prompt) + 2
    assert sequences[1].request.error == (
        f"the logits after position {last} are no distribution (not finite, or all zero): because"
    )
    assert sequences[0].request.error == ""


@pytest.mark.slow
def test_a_poisoned_row_fails_alone_in_prefill_and_in_decode(params: Params, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepinfer_jax.engine.loading.load_params", lambda *_, **__: poisoned_token(params))
    args = EngineArgs(model=str(GOLDEN_A), precision=PRECISION, max_model_len=64, max_num_seqs=4)
    engine = LLMEngine(args)
    compiled = engine.compile_count
    prompts = {"a": TEXT[:20], "b": TEXT[30:37], "prompt": TEXT[:9].copy(), "output": TEXT[50:60]}
    prompts["prompt"][4] = POISONED
    # Each free output is forced to a sound token, as the model may choose the poisoned one.
    forced = {name: TEXT[100:108].tolist() for name in prompts}
    forced["output"][2] = POISONED

    def run(names: list[str]) -> dict[str, list[RequestOutput]]:
        for name in names:
            how = SamplingParams(golden_token_ids=forced[name], max_tokens=8, ignore_eos=True, top_logprobs=5)
            engine.add_request("u", name, how, prompts[name])
        return drain(engine)

    together = run(list(prompts))
    why = "request {}: the logits after position {} are no distribution (not finite, or all zero): {}"
    failed = together["prompt"][-1], together["output"][-1]
    assert [output.finish_reason for output in failed] == ["logits_not_finite"] * 2
    assert failed[0].message == why.format("prompt", 8, "embed at position 4 is not finite")
    assert failed[1].message == why.format("output", 12, "embed at position 12 is not finite")
    assert [output.token_id for output in together["output"]] == [*forced["output"][:3], POISONED]
    for name in ("a", "b"):
        assert [output.finish_reason for output in together[name]] == [""] * 7 + ["length"]
        for with_others, alone in zip(together[name], run([name])[name], strict=True):
            assert with_others.top_token_ids == alone.top_token_ids
            # Other rows in the batch change the order of float32 sums.
            np.testing.assert_allclose(with_others.top_logprobs, alone.top_logprobs, atol=1e-5)
    assert engine.compile_count == compiled
