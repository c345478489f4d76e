"""Drafts on the toy model: tokens, counts and outputs against a plain twin that runs one sequence on the host."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from deepinfer_jax.engine.args import EngineType
from deepinfer_jax.engine.llm_engine import LLMEngine
from deepinfer_jax.engine.requests.outputs import RequestOutput
from deepinfer_jax.engine.requests.sampling_params import SamplingParams
from deepinfer_jax.engine.resolution import resolve_num_drafts
from tests.support.drafting import draft_twin, drafts
from tests.support.marks import slow
from tests.support.toy import (
    DRAFT_BLOCK,
    EOS,
    MAX_POSITIONS,
    greedy_twin,
    history_logits,
    make_table,
    next_state,
    random_prompt,
    run,
    tokens,
    toy_engine,
)

pytestmark = [pytest.mark.toy, pytest.mark.unoptimised, pytest.mark.usefixtures("poisoned")]
TABLE = make_table()
# (prompt length, max_tokens): limits inside a block of drafts, at its edges, and by max_model_len.
SHAPES = [(1, 1), (2, 2), (3, 3), (4, 7), (5, 12), (9, 13), (17, 20), (30, 20)]


@pytest.fixture(scope="module", params=[slow(1), 3, slow(DRAFT_BLOCK)])
def engine(request: pytest.FixtureRequest, poisoned: None) -> Iterator[LLMEngine]:
    with drafts(request.param):
        engine = toy_engine()
    assert engine.limits.num_drafts == request.param
    yield engine
    engine.close()


def submit(engine: LLMEngine, *, greedy: bool, **kwargs: Any) -> dict[str, tuple[list[int], SamplingParams]]:
    how = {"temperature": 0.0} if greedy else {"temperature": 0.8, "top_p": 0.95}
    requests = {
        f"{engine._next_seq_id}-{i}": (
            random_prompt(length, seed=i),
            SamplingParams(max_tokens=count, ignore_eos=True, seq_seed=i, **how | kwargs),
        )
        for i, (length, count) in enumerate(SHAPES)
    }
    for name, (prompt, params) in requests.items():
        engine.add_request("u", name, params, prompt)
    return requests


def verified(outputs: list[RequestOutput]) -> list[tuple[int, int]]:
    """(rows verified, tokens given) of each step."""
    return [(output.draft_tok, output.accept_tok) for output in outputs if output.draft_tok]


@pytest.mark.slow
def test_an_engine_drafts_a_block_unless_asked_for_less() -> None:
    with drafts(None):
        assert toy_engine().limits.num_drafts == DRAFT_BLOCK
        assert [resolve_num_drafts(block, EngineType.NORMAL) for block in (0, 3, 5, 8)] == [0, 3, 5, 5]
        assert resolve_num_drafts(5, EngineType.PROMPT) == 0
    for asked in (-1, 6):
        with drafts(asked), pytest.raises(ValueError, match=f"is {asked}, but the model drafts blocks of 5 tokens"):
            toy_engine()
    with drafts(1), pytest.raises(ValueError, match=r"is 1, but the model has no draft layers; set it to 0 … 0"):
        resolve_num_drafts(0, EngineType.NORMAL)


def test_greedy_tokens_are_those_without_drafts(engine: LLMEngine) -> None:
    requests = submit(engine, greedy=True)
    results = run(engine)
    for name, (prompt, params) in requests.items():
        count = min(params.max_tokens, MAX_POSITIONS + 1 - len(prompt))
        assert tokens(results[name]) == greedy_twin(TABLE, prompt, count)
        assert results[name][-1].finish_reason == "length"


@pytest.mark.parametrize("greedy", [True, False])
def test_every_step_is_that_of_the_plain_rule(engine: LLMEngine, greedy: bool) -> None:
    """Tokens, log-probabilities, rows verified, tokens accepted and confidences of every step."""
    requests = submit(engine, greedy=greedy)
    results = run(engine)
    for name, (prompt, params) in requests.items():
        twin = draft_twin(TABLE, prompt, params, engine.limits.num_drafts, MAX_POSITIONS)
        outputs = results[name]
        assert tokens(outputs) == twin.tokens
        assert verified(outputs) == twin.steps
        assert [output.token_logprobs for output in outputs] == pytest.approx(twin.logprobs, abs=1e-5)
        scores = [output.confidence_score for output in outputs if output.draft_tok]
        assert scores[0] is None  # the prompt's step
        for found, wanted in zip(scores[1:], twin.confidences, strict=True):
            assert found == pytest.approx(wanted, abs=1e-6)


def test_some_drafts_are_accepted_and_some_are_not_and_the_statistics_say_so() -> None:
    with drafts(3):
        engine = toy_engine()
    submit(engine, greedy=False)
    steps = [step for outputs in run(engine).values() for step in verified(outputs)[1:]]
    stats = engine.stats()
    assert {given for _, given in steps} == {1, 2, 3, 4}
    assert stats["num_decode_rows"] == sum(rows for rows, _ in steps)
    assert stats["num_wasted_rows"] == sum(rows - given for rows, given in steps)
    assert stats["mean_accepted_length"] == sum(given for _, given in steps) / len(steps)
    assert stats["num_drafts_verified"] == [sum(rows > place for rows, _ in steps) for place in (1, 2, 3)]
    assert stats["num_drafts_accepted"] == [sum(given > place for _, given in steps) for place in (1, 2, 3)]


def test_eos_ends_a_sequence_also_in_the_middle_of_accepted_drafts(engine: LLMEngine) -> None:
    """Whatever was accepted behind it is nobody's. A token that comes anyway is named EOS."""
    prompt = random_prompt(4, seed=7)
    expected = greedy_twin(TABLE, prompt, 20)
    for place in range(1, 12):
        end = expected[place]
        if end in expected[:place]:
            continue
        engine.tokenizer.eos_token_id = end
        try:
            engine.add_request("u", f"eos{place}", SamplingParams(temperature=0, max_tokens=20), prompt)
        finally:
            engine.tokenizer.eos_token_id = EOS
        outputs = run(engine)[f"eos{place}"]
        assert tokens(outputs) == expected[: place + 1]
        assert outputs[-1].finish_reason == "stop" and outputs[-1].draft_tok > 0


def test_what_cannot_be_computed_behind_the_end_of_a_block_fails_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every text meets a place without logits. It gives all tokens before it, as without drafts, then fails; where the
    last of them ends it, it has ended well."""
    table, prompts = make_table(), [random_prompt(1 + place % 7, seed=place) for place in range(12)]
    for place, prompt in enumerate(prompts):
        state = 0
        for token in prompt + greedy_twin(TABLE, prompt, place + 1):
            state = next_state(state, token)
        table[state] = np.nan
    monkeypatch.setattr("tests.support.toy.make_table", lambda: table)
    with drafts(DRAFT_BLOCK):
        engine = toy_engine()
    rooms = []
    for number, prompt in enumerate(prompts):
        text = prompt.copy()
        while np.isfinite(history_logits(table, text)).all():
            text += greedy_twin(table, text, 1)
        expected = text[len(prompt) :]
        ends = {"no": {}, "length": {"max_tokens": len(expected)}, "stop": {"stop_token_ids": expected[-1:]}}
        for end, rule in ends.items():
            how = {"temperature": 0, "ignore_eos": True, "max_tokens": 30} | rule
            engine.add_request("u", f"{end}{number}", SamplingParams(**how), prompt)
        results = run(engine)
        for end in ends:
            outputs = results[f"{end}{number}"]
            if end == "no":
                *outputs, failure = outputs
                assert failure.finish_reason == "logits_not_finite"
                assert failure.message.startswith(f"request no{number}: the logits after position {len(text) - 1} are")
                assert (failure.num_output_tokens, failure.token_id) == (len(expected) + 1, text[-1])
            elif end == "length" or expected[-1] not in expected[:-1]:
                assert outputs[-1].finish_reason == end and outputs[-1].message == ""
            if end != "stop" or expected[-1] not in expected[:-1]:
                assert tokens(outputs) == expected
        rooms.append(results[f"no{number}"][-2].accept_tok)
    assert max(rooms) > 2, "none of them failed behind accepted drafts"


def test_forced_ids_are_given_whatever_was_drafted(engine: LLMEngine) -> None:
    """Entries of -1 are free: these tokens are the model's after what was forced."""
    prompt, forced = random_prompt(5, seed=3), [9, 8, -1, 7, -1, -1, 6, 5, 4, -1, 20]
    engine.add_request(
        "u", "forced", SamplingParams(temperature=0, golden_token_ids=forced, max_tokens=14, ignore_eos=True), prompt
    )
    submit(engine, greedy=False)
    outputs = run(engine)["forced"]
    history = list(prompt)
    for place in range(14):
        free = place >= len(forced) or forced[place] < 0
        history.append(greedy_twin(TABLE, history, 1)[0] if free else forced[place])
    assert tokens(outputs) == history[len(prompt) :]


def test_forcing_what_is_drafted_accepts_every_draft(engine: LLMEngine) -> None:
    prompt, params = random_prompt(6, seed=4), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    num_drafts = engine.limits.num_drafts
    drafted = draft_twin(TABLE, prompt, params, num_drafts, MAX_POSITIONS, always_accept=True)
    params.golden_token_ids = drafted.tokens
    engine.add_request("u", "golden", params, prompt)
    outputs = run(engine)["golden"]
    assert tokens(outputs) == drafted.tokens
    assert all(rows == given for rows, given in verified(outputs)[1:])


def test_abort_with_drafts_in_flight_frees_everything(engine: LLMEngine) -> None:
    requests = submit(engine, greedy=False)
    for _ in range(4):
        engine.step()
    engine.abort_request(list(requests))
    ends = [output for outputs in run(engine).values() for output in outputs if output.finish_reason == "abort"]
    assert len(ends) >= 4
    stats = engine.stats()
    assert (stats["free_blocks"], stats["free_slots"]) == (stats["total_blocks"], stats["total_slots"])
