"""Structured output through the engine, on the toy model: what a request gives is what it gives on its own."""

import json
import re
import threading
from typing import Any

import jsonschema
import numpy as np
import pytest
from typer.testing import CliRunner

from deepinfer_jax.cli.main import app
from deepinfer_jax.engine.args import EngineType
from deepinfer_jax.engine.environ import env, rearm
from deepinfer_jax.engine.handover.sequence_state import SequenceState
from deepinfer_jax.engine.llm import LLM
from deepinfer_jax.engine.requests.sampling_params import SamplingParams
from deepinfer_jax.structured import pool
from tests.support.drafting import drafts
from tests.support.engine_runs import while_unfinished
from tests.support.toy import EOS, greedy_twin, make_table, random_prompt, run, tokens
from tests.support.toy_grammar import MARKER, TOKENIZER, constrained_twin, grammar_engine, grammar_parts, text_of
from tests.support.varlen_engine import random_choice, variables

pytestmark = [pytest.mark.toy, pytest.mark.unoptimised]

SCHEMA = {
    "type": "array",
    "items": {"anyOf": [{"type": "integer", "maximum": 999}, {"enum": [None, True, "ab", "b"]}]},
    "minItems": 2,
    "maxItems": 3,
}
GRAMMARS: dict[str, dict[str, Any]] = {
    "json": {"schema_type": "json", "schema": json.dumps(SCHEMA)},
    "regex": {"schema_type": "regex", "schema": "(ab|c[0-9]{1,2})+x?"},
    "ebnf": {"schema_type": "ebnf", "schema": 'root ::= "{" (root ","? | [a-c]+) "}"'},
    "triggered": {"schema_type": "regex", "schema": "[0-4]{3}", "trigger_token_ids": [20]},
}
PATTERNS = {"regex": "(ab|c[0-9]{1,2})+x?", "triggered": "[0-4]{3}"}


def greedy(count: int = 20, **kwargs: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, **kwargs)


def check_text(name: str, output: list[int]) -> None:
    """What ended is a text of the grammar."""
    if output[-1] != EOS:
        return
    if name == "triggered":
        output = output[output.index(20) + 1 :] if 20 in output else []
    if name == "json":
        jsonschema.validate(json.loads(text_of(output)), SCHEMA)
    elif name in PATTERNS and output:
        assert re.fullmatch(PATTERNS[name], text_of(output))


@pytest.mark.parametrize(
    ("num_drafts", "overlap", "blocks"),
    [
        (0, True, 22),
        *(
            pytest.param(num_drafts, overlap, blocks, marks=pytest.mark.slow)
            for num_drafts, overlap, blocks in (
                (5, True, 22),
                (0, False, None),
                (2, True, None),
                (2, False, 22),
                (5, False, None),
            )
        ),
    ],
)
def test_constrained_and_free_requests_beside_each_other_give_what_each_gives_alone(
    num_drafts, overlap, blocks
) -> None:
    """Also in chunks, and preempted where there are few blocks; with drafts too, which are drawn without grammar."""
    with drafts(num_drafts):
        engine = grammar_engine(overlap=overlap, num_kv_blocks=blocks, stop_preempted_request=False)
    compiled = engine.compile_count
    wanted: dict[str, tuple[list[int], str | None]] = {}
    for number in range(24):
        name = [None, *GRAMMARS][number % 5]
        prompt = random_prompt(1 + number * 7 % 19, seed=number)
        so_args = None if name is None else GRAMMARS[name]
        request = f"{name} {number}"
        wanted[request] = (prompt, name)
        engine.add_request("user", request, greedy(so_args=so_args), prompt)
    found = run(engine)
    ended = 0
    for request, (prompt, name) in wanted.items():
        output = tokens(found[request])
        if name is None:
            assert output == greedy_twin(make_table(), prompt, 20)
        else:
            assert output == constrained_twin(prompt, GRAMMARS[name], 20), request
            check_text(name, output)
            ended += output[-1] == EOS
    assert ended >= 10
    assert engine.compile_count == compiled
    if blocks:
        assert engine.stats()["num_preemptions"] > 0


@pytest.mark.slow
def test_steps_that_verify_fewer_drafts_mask_the_rows_that_they_have() -> None:
    with variables(ENABLE_MTP_VARLEN="1", USE_NEXTN_DECODE="5"):
        engine = grammar_engine()
    random_choice(engine)
    wanted = {}
    for number in range(24):
        name, prompt = list(GRAMMARS)[number % 4], random_prompt(3 + number % 9, seed=number)
        wanted[f"{name} {number}"] = constrained_twin(prompt, GRAMMARS[name], 20)
        engine.add_request("user", f"{name} {number}", greedy(so_args=GRAMMARS[name]), prompt)
    assert {request: tokens(outputs) for request, outputs in run(engine).items()} == wanted


@pytest.mark.parametrize("num_drafts", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_sampled_tokens_do_not_depend_on_neighbours(num_drafts) -> None:
    params = SamplingParams(max_tokens=20, seq_seed=7, so_args=GRAMMARS["json"], top_p=0.9)
    prompt = random_prompt(5)
    outputs = []
    for company, overlap in ((0, True), (5, True), (5, False)):
        with drafts(num_drafts):
            engine = grammar_engine(overlap=overlap)
        for number in range(company):
            other = GRAMMARS["ebnf"] if number % 2 else None
            engine.add_request("user", f"other {number}", SamplingParams(max_tokens=9, so_args=other), random_prompt(9))
        engine.add_request("user", "a", params, prompt)
        outputs.append(tokens(run(engine)["a"]))
    assert outputs[0] == outputs[1] == outputs[2]
    check_text("json", outputs[0])


def test_log_probabilities_are_of_what_the_grammar_allows() -> None:
    engine = grammar_engine()
    so_args = {"schema_type": "regex", "schema": "a[bc]d"}
    engine.add_request("user", "a", SamplingParams(max_tokens=8, so_args=so_args, top_logprobs=4), random_prompt(4))
    first, second, third, end = run(engine)["a"]
    assert [o.token_logprobs for o in (first, third, end)] == [0, 0, 0]
    assert end.token_id == EOS and end.finish_reason == "stop"
    finite = [value for value in second.top_logprobs if value > -100]
    assert len(finite) == 2 and np.isclose(np.exp(finite).sum(), 1)


def test_free_requests_keep_their_pace_beside_a_constrained_one() -> None:
    """The constrained one sits out every overlapped step, so it takes two steps a token; the other one."""
    engine = grammar_engine()
    engine.add_request("user", "free", greedy(16, ignore_eos=True), random_prompt(3))
    so_args = {"schema_type": "regex", "schema": "[a-c]*"}
    engine.add_request("user", "bound", greedy(16, so_args=so_args), random_prompt(3))
    came: dict[str, list[int]] = {"free": [], "bound": []}
    for number in while_unfinished(engine):
        for output in engine.step():
            came[output.request_id].append(number)
    assert np.diff(came["free"]).tolist() == [1] * 15
    assert set(np.diff(came["bound"]).tolist()) == {2}


def test_a_request_whose_grammar_fails_ends_with_the_reason_and_the_others_go_on() -> None:
    engine = grammar_engine()
    so_args = {"schema_type": "regex", "schema": "(a)\\1"}
    engine.add_request("user", "bad", greedy(so_args=so_args), random_prompt(3))
    engine.add_request("user", "good", greedy(5), random_prompt(4))
    found = run(engine)
    (output,) = found["bad"]
    assert output.finish_reason == "xgrammar runtime errors or timeout" and output.finished
    assert "backreferences are not supported" in output.message
    assert tokens(found["good"]) == greedy_twin(make_table(), random_prompt(4), 5)


def test_a_forced_token_that_the_grammar_does_not_allow_ends_the_request() -> None:
    engine = grammar_engine()
    so_args = {"schema_type": "regex", "schema": "[ab]{4}"}
    golden = TOKENIZER.encode("abc")
    engine.add_request("user", "a", greedy(so_args=so_args, golden_token_ids=golden), random_prompt(3))
    outputs = run(engine)["a"]
    assert tokens(outputs)[:3] == golden
    assert outputs[-1].finish_reason == "xgrammar runtime errors or timeout"
    assert f"does not allow token {golden[2]} here" in outputs[-1].message


class Held:
    """Compiles nothing until it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real, self.may = pool.compile_grammar, threading.Event()

        def compile_grammar(args, vocabulary):
            assert self.may.wait(120)
            return real(args, vocabulary)

        monkeypatch.setattr(pool, "compile_grammar", compile_grammar)


def test_an_idle_engine_waits_for_a_grammar_without_spinning(monkeypatch) -> None:
    held = Held(monkeypatch)
    engine = grammar_engine()
    engine.add_request("user", "a", greedy(so_args=GRAMMARS["regex"]), random_prompt(3))
    engine.add_request("user", "free", greedy(4), random_prompt(3))
    order, steps = [], 0
    while len(order) < 4:
        order += [output.request_id for output in engine.step()]
    assert order == ["free"] * 4
    threading.Timer(0.5, held.may.set).start()
    for _ in while_unfinished(engine):
        order += [output.request_id for output in engine.step()]
        steps += 1
    assert order[4:] == ["a"] * (len(order) - 4) and len(order) > 4
    assert steps < 150  # half a second of steps that wait for nothing would be thousands
    engine.core.scheduler.check_idle()


def test_a_grammar_that_is_late_ends_its_request(monkeypatch) -> None:
    held = Held(monkeypatch)
    monkeypatch.setenv("DEEPINFER_XGRAMMAR_TIMEOUT", "1")
    env.rearm()
    engine = grammar_engine()
    engine.add_request("user", "a", greedy(so_args=GRAMMARS["regex"]), random_prompt(3))
    (output,) = run(engine)["a"]
    assert "not ready within 1 s (DEEPINFER_XGRAMMAR_TIMEOUT)" in output.message
    held.may.set()
    monkeypatch.undo()
    rearm()


def test_a_request_may_be_aborted_while_its_grammar_is_compiled(monkeypatch) -> None:
    held = Held(monkeypatch)
    engine = grammar_engine()
    engine.add_request("user", "a", greedy(so_args=GRAMMARS["regex"]), random_prompt(3))
    engine.step()
    assert engine.abort_request("a") == (1, 3)
    (output,) = run(engine)["a"]
    assert output.finish_reason == "abort"
    held.may.set()
    engine.add_request("user", "a", greedy(so_args=GRAMMARS["regex"]), random_prompt(3))
    assert tokens(run(engine)["a"]) == constrained_twin(random_prompt(3), GRAMMARS["regex"], 20)


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_constrained_requests_are_handed_over(num_drafts: int, tmp_path) -> None:
    """What was drafted for the first step in the second engine only the device knows."""
    with drafts(num_drafts):
        prompts = grammar_engine(engine_type=EngineType.PROMPT)
        completions = grammar_engine(engine_type=EngineType.COMPLETION)
    wanted, found = {}, {}
    for number in range(24):
        name, prompt = list(GRAMMARS)[number % 4], random_prompt(3 + number % 9, seed=number)
        request = f"{name} {number}"
        wanted[request] = constrained_twin(prompt, GRAMMARS[name], 20)
        prompts.add_request("user", request, greedy(so_args=GRAMMARS[name]), prompt)
    for _ in while_unfinished(prompts):
        for output in prompts.step():
            found[output.request_id] = [output.token_id]
        for request in prompts.computed_requests():
            prompts.export_sequence(request).save(tmp_path / "sequence")
            completions.import_sequence(SequenceState.load(tmp_path / "sequence"))
    for request, outputs in run(completions).items():
        found[request] += tokens(outputs)
    assert found == wanted


def test_a_step_that_fails_leaves_those_that_wait_for_their_grammar(monkeypatch) -> None:
    engine = grammar_engine()
    engine.add_request("user", "lost", greedy(so_args=GRAMMARS["json"]), random_prompt(3))
    while not any(output.request_id == "lost" for output in engine.step()):
        pass
    held = Held(monkeypatch)
    engine.add_request("user", "kept", greedy(so_args=GRAMMARS["regex"]), random_prompt(3))
    with monkeypatch.context() as patch:
        patch.setattr(engine.core.runner, "decode", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            for _ in range(5):
                engine.step()
    held.may.set()
    found = run(engine)
    assert found["lost"][-1].finish_reason == "abort"
    assert tokens(found["kept"]) == constrained_twin(random_prompt(3), GRAMMARS["regex"], 20)


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_a_marker_never_comes_out_of_a_string(num_drafts, monkeypatch) -> None:
    """The model wants nothing else, and every draft is one (field report R11)."""
    table = make_table()
    table[:, MARKER] += 20
    monkeypatch.setattr("tests.support.toy.make_table", lambda: table)
    with drafts(num_drafts):
        engine = grammar_engine()
    so_args = {"schema_type": "json", "schema": '{"type": "string", "minLength": 6}'}
    engine.add_request("user", "free", greedy(4), random_prompt(3))
    engine.add_request("user", "a", greedy(9, so_args=so_args), random_prompt(3))
    found = run(engine)
    assert tokens(found["free"]) == [MARKER] * 4
    assert MARKER not in tokens(found["a"]) and text_of(tokens(found["a"]))[0] == '"'


def test_response_formats_are_so_args_in_other_words() -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    asked = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    engine = grammar_engine()
    engine.add_request("user", "a", {"temperature": 0, "response_format": asked}, random_prompt(3))
    assert json.loads(text_of(tokens(run(engine)["a"]))) in ({"a": 1}, {"a": 2})
    with pytest.raises(ValueError, match="give one of them"):
        SamplingParams(so_args=GRAMMARS["json"], response_format=asked)


def test_what_is_wrong_with_a_grammar_is_said_at_submission(monkeypatch) -> None:
    with pytest.raises(ValueError, match=r"unknown keyword 'minLenght' at # \(did you mean 'minLength'\?\)"):
        SamplingParams(so_args={"schema_type": "json", "schema": '{"minLenght": 3}'})
    engine = grammar_engine()
    beyond = GRAMMARS["regex"] | {"trigger_token_ids": [64]}
    assert engine.add_request("user", "a", greedy(so_args=beyond), random_prompt(3)) is None
    monkeypatch.setattr("deepinfer_jax.engine.llm_engine.load_parts", grammar_parts)
    llm = LLM("toy", max_num_seqs=2, tokens_per_block=4)
    with pytest.raises(ValueError, match="prompt 0: trigger_token_ids"):
        llm.generate(prompt_token_ids=[[5]], sampling_params=SamplingParams(so_args=beyond))


def test_completions_of_one_prompt_each_follow_the_grammar(monkeypatch) -> None:
    monkeypatch.setattr("deepinfer_jax.engine.llm_engine.load_parts", grammar_parts)
    llm = LLM("toy", max_num_seqs=4, tokens_per_block=4)
    params = SamplingParams(max_tokens=30, n=3, so_args={"schema_type": "regex", "schema": "[a-f]{5}"}, seq_seed=3)
    texts = [text for own in llm.generate(["abc", "x"], params, use_tqdm=False) for text in own]
    assert len(texts) == 6 and len(set(texts)) > 1
    assert all(re.fullmatch("[a-f]{5}", text) for text in texts)


def test_the_command_line_takes_a_schema_file_or_a_regular_expression(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("deepinfer_jax.engine.llm_engine.load_parts", grammar_parts)
    file = tmp_path / "schema.json"
    command = ["generate", "--model", "toy", "--prompt", "abc", "--max-tokens", "30", "--seed", "3"]

    def generated(*options: str) -> tuple[int, str, str]:
        result = CliRunner().invoke(app, [*command, *options])
        return result.exit_code, result.stdout.removeprefix("abc").strip(), result.stderr

    status, text, _ = generated("--regex", "[ab]{3}c")
    assert status == 0 and re.fullmatch("[ab]{3}c", text)
    file.write_text('{"enum": [12, true]}', encoding="utf-8-sig")
    status, text, _ = generated("--json-schema", str(file))
    assert status == 0 and json.loads(text) in (12, True)
    status, _, error = generated("--json-schema", str(file), "--regex", "a")
    assert status == 1 and error == "error: give either --json-schema or --regex, not both\n"
    file.write_text('{"maxLenght": 3}')
    status, _, error = generated("--json-schema", str(file))
    assert status == 1 and "(did you mean 'maxLength'?)" in error and error.count("\n") == 1


@pytest.mark.parametrize("name", ["SO_BUILDER_CPUS", "XGRAMMAR_TIMEOUT"])
def test_without_threads_or_time_there_is_no_engine(name: str) -> None:
    with variables(**{name: "0"}), pytest.raises(ValueError, match=f"DEEPINFER_{name} is 0; it must be at least 1"):
        grammar_engine()


def test_an_engine_without_grammars_starts_no_threads() -> None:
    engine = grammar_engine()
    engine.add_request("user", "a", greedy(3), random_prompt(3))
    run(engine)
    assert engine.core.grammars._pool is None
    engine.close()


def test_closing_ends_the_threads() -> None:
    engine = grammar_engine()
    engine.add_request("user", "a", greedy(so_args=GRAMMARS["regex"]), random_prompt(3))
    run(engine)
    threads = engine.core.grammars._pool._threads
    engine.close()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
