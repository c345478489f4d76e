"""`LLMEngine` over a toy model whose every token depends on the whole history: results, independence, refusals."""

import logging
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.engine.llm_engine import LLMEngine
from deepinfer_jax.engine.requests.columns import prefill_columns
from deepinfer_jax.engine.requests.outputs import RequestOutput
from deepinfer_jax.engine.requests.sampling_params import SamplingParams
from tests.support.marks import slow
from tests.support.toy import (
    EOS,
    IMAGE,
    POISON,
    VOCAB,
    greedy_twin,
    history_logits,
    make_table,
    random_prompt,
    run,
    sampled_twin,
    tokens,
    toy_engine,
)

pytestmark = [pytest.mark.toy, pytest.mark.unoptimised]

TABLE = make_table()
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "top_k": 40}


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 25, 30])
def test_greedy_equals_the_plain_twin_at_every_chunk_edge(length: int) -> None:
    engine, prompt = toy_engine(), random_prompt(length)
    engine.add_request("u", "r", SamplingParams(temperature=0, max_tokens=6), prompt)
    assert tokens(run(engine)["r"]) == greedy_twin(TABLE, prompt, 6)


@pytest.mark.parametrize(("chunk", "chunked"), [(1, True), slow(3, True), (128, True), (128, False)])
@pytest.mark.parametrize("overlap", [True, False])
def test_tokens_are_the_twins_for_any_chunk_size_with_and_without_overlap(
    chunk: int, chunked: bool, overlap: bool
) -> None:
    engine = toy_engine(chunk=chunk, chunked_prefill=chunked, overlap=overlap, max_programs=3)
    prompts = [random_prompt(1 + 5 * i % 33, seed=i) for i in range(14)]
    params = [
        SamplingParams(max_tokens=1 + i % 6, seq_seed=i, **(SAMPLED if i % 2 else {"temperature": 0}))
        for i in range(14)
    ]
    for i in range(14):
        engine.add_request("u", str(i), params[i], prompts[i])
    results = run(engine)
    for i in range(14):
        assert tokens(results[str(i)]) == sampled_twin(TABLE, prompts[i], params[i], 1 + i % 6)


def test_more_requests_than_slots_all_finish_with_their_own_tokens() -> None:
    engine = toy_engine()
    prompts = [random_prompt(3 + 2 * i, seed=i) for i in range(12)]
    for i, prompt in enumerate(prompts):
        engine.add_request("u", str(i), SamplingParams(temperature=0, max_tokens=1 + i % 5), prompt)
    results = run(engine)
    for i, prompt in enumerate(prompts):
        assert tokens(results[str(i)]) == greedy_twin(TABLE, prompt, 1 + i % 5)
        assert [o.finished for o in results[str(i)]] == [False] * (i % 5) + [True]
        assert results[str(i)][-1].finish_reason == "length"


@settings(max_examples=25)
@given(
    requests=st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 8), st.integers(0, 6), st.booleans()), min_size=1, max_size=8
    ),
    max_num_seqs=st.sampled_from([2, 6]),
    tight=st.booleans(),
    overlap=st.booleans(),
)
def test_a_request_does_not_depend_on_neighbours_arrival_slots_chunks_or_preemption(
    requests: list[tuple[int, int, int, bool]], max_num_seqs: int, tight: bool, overlap: bool
) -> None:
    """requests: prompt length, output length, step of arrival, sampled or greedy."""
    # Tight: the pool holds little more than one sequence of full length, so neighbours are preempted.
    engine = toy_engine(
        max_num_seqs=max_num_seqs, overlap=overlap, num_kv_blocks=12 if tight else None, stop_preempted_request=False
    )
    results: dict[str, list[RequestOutput]] = {}
    made = {}
    for step in range(7):
        for i, (length, count, arrival, sampled) in enumerate(requests):
            if arrival == step:
                params = SamplingParams(max_tokens=count, seq_seed=11, **(SAMPLED if sampled else {"temperature": 0}))
                made[str(i)] = (random_prompt(length, seed=i), params, count)
                engine.add_request("u", str(i), params, made[str(i)][0])
        for output in engine.step():
            results.setdefault(output.request_id, []).append(output)
    for request_id, outputs in run(engine).items():
        results.setdefault(request_id, []).extend(outputs)
    assert {k: tokens(v) for k, v in results.items()} == {k: sampled_twin(TABLE, *v) for k, v in made.items()}


def crowded(stop_preempted_request: bool, overlap: bool) -> tuple[LLMEngine, dict[str, list[RequestOutput]]]:
    """Six requests of 9 + 20 tokens in a pool of 12 blocks of 4: at most one of them finishes without preemption."""
    engine = toy_engine(
        overlap=overlap, num_kv_blocks=12, max_model_len=40, stop_preempted_request=stop_preempted_request
    )
    for i in range(6):
        params = SamplingParams(max_tokens=20, seq_seed=i, prompt_logprobs=True, first_n_token_no_eos=1, **SAMPLED)
        engine.add_request("u", str(i), params, random_prompt(9, seed=i))
    return engine, run(engine)


@pytest.mark.parametrize("overlap", [True, False])
def test_preempted_requests_are_computed_again_to_the_same_tokens(overlap: bool) -> None:
    engine, results = crowded(stop_preempted_request=False, overlap=overlap)
    assert engine.stats()["num_preemptions"] > 0
    roomy = toy_engine()
    for i in range(6):
        params = SamplingParams(max_tokens=20, seq_seed=i, prompt_logprobs=True, first_n_token_no_eos=1, **SAMPLED)
        roomy.add_request("u", str(i), params, random_prompt(9, seed=i))
    expected = run(roomy)
    assert roomy.stats()["num_preemptions"] == 0
    for i in map(str, range(6)):
        assert tokens(results[i]) == tokens(expected[i])
        assert [o.num_output_tokens for o in results[i]] == list(range(1, 21))
        # Once, on the first output, and not longer for having been computed twice (DB §15.2 trap 27).
        np.testing.assert_allclose(results[i][0].prompt_logprobs, expected[i][0].prompt_logprobs, atol=1e-6)
        assert len(results[i][0].prompt_logprobs) == 8
        assert all(output.prompt_logprobs == [] for output in results[i][1:])


@pytest.mark.parametrize("overlap", [True, False])
def test_preempted_requests_end_if_told_to(overlap: bool) -> None:
    engine, results = crowded(stop_preempted_request=True, overlap=overlap)
    preempted = [outputs for outputs in results.values() if outputs[-1].finish_reason != "length"]
    assert len(preempted) == engine.stats()["num_preemptions"] > 0
    for outputs in preempted:
        *before, last = outputs
        assert (last.finish_reason, last.finished) == ("insufficient_system_resource", True)
        assert f"after {len(before)} tokens" in last.message and "stop_preempted_request=False" in last.message
    # What came before the end is right.
    for i in range(6):
        whole = sampled_twin(TABLE, random_prompt(9, seed=i), SamplingParams(seq_seed=i, **SAMPLED), 20)
        given = [output.token_id for output in results[str(i)] if not output.message]
        assert given == whole[: len(given)]


def test_first_n_token_no_eos_bans_eos_once(monkeypatch: pytest.MonkeyPatch) -> None:
    bent = TABLE.copy()
    bent[:-1, EOS] = 99  # always the likeliest
    monkeypatch.setattr("tests.support.toy.make_table", lambda: bent)
    engine, prompt = toy_engine(), random_prompt(4)
    engine.add_request("u", "free", SamplingParams(temperature=0, max_tokens=3), prompt)
    engine.add_request("u", "banned", SamplingParams(temperature=0, max_tokens=3, first_n_token_no_eos=1), prompt)
    results = run(engine)
    assert tokens(results["free"]) == [EOS]
    assert tokens(results["banned"]) == [*greedy_twin(TABLE, prompt, 1), EOS]


def test_a_prompt_that_is_computed_again_has_the_rules_of_its_next_output() -> None:
    """DB §15.2 trap 27: neither the ban of the first output nor its log-probabilities come again."""
    engine = toy_engine()
    params = SamplingParams(first_n_token_no_eos=1, prompt_logprobs=True, golden_token_ids=[5, 6, 7])
    sequence = engine.add_request("u", "r", params, [4, 5, 6])
    assert sequence is not None

    def columns(start: int, count: int, keep_tokens: int | None = None) -> dict[str, Any]:
        step: Any = SimpleNamespace(
            sequences=[sequence],
            starts=np.asarray([start]),
            num_new_tokens=np.asarray([count]),
            samples=np.asarray([start + count == len(sequence)]),
        )
        return {name: column.item() for name, column in prefill_columns(step, keep_tokens).items()}

    first = columns(0, 2)
    assert (first["forced"], first["next_token"], first["wants_prompt_logprobs"]) == (5, 6, True)
    sequence.output_token_ids += [5, 6]
    again = columns(0, 4)  # the last token is known, and the decode step's
    assert (again["forced"], again["next_token"], again["wants_prompt_logprobs"]) == (6, 0, False)
    # Bounded replay counts from the end of what is computed again.
    assert [columns(0, 4, keep)["kept_from"] for keep in (None, 2, 4, 6)] == [0, 2, 0, 0]


@pytest.mark.parametrize("overlap", [True, False])
def test_eos_stops_unless_ignored(overlap: bool) -> None:
    for ignore_eos, expected in [(False, "stop"), (True, "length")]:
        engine = toy_engine(overlap=overlap)
        params = SamplingParams(golden_token_ids=[5, EOS, 6], max_tokens=3, ignore_eos=ignore_eos)
        engine.add_request("u", "r", params, [4, 5])
        outputs = run(engine)["r"]
        assert outputs[-1].finish_reason == expected
        assert tokens(outputs) == [5, EOS, 6][: 3 if ignore_eos else 2]
        assert [o.num_output_tokens for o in outputs] == list(range(1, len(outputs) + 1))


def test_forced_tokens_go_to_their_own_outputs_beside_free_neighbours() -> None:
    engine, prompt = toy_engine(num_kv_blocks=12, stop_preempted_request=False), random_prompt(9)
    for i in range(6):
        forced = [-1 if j % 3 == i % 3 else 4 + j for j in range(15)] if i % 2 else None
        engine.add_request("u", str(i), SamplingParams(temperature=0, max_tokens=20, golden_token_ids=forced), prompt)
    results = run(engine)
    assert engine.stats()["num_preemptions"] > 0
    for i in range(6):
        history = list(prompt)
        for j in range(20):
            free = not i % 2 or j >= 15 or j % 3 == i % 3
            history.append(int(np.argmax(history_logits(TABLE, history))) if free else 4 + j)
        assert tokens(results[str(i)]) == history[9:]


def test_a_sequence_may_reach_one_token_more_than_the_limit() -> None:
    engine = toy_engine(max_model_len=12)
    prompt = random_prompt(12)
    engine.add_request("u", "full", SamplingParams(temperature=0, max_tokens=9), prompt)
    engine.add_request("u", "room", SamplingParams(temperature=0, max_tokens=9), prompt[:10])
    results = run(engine)
    assert tokens(results["full"]) == greedy_twin(TABLE, prompt, 1)
    assert tokens(results["room"]) == greedy_twin(TABLE, prompt[:10], 3)
    assert results["full"][0].finish_reason == results["room"][-1].finish_reason == "length"


@pytest.mark.parametrize("overlap", [True, False])
def test_logprobs_are_of_the_processed_distribution(overlap: bool) -> None:
    engine, prompt = toy_engine(overlap=overlap, chunk=3), random_prompt(11)
    params = SamplingParams(temperature=0.7, top_k=5, top_logprobs=7, prompt_logprobs=True, max_tokens=2, seq_seed=1)
    engine.add_request("u", "r", params, prompt)
    engine.add_request("u", "plain", SamplingParams(temperature=0, max_tokens=2), prompt[:3])
    results = run(engine)

    def expected(history: list[int]) -> np.ndarray:
        scaled = history_logits(TABLE, history).astype(np.float64) / 0.7
        scaled[np.argsort(-scaled, kind="stable")[5:]] = -np.inf
        return np.maximum(scaled - np.log(np.exp(scaled).sum()), -9999)

    first, second = results["r"]
    for output, history in [(first, prompt), (second, [*prompt, first.token_id])]:
        reference = expected(history)
        np.testing.assert_allclose(output.token_logprobs, reference[output.token_id], atol=1e-5)
        np.testing.assert_allclose(output.top_logprobs, np.sort(reference)[::-1][:7], atol=1e-5)
        assert output.top_token_ids[:5] == np.argsort(-reference, kind="stable")[:5].tolist()
    # The prompt is longer than a chunk: entries on both sides of each cut.
    along_prompt = [expected(prompt[: i + 1])[prompt[i + 1]] for i in range(10)]
    np.testing.assert_allclose(first.prompt_logprobs, along_prompt, atol=1e-5)
    assert second.prompt_logprobs == results["plain"][0].prompt_logprobs == results["plain"][0].top_logprobs == []


def test_requests_without_a_seed_draw_one_each() -> None:
    engine = toy_engine()
    params = SamplingParams(max_tokens=8)
    for i in range(4):
        engine.add_request("u", str(i), params, [9, 8, 7])
    results = run(engine)
    assert len({tuple(tokens(outputs)) for outputs in results.values()}) == 4
    assert params.seq_seed is None and params.eos_id == 0  # the caller's object is left alone


def test_no_traffic_compiles_anything_after_the_start(caplog: pytest.LogCaptureFixture) -> None:
    engine = toy_engine(num_kv_blocks=12, stop_preempted_request=False)
    compiled = engine.compile_count
    assert 0 < compiled <= 3
    rng = np.random.default_rng(0)
    results: dict[str, list[RequestOutput]] = {}
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        for i in range(500):
            length = int(rng.integers(1, 41))
            params = SamplingParams(
                temperature=float(rng.choice([0, 0.8])),
                max_tokens=int(rng.integers(1, 12)),
                top_p=float(rng.uniform(0.1, 1)),
                top_logprobs=int(rng.choice([0, 0, 3])),
                prompt_logprobs=bool(rng.integers(2)),
                golden_token_ids=[5, -1] if rng.integers(8) == 0 else None,
            )
            engine.add_request("u", str(i), params, random_prompt(length, seed=i))
            if rng.integers(10) == 0:
                engine.abort_request(str(rng.integers(i + 1)))
            for _ in range(int(rng.integers(3))):
                for output in engine.step():
                    results.setdefault(output.request_id, []).append(output)
        for request_id, outputs in run(engine).items():
            results.setdefault(request_id, []).extend(outputs)
        assert "ompil" not in caplog.text  # neither a step program nor, inside JAX, anything beside them
        jax.jit(lambda x: x + 1)(1)
        assert "ompil" in caplog.text  # it would be said
    assert engine.compile_count == compiled
    assert engine.stats()["num_preemptions"] > 0
    assert len(results) == 500
    assert all([o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True] for outputs in results.values())
    assert {outputs[-1].finish_reason for outputs in results.values()} >= {"length", "abort"}


def test_a_request_with_infinite_logits_fails_alone_and_says_where() -> None:
    engine = toy_engine()
    engine.add_request("u", "bad", SamplingParams(temperature=0), [POISON])
    engine.add_request("u", "good", SamplingParams(temperature=0, max_tokens=4), [5, 6])
    results = run(engine)
    (bad,) = results["bad"]
    assert (bad.finish_reason, bad.finished, bad.token_logprobs) == ("logits_not_finite", True, 1.0)
    assert "request bad" in bad.message and "position 0" in bad.message
    assert tokens(results["good"]) == greedy_twin(TABLE, [5, 6], 4)


def test_a_too_long_prompt_gives_one_output_that_says_so() -> None:
    engine = toy_engine(max_model_len=12)
    engine.add_request("u", "r", SamplingParams(), random_prompt(13))
    (output,) = run(engine)["r"]
    assert (output.finish_reason, output.token_id) == ("prompt_length_exceeded", random_prompt(13)[-1])
    assert "13 tokens" in output.message and "limit is 12" in output.message


def test_a_pool_that_holds_no_whole_sequence_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(ValueError, match=r"9 blocks of 4 tokens .* max_model_len \(40\) tokens takes 10: lower .* 36"):
        toy_engine(num_kv_blocks=9)


def test_more_devices_than_there_are_are_refused() -> None:
    with pytest.raises(ValueError, match=r"2 × 500 = 1000 devices are needed, there are \d+ .*device_count=1000"):
        toy_engine(data_parallel_size=2, expert_parallel_size=500)


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        ([5, VOCAB + 5], f"token id {VOCAB + 5} at position 1 is outside the vocabulary"),
        ([5, -1], "token id -1 at position 1 is outside"),
        ([VOCAB], f"token id {VOCAB} at position 0 stands for a part of an image"),
        ([4, VOCAB + 4], f"token id {VOCAB + 4} at position 1 stands for a part of an image"),
    ],
)
def test_ids_out_of_range_are_dropped_with_a_log_line(
    prompt: list[int], sentence: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = toy_engine()
    with caplog.at_level(logging.INFO):
        assert engine.add_request("u", "r", SamplingParams(), prompt) is None
    assert sentence in caplog.text
    assert not engine.has_unfinished_requests()


def test_an_image_token_without_an_image_is_text_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    engine = toy_engine()
    engine.add_request("u", "r", SamplingParams(temperature=0, max_tokens=2), [5, IMAGE, 6])
    assert f"token id {IMAGE} stands for an image" in caplog.text
    assert tokens(run(engine)["r"]) == greedy_twin(TABLE, [5, IMAGE, 6], 2)


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        ([], "prompt must not be empty"),
        ([1.0, 2.0], "must be integers"),
        ([[1, 2]], "one list of integers"),
        (5, "one list of integers"),
        ([[1], [2, 3]], "one list of integers"),
        ([True], "must be integers"),
        (["a"], "must be integers"),
        ([2**80], "must be integers"),
    ],
)
def test_a_prompt_that_is_no_list_of_ids_is_refused(prompt: object, sentence: str) -> None:
    engine = toy_engine()
    with pytest.raises(ValueError, match=f"request r: .*{sentence}"):
        engine.add_request("u", "r", SamplingParams(), prompt)
    assert not engine.has_unfinished_requests()


def test_other_requests_that_cannot_be_are_refused() -> None:
    engine = toy_engine()
    with pytest.raises(ValueError, match="has no vision tower"):
        engine.add_request("u", "r", SamplingParams(), [5], {"image_bytes": [b""], "image_sizes": [(1, 1)]})
    with pytest.raises(TypeError, match="request_id must be a string, got 7"):
        engine.add_request("u", 7, SamplingParams(), [5])  # type: ignore[arg-type]
    for arrival, sentence in [("now", "must be a number, got 'now'"), (float("nan"), "must be finite, got nan")]:
        with pytest.raises((TypeError, ValueError), match=f"arrival_time {sentence}"):
            engine.add_request("u", "r", SamplingParams(), [5], arrival_time=arrival)  # type: ignore[arg-type]
    late = SamplingParams()
    late.prompt_logprobs = "all"  # type: ignore[assignment]  # fields may be set after the checks
    with pytest.raises(TypeError, match="prompt_logprobs must be True or False, got 'all'"):
        engine.add_request("u", "r", late, [5])
    with pytest.raises(TypeError, match="sampling_params must be"):
        engine.add_request("u", "r", 7, [5])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="max_tokns"):
        engine.add_request("u", "r", {"max_tokns": 3}, [5])
    engine.add_request("u", "r", {"max_tokens": 3, "ignore_eos": True, "temperature": None}, [5])
    with pytest.raises(ValueError, match="request r is unfinished"):
        engine.add_request("u", "r", SamplingParams(), [5])
    assert len(run(engine)["r"]) == 3
    engine.add_request("u", "r", {"ignore_eos": True}, [5])  # finished: the name is free again
    assert len(run(engine)["r"]) == 16


def test_every_output_is_the_callers() -> None:
    engine = toy_engine()
    params = SamplingParams(temperature=0, max_tokens=3, top_logprobs=2, prompt_logprobs=True)
    engine.add_request("u", "r", params, [5, 6])
    outputs = run(engine)["r"]
    copies = [output.clone() for output in outputs]
    assert copies == outputs
    for output in outputs:
        output.top_logprobs.clear()
        output.prompt_logprobs.append(1.0)
    assert [len(copy.top_logprobs) for copy in copies] == [2, 2, 2]
    assert [len(copy.prompt_logprobs) for copy in copies] == [1, 0, 0]


def test_an_empty_step_gives_nothing_and_a_closed_engine_refuses() -> None:
    engine = toy_engine()
    assert engine.step() == engine.flush_inflight_reqs() == []
    engine.add_request("u", "r", SamplingParams(), [5])
    engine.step()
    assert engine.has_unfinished_requests()
    engine.close()
    engine.close()
    assert not engine.has_unfinished_requests()
    call: Any
    for call in (engine.step, engine.flush_inflight_reqs):
        with pytest.raises(RuntimeError, match="closed"):
            call()
    with pytest.raises(RuntimeError, match="closed"):
        engine.add_request("u", "r", SamplingParams(), [5])
