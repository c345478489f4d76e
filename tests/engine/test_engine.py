"""`LLMEngine` over a toy model whose every token depends on the whole history: results, independence, refusals."""

import logging
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from toy import EOS, IMAGE, POISON, VOCAB, greedy_twin, history_logits, make_table

from deepinfer_jax.engine.args import EngineArgs
from deepinfer_jax.engine.engine import LLMEngine
from deepinfer_jax.engine.outputs import RequestOutput
from deepinfer_jax.engine.sampling_params import SamplingParams

pytestmark = pytest.mark.usefixtures("toy_model")

TABLE = make_table()


def make_engine(**kwargs: object) -> LLMEngine:
    return LLMEngine(EngineArgs(model="toy", disable_log_stats=True, **({"max_num_seqs": 6} | kwargs)))  # type: ignore[arg-type]


def run(engine: LLMEngine) -> dict[str, list[RequestOutput]]:
    """Steps until nothing is left; outputs by request id."""
    results: dict[str, list[RequestOutput]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            results.setdefault(output.request_id, []).append(output)
    return results


def tokens(outputs: list[RequestOutput]) -> list[int]:
    return [output.token_id for output in outputs]


def random_prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(4, 50, length).tolist()


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 25, 30])
def test_greedy_equals_the_plain_twin_at_every_chunk_edge(length: int) -> None:
    engine, prompt = make_engine(), random_prompt(length)
    engine.add_request("u", "r", SamplingParams(temperature=0, max_tokens=6), prompt)
    assert tokens(run(engine)["r"]) == greedy_twin(TABLE, prompt, 6)


def test_more_requests_than_rows_all_finish_with_their_own_tokens() -> None:
    engine = make_engine(max_num_seqs=5)
    prompts = [random_prompt(3 + 2 * i, seed=i) for i in range(12)]
    for i, prompt in enumerate(prompts):
        engine.add_request("u", str(i), SamplingParams(temperature=0, max_tokens=1 + i % 5), prompt)
    results = run(engine)
    for i, prompt in enumerate(prompts):
        assert tokens(results[str(i)]) == greedy_twin(TABLE, prompt, 1 + i % 5)
        assert [o.finished for o in results[str(i)]] == [False] * (i % 5) + [True]
        assert results[str(i)][-1].finish_reason == "length"


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=7),
    arrivals=st.lists(st.integers(0, 6), min_size=7, max_size=7),
    max_num_seqs=st.integers(1, 6),
)
def test_a_sampled_request_does_not_depend_on_neighbours_slot_bucket_or_chunks(
    lengths: list[int], arrivals: list[int], max_num_seqs: int
) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.95, top_k=40, max_tokens=5, seq_seed=11)
    engine = make_engine(max_num_seqs=max_num_seqs, max_num_batched_tokens=3 * max_num_seqs)
    results: dict[str, list[RequestOutput]] = {}
    for step in range(7):
        for i, length in enumerate(lengths):
            if arrivals[i] == step:
                engine.add_request("u", str(i), params, random_prompt(length, seed=i))
        for output in engine.step():
            results.setdefault(output.request_id, []).append(output)
    for request_id, outputs in run(engine).items():
        results.setdefault(request_id, []).extend(outputs)

    alone = make_engine(max_num_seqs=1)
    for i, length in enumerate(lengths):
        alone.add_request("u", str(i), params, random_prompt(length, seed=i))
    assert {k: tokens(v) for k, v in results.items()} == {k: tokens(v) for k, v in run(alone).items()}


def test_eos_stops_unless_ignored() -> None:
    for ignore_eos, expected in [(False, "stop"), (True, "length")]:
        engine = make_engine()
        params = SamplingParams(golden_token_ids=[5, EOS, 6], max_tokens=3, ignore_eos=ignore_eos)
        engine.add_request("u", "r", params, [4, 5])
        outputs = run(engine)["r"]
        assert outputs[-1].finish_reason == expected
        assert tokens(outputs) == [5, EOS, 6][: 3 if ignore_eos else 2]
        assert [o.num_output_tokens for o in outputs] == list(range(1, len(outputs) + 1))


def test_a_sequence_may_reach_one_token_more_than_the_limit() -> None:
    engine = make_engine(max_model_len=12)
    prompt = random_prompt(12)
    engine.add_request("u", "full", SamplingParams(temperature=0, max_tokens=9), prompt)
    engine.add_request("u", "room", SamplingParams(temperature=0, max_tokens=9), prompt[:10])
    results = run(engine)
    assert tokens(results["full"]) == greedy_twin(TABLE, prompt, 1)
    assert tokens(results["room"]) == greedy_twin(TABLE, prompt[:10], 3)
    assert results["full"][0].finish_reason == results["room"][-1].finish_reason == "length"


def test_logprobs_are_of_the_processed_distribution() -> None:
    engine, prompt = make_engine(), random_prompt(11)
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
    # The prompt is longer than a chunk: entries on both sides of the cut.
    along_prompt = [expected(prompt[: i + 1])[prompt[i + 1]] for i in range(10)]
    np.testing.assert_allclose(first.prompt_logprobs, along_prompt, atol=1e-5)
    assert second.prompt_logprobs == results["plain"][0].prompt_logprobs == results["plain"][0].top_logprobs == []


def test_first_n_token_no_eos_bans_eos_once() -> None:
    # The greedy token of this prompt after the table is bent: EOS, then EOS.
    engine = make_engine()
    prompt = random_prompt(4)
    bent = TABLE.copy()
    bent[:, EOS] = 99
    engine._runner._params = jnp.asarray(bent)
    engine.add_request("u", "free", SamplingParams(temperature=0, max_tokens=3), prompt)
    engine.add_request("u", "banned", SamplingParams(temperature=0, max_tokens=3, first_n_token_no_eos=1), prompt)
    results = run(engine)
    assert tokens(results["free"]) == [EOS]
    assert tokens(results["banned"]) == [*greedy_twin(TABLE, prompt, 1), EOS]


def test_requests_without_a_seed_draw_one_each() -> None:
    engine = make_engine()
    params = SamplingParams(max_tokens=8)
    for i in range(4):
        engine.add_request("u", str(i), params, [9, 8, 7])
    results = run(engine)
    assert len({tuple(tokens(outputs)) for outputs in results.values()}) == 4
    assert params.seq_seed is None and params.eos_id == 0  # the caller's object is left alone


def test_few_programs_are_compiled_however_many_requests_come() -> None:
    engine = make_engine(max_num_seqs=4)
    rng = np.random.default_rng(0)
    for i in range(60):
        params = SamplingParams(max_tokens=int(rng.integers(1, 5)), top_p=float(rng.uniform(0.1, 1)))
        engine.add_request("u", str(i), params, random_prompt(int(rng.integers(1, 30)), seed=i))
    run(engine)
    assert engine.compile_count <= 4  # one row and four, one token and a chunk


def test_one_prompt_does_not_pay_for_max_num_seqs() -> None:
    engine = make_engine(max_num_seqs=200)
    engine.add_request("u", "0", SamplingParams(temperature=0, max_tokens=20), [5, 6])
    engine.step()
    assert engine._runner._rows == 1
    for i in range(1, 20):
        engine.add_request("u", str(i), SamplingParams(temperature=0, max_tokens=3), random_prompt(9, seed=i))
    results = run(engine)
    assert engine._runner._rows == 64
    assert tokens(results["0"]) == greedy_twin(TABLE, [5, 6], 20)[1:]  # kept through the move
    assert tokens(results["7"]) == greedy_twin(TABLE, random_prompt(9, seed=7), 3)


def test_a_request_with_infinite_logits_fails_alone_and_says_where() -> None:
    engine = make_engine()
    engine.add_request("u", "bad", SamplingParams(temperature=0), [POISON])
    engine.add_request("u", "good", SamplingParams(temperature=0, max_tokens=4), [5, 6])
    results = run(engine)
    (bad,) = results["bad"]
    assert (bad.finish_reason, bad.finished, bad.token_logprobs) == ("logits_not_finite", True, 1.0)
    assert "request bad" in bad.message and "position 0" in bad.message
    assert tokens(results["good"]) == greedy_twin(TABLE, [5, 6], 4)


def test_a_too_long_prompt_gives_one_output_that_says_so() -> None:
    engine = make_engine(max_model_len=12)
    engine.add_request("u", "r", SamplingParams(), random_prompt(13))
    (output,) = run(engine)["r"]
    assert (output.finish_reason, output.token_id) == ("prompt_length_exceeded", random_prompt(13)[-1])
    assert "13 tokens" in output.message and "limit is 12" in output.message


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
    engine = make_engine()
    with caplog.at_level(logging.INFO):
        assert engine.add_request("u", "r", SamplingParams(), prompt) is None
    assert sentence in caplog.text
    assert not engine.has_unfinished_requests()


def test_an_image_token_without_an_image_is_text_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine()
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
    engine = make_engine()
    with pytest.raises(ValueError, match=f"request r: .*{sentence}"):
        engine.add_request("u", "r", SamplingParams(), prompt)
    assert not engine.has_unfinished_requests()


def test_other_requests_that_cannot_be_are_refused() -> None:
    engine = make_engine()
    with pytest.raises(ValueError, match="takes text"):
        engine.add_request("u", "r", SamplingParams(), [5], {"image_bytes": [b""], "image_sizes": [(1, 1)]})
    with pytest.raises(TypeError, match="request_id must be a string, got 7"):
        engine.add_request("u", 7, SamplingParams(), [5])  # type: ignore[arg-type]
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


def test_abort_frees_the_row_and_the_name() -> None:
    engine = make_engine(max_num_seqs=1)
    engine.add_request("u", "running", SamplingParams(max_tokens=30), [5, 6])
    engine.add_request("u", "waiting", SamplingParams(max_tokens=30), [5, 6, 7])
    engine.step()
    assert engine.get_num_unfinished_requests() == 2
    assert engine.abort_request("running") == (1, 3)
    assert engine.abort_request({"waiting", "unknown"}) == (1, 3)
    (output,) = engine.step()
    assert (output.request_id, output.finish_reason, output.token_id) == ("waiting", "abort", 7)
    assert not engine.has_unfinished_requests()
    engine.add_request("u", "running", SamplingParams(temperature=0, max_tokens=2), [5, 6])
    assert tokens(run(engine)["running"]) == greedy_twin(TABLE, [5, 6], 2)
    with pytest.raises(TypeError, match="request_id must be"):
        engine.abort_request(7)  # type: ignore[arg-type]


def test_a_step_that_breaks_ends_what_ran_and_the_engine_goes_on() -> None:
    engine = make_engine(max_num_seqs=1)
    engine.add_request("u", "lost", SamplingParams(max_tokens=9), [5, 6])
    engine.add_request("u", "next", SamplingParams(temperature=0, max_tokens=3), [8, 9])
    engine.step()
    engine.step()
    programs = dict(engine._runner._programs)
    engine._runner._programs.update(dict.fromkeys(programs, _interrupt))
    with pytest.raises(KeyboardInterrupt):
        while True:
            engine.step()
    engine._runner._programs.update(programs)
    results = run(engine)
    assert set(results) == {"next"}
    assert tokens(results["next"]) == greedy_twin(TABLE, [8, 9], 3)


def test_an_interrupt_while_results_are_booked_leaves_no_name_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(max_num_seqs=2)
    update = engine._scheduler.update
    params = SamplingParams(temperature=0, max_tokens=1)
    engine.add_request("u", "ends", params, [5, 6])
    engine.add_request("u", "goes on", SamplingParams(max_tokens=9), [5, 6])

    def interrupted(*arguments: Any) -> None:
        update(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine._scheduler, "update", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    monkeypatch.setattr(engine._scheduler, "update", update)
    assert not engine.has_unfinished_requests()
    for name in ("ends", "goes on"):
        engine.add_request("u", name, params, [8, 9])
    assert {name: tokens(outputs) for name, outputs in run(engine).items()} == dict.fromkeys(
        ("ends", "goes on"), greedy_twin(TABLE, [8, 9], 1)
    )


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_an_empty_step_gives_nothing_and_a_closed_engine_refuses() -> None:
    engine = make_engine()
    assert engine.step() == engine.flush_inflight_reqs() == []
    engine.close()
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.add_request("u", "r", SamplingParams(), [5])
