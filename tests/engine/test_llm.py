"""`LLM.generate` over the toy model: alignment, forms of input and output, refusals before anything runs."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.engine.llm import LLM
from deepinfer_jax.engine.requests.sampling_params import SamplingParams
from tests.support.toy import EOS, POISON, VOCAB, greedy_twin, make_table

pytestmark = [pytest.mark.toy, pytest.mark.unoptimised, pytest.mark.usefixtures("toy_model")]

TABLE = make_table()
GREEDY = SamplingParams(temperature=0, max_tokens=5)


def letters(ids: list[int]) -> str:
    return "".join(chr(48 + token) for token in ids)


def make_llm(**kwargs: Any) -> LLM:
    return LLM("toy", **({"max_num_seqs": 4} | kwargs))


def test_texts_come_out_in_the_order_of_the_prompts() -> None:
    prompts = ["AB", "CDEFGHIJKLM", "NO"] * 4  # ids 10 and 9 would swap in alphabetic order
    texts = make_llm().generate(prompts, GREEDY, use_tqdm=False)
    assert texts == [letters(greedy_twin(TABLE, [ord(c) - 48 for c in p], 5)) for p in prompts]


def test_a_single_string_is_one_prompt() -> None:
    assert make_llm().generate("AB", GREEDY) == make_llm().generate(["AB"], GREEDY)


def test_positions_mode_returns_every_token_of_every_prompt() -> None:
    llm = make_llm(decode_sequence=False)
    results: Any = llm.generate(prompt_token_ids=[[5, 6], np.asarray([7], np.int64)], sampling_params=GREEDY)
    assert [[o.token_id for o in outputs] for outputs in results] == [
        greedy_twin(TABLE, [5, 6], 5),
        greedy_twin(TABLE, [7], 5),
    ]
    assert [o.num_output_tokens for o in results[0]] == [1, 2, 3, 4, 5]
    assert [o.finished for o in results[1]] == [False] * 4 + [True]


def test_token_ids_win_over_text_and_lengths_must_agree() -> None:
    llm = make_llm()
    assert llm.generate(["AB"], GREEDY, [[5, 6]]) == llm.generate(None, GREEDY, [[5, 6]])
    with pytest.raises(ValueError, match="same length, got 1 and 2"):
        llm.generate(["AB"], GREEDY, [[5], [6]])
    with pytest.raises(ValueError, match=r"Either prompts or prompt_token_ids must be provided\."):
        llm.generate()
    assert llm.generate([]) == []


def test_the_text_of_eos_is_left_out_unless_asked_for() -> None:
    params = SamplingParams(golden_token_ids=[5, EOS])
    assert make_llm().generate("AB", params) == ["5"]
    assert make_llm().generate("AB", params, strip_eos=False) == ["51"]
    capped = SamplingParams(golden_token_ids=[5, EOS], max_tokens=2, ignore_eos=True)
    assert make_llm().generate("AB", capped) == ["51"]  # an ignored EOS is an answer's token


def test_parameters_per_prompt_need_one_each_before_anything_runs() -> None:
    llm = make_llm()
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (1, 3)]
    texts: Any = llm.generate(["AB", "CD"], params)
    assert [len(text) for text in texts] == [1, 3]
    for count in (1, 3):
        with pytest.raises(ValueError, match=f"{count} entries for 2 prompts"):
            llm.generate(["AB", "CD"], [GREEDY] * count)
    assert not llm.llm_engine.has_unfinished_requests()


def test_a_shared_object_does_not_share_its_seed_and_a_given_seed_repeats() -> None:
    llm = make_llm()
    free: Any = llm.generate(["AB"] * 6, SamplingParams(max_tokens=8))
    assert len(set(free)) == 6
    seeded = SamplingParams(max_tokens=8, seq_seed=4)
    assert llm.generate(["AB"] * 2, seeded) == llm.generate(["AB"] * 2, seeded)
    assert llm.generate(["AB"] * 2, seeded)[0] == llm.generate(["AB"] * 2, seeded)[1]


BAD_PROMPTS: list[tuple[Any, str]] = [
    ([], "prompt must not be empty"),
    ([5, VOCAB + 7], "outside the vocabulary"),
    ([VOCAB + 4], "part of an image"),
    ([1.5], "must be integers"),
    ([[5], [6, 7]], "one list of integers"),
    ("AB", "one list of integers"),
    (None, "one list of integers"),
    (list(range(4, 45)), "41 tokens, the limit is 40"),
]


@pytest.mark.parametrize(("bad", "sentence"), BAD_PROMPTS)
def test_raise_checks_all_prompts_before_anything_runs(bad: Any, sentence: str) -> None:
    llm = make_llm()
    with pytest.raises(ValueError, match=f"prompt 1: .*{sentence}"):
        llm.generate(prompt_token_ids=[[5, 6], bad, [7]], sampling_params=GREEDY)
    assert not llm.llm_engine.has_unfinished_requests()
    assert llm.llm_engine.stats()["num_steps"] == 0


def test_report_runs_the_others_and_keeps_every_result_in_its_place() -> None:
    prompts = [[5, 6], *(bad for bad, _ in BAD_PROMPTS), [7]]
    llm = make_llm()
    texts = llm.generate(prompt_token_ids=prompts, sampling_params=GREEDY, on_invalid="report")
    assert texts == [letters(greedy_twin(TABLE, [5, 6], 5)), *[""] * 8, letters(greedy_twin(TABLE, [7], 5))]
    assert sorted(llm.last_errors) == [1, 2, 3, 4, 5, 6, 7, 8]
    for position, (_, sentence) in enumerate(BAD_PROMPTS, start=1):
        assert sentence in llm.last_errors[position]

    llm.decode_sequence = False
    results: Any = llm.generate(prompt_token_ids=prompts, sampling_params=GREEDY, on_invalid="report")
    reasons = [outputs[-1].finish_reason for outputs in results]
    assert reasons == ["length", *["invalid_prompt"] * 7, "prompt_length_exceeded", "length"]
    assert all(len(outputs) == 1 and outputs[0].message for outputs in results[1:9])

    llm.generate(prompt_token_ids=[[5]], sampling_params=GREEDY)
    assert llm.last_errors == {}


def test_text_that_the_tokenizer_refuses_is_an_invalid_prompt() -> None:
    llm = make_llm()
    with pytest.raises(ValueError, match="prompt 1: '!' is not in this alphabet"):
        llm.generate(["AB", "A!"])
    assert llm.generate(["A!", "AB"], GREEDY, on_invalid="report")[0] == ""


def test_a_prompt_that_is_no_text_is_an_invalid_prompt() -> None:
    llm = make_llm()
    texts = llm.generate([None, "AB"], GREEDY, on_invalid="report")  # type: ignore[list-item]
    assert texts == ["", letters(greedy_twin(TABLE, [17, 18], 5))]
    assert "must be a string, got NoneType" in llm.last_errors[0]


def test_text_that_has_no_tokens_is_told_from_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm()
    monkeypatch.setattr(llm.get_tokenizer(), "encode", lambda _: [])
    with pytest.raises(ValueError, match="prompt 0: the tokenizer has no tokens for the prompt 'AB'"):
        llm.generate("AB")
    with pytest.raises(ValueError, match="prompt 0: prompt must not be empty"):
        llm.generate("")


def test_a_tokenizer_that_breaks_on_a_text_makes_it_an_invalid_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm()
    encode = llm.get_tokenizer().encode

    def breaks(text: str) -> list[int]:
        if text == "CD":
            raise Exception("Unk token not found")  # what the tokenizers library raises
        return encode(text)  # type: ignore[no-any-return]

    monkeypatch.setattr(llm.get_tokenizer(), "encode", breaks)
    assert llm.generate(["CD", "AB"], GREEDY, on_invalid="report") == ["", letters(greedy_twin(TABLE, [17, 18], 5))]
    assert llm.last_errors == {0: "prompt 0: the tokenizer cannot encode the prompt 'CD': Unk token not found"}


def test_prompts_ids_and_parameters_may_be_any_iterable() -> None:
    llm, expected = make_llm(), make_llm().generate(["AB", "CD"], GREEDY)
    assert llm.generate((p for p in ("AB", "CD")), (GREEDY for _ in range(2))) == expected
    assert llm.generate(prompt_token_ids=iter([(17, 18), jnp.array([19, 20])]), sampling_params=GREEDY) == expected
    assert llm.generate(prompt_token_ids=jnp.array([[17, 18], [19, 20]]), sampling_params=GREEDY) == expected


def test_a_field_set_after_construction_is_checked_like_an_argument() -> None:
    llm, params = make_llm(), SamplingParams(max_tokens=5)
    params.temperature = 0
    assert llm.generate("AB", params) == [letters(greedy_twin(TABLE, [17, 18], 5))]
    assert params.temperature == 0  # the caller's object is not changed
    params.temperature = float("nan")
    with pytest.raises(ValueError, match="temperature must be"):
        llm.generate(["AB", "CD"], [GREEDY, params])
    assert not llm.llm_engine.has_unfinished_requests()


def test_requests_that_must_give_way_are_computed_again_and_lose_nothing() -> None:
    llm = make_llm(num_kv_blocks=12, tokens_per_block=4, max_num_seqs=6)  # room for little more than one at full length
    assert not llm.llm_engine.args.stop_preempted_request  # LLM's default, unlike EngineArgs'
    prompts = [[4 + i, 5, 6, 7, 8, 9, 10, 11, 12] for i in range(6)]
    texts = llm.generate(prompt_token_ids=prompts, sampling_params=SamplingParams(temperature=0, max_tokens=20))
    assert texts == [letters(greedy_twin(TABLE, prompt, 20)) for prompt in prompts]
    assert llm.llm_engine.stats()["num_preemptions"] > 0 and llm.last_errors == {}


def test_a_request_that_fails_while_it_runs_is_reported() -> None:
    llm = make_llm()
    texts = llm.generate(prompt_token_ids=[[POISON], [7]], sampling_params=GREEDY)
    assert texts == ["", letters(greedy_twin(TABLE, [7], 5))]
    assert "not finite" in llm.last_errors[0]


def test_wrong_calls_are_refused_with_a_sentence() -> None:
    llm = make_llm()
    with pytest.raises(ValueError, match="wrap a single one"):
        llm.generate(prompt_token_ids=[5, 6])
    with pytest.raises(ValueError, match="prompt 0: a prompt must be a string, got list"):
        llm.generate([[5, 6]])  # type: ignore[list-item]
    for wrong, sentence in [
        ({}, "0 entries"),
        ([GREEDY, None], r"sampling_params\[1\]"),
        (5, "sampling_params must be"),
    ]:
        with pytest.raises((TypeError, ValueError), match=sentence):
            llm.generate(["AB", "CD"], wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="prompt 0: the model has no vision tower"):
        llm.generate(["AB"], multi_modal_data=[{"image_bytes": [b"x"]}])
    nothing = {"image_bytes": [], "image_sizes": []}  # DeepInfer's spelling of a text request
    assert llm.generate("AB", GREEDY, multi_modal_data=nothing) == llm.generate(["AB"], GREEDY, multi_modal_data=[None])
    with pytest.raises(ValueError, match="multi_modal_data holds 2 entries for 1 prompts"):
        llm.generate(["AB"], multi_modal_data=[None, None])
    with pytest.raises(TypeError, match="wrap it"):
        llm.generate(["AB"], multi_modal_data=nothing)
    with pytest.raises(ValueError, match="on_invalid"):
        llm.generate(["AB"], on_invalid="ignore")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="did you mean max_model_len"):
        make_llm(max_model_length=3)
    llm.llm_engine.add_request("u", "mine", GREEDY, [5])
    with pytest.raises(ValueError, match="unfinished requests"):
        llm.generate(["AB"])


def test_an_interrupted_call_leaves_nothing_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm(max_num_seqs=1)
    step, calls = llm.llm_engine.step, []

    def interrupted_once() -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.llm_engine, "step", interrupted_once)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["AB", "CD", "EF"], GREEDY, use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()
    assert llm.generate(["AB"], GREEDY) == [letters(greedy_twin(TABLE, [17, 18], 5))]


def test_the_engine_and_the_tokenizer_are_at_hand_and_close_frees() -> None:
    llm = make_llm()
    assert llm.get_tokenizer() is llm.llm_engine.tokenizer
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate(["AB"])


def test_several_completions_of_a_prompt_have_seeds_of_their_own_and_repeat() -> None:
    llm = make_llm()
    several = SamplingParams(n=3, max_tokens=8, seq_seed=11, ignore_eos=True)
    one = dataclasses.replace(several, n=1)
    found = llm.generate(["AB", "CD"], [several, one], use_tqdm=False)
    assert len(set(found[0])) == 3 and isinstance(found[1], str)
    assert found == llm.generate(["AB", "CD"], [several, one], use_tqdm=False)
    assert found[0][0] == llm.generate("AB", one)[0]
    listed: Any = make_llm(decode_sequence=False).generate("AB", several, use_tqdm=False)
    assert [letters([output.token_id for output in outputs]) for outputs in listed[0]] == found[0]
    unseeded = llm.generate("AB", dataclasses.replace(several, seq_seed=None), use_tqdm=False)
    assert len(set(unseeded[0])) == 3


def test_a_bad_prompt_of_several_completions_has_as_many_refusals() -> None:
    llm = make_llm()
    params = SamplingParams(n=2, max_tokens=2, temperature=0)
    texts = llm.generate(None, params, [[5], [VOCAB]], on_invalid="report", use_tqdm=False)
    assert texts == [[letters(greedy_twin(TABLE, [5], 2))] * 2, ["", ""]]
    assert list(llm.last_errors) == [1]


def test_a_text_ends_before_the_stop_text() -> None:
    llm = make_llm()
    whole = letters(greedy_twin(TABLE, [5, 6], 8))
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, stop=whole[4:6])
    assert llm.generate(None, params, [[5, 6]], use_tqdm=False) == [whole[: whole.index(whole[4:6])]]
