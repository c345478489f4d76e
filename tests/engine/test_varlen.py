"""Confidence-scheduled verification on the toy model: other rows are computed, the answers are the same."""

from collections import Counter
from unittest import mock

import numpy as np
import pytest

from deepinfer_jax.engine.args import EngineArgs
from deepinfer_jax.engine.llm_engine import LLMEngine
from deepinfer_jax.engine.requests.sampling_params import SamplingParams
from deepinfer_jax.scheduler import DraftPolicy
from tests.support.children import served
from tests.support.dummy_kind import DummyKindModel, dummy_kind_twin
from tests.support.toy import greedy_twin, history_logits, make_table, random_prompt, run, tokens
from tests.support.toy_grammar import constrained_twin, grammar_parts
from tests.support.varlen_engine import DRAFTS, random_choice, variables, varlen_engine

pytestmark = [pytest.mark.toy, pytest.mark.unoptimised]

TABLE = make_table()


def ask(engine: LLMEngine, count: int = 6, max_tokens: int = 20, **params: object) -> dict[str, list[int]]:
    for i in range(count):
        how = SamplingParams(max_tokens=max_tokens + i, ignore_eos=True, **params)  # type: ignore[arg-type]
        engine.add_request("u", str(i), how, random_prompt(3 + 2 * i, seed=i))
    return {name: tokens(outputs) for name, outputs in run(engine).items()}


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("choose", ["packed", "random", "policy"])
def test_greedy_answers_are_those_without_drafts(choose: str, overlap: bool) -> None:
    engine = varlen_engine(choose=choose, overlap=overlap)
    compiled = engine.compile_count
    answers = ask(engine, temperature=0)
    for i in range(6):
        count = min(20 + i, 41 - (3 + 2 * i))
        assert answers[str(i)] == greedy_twin(TABLE, random_prompt(3 + 2 * i, seed=i), count)
    stats = engine.stats()
    assert engine.compile_count == compiled <= 3
    assert stats["mean_accepted_length"] > 1.2
    if choose == "packed":  # 15 rows of 6 sequences at most
        verified = stats["num_drafts_verified"]
        assert verified[0] > 2 * verified[4]
        assert sum(verified) / (stats["num_decode_rows"] - sum(verified)) < 2


@pytest.mark.slow
def test_preemption_and_whole_prompts_change_no_greedy_answer() -> None:
    engine = varlen_engine(choose="random", num_kv_blocks=14, stop_preempted_request=False)
    answers = ask(engine, temperature=0)
    assert engine.stats()["num_preemptions"] > 0
    for i in range(6):
        assert answers[str(i)] == greedy_twin(TABLE, random_prompt(3 + 2 * i, seed=i), min(20 + i, 41 - (3 + 2 * i)))


@pytest.mark.slow
@pytest.mark.parametrize("choose", ["random", "policy"])
def test_sampled_answers_have_the_targets_distribution(choose: str) -> None:
    """All answers of four tokens, of two likeliest each: 16 of them, by the exact product of probabilities."""
    count, prompt = 16_000, random_prompt(5)
    engine = varlen_engine(choose=choose, max_num_seqs=64, max_num_batched_tokens=1024)
    seen: Counter[tuple[int, ...]] = Counter()
    for i in range(count):
        how = SamplingParams(max_tokens=4, ignore_eos=True, temperature=1.5, top_k=2, seq_seed=i)
        engine.add_request("u", str(i), how, prompt)
    for outputs in run(engine).values():
        seen[tuple(tokens(outputs))] += 1
    expected = {(): float(count)}
    for _ in range(4):
        expected = {
            (*answer, token): mass * chance
            for answer, mass in expected.items()
            for token, chance in two_likeliest(history_logits(TABLE, [*prompt, *answer]) / 1.5)
        }
    assert set(seen) <= set(expected) and min(expected.values()) > 5
    statistic = sum((seen[answer] - mass) ** 2 / mass for answer, mass in expected.items())
    assert statistic < 37.7  # chi-square of 15 degrees of freedom at 1e-3
    assert engine.stats()["num_wasted_rows"] > 0


def two_likeliest(logits: np.ndarray) -> list[tuple[int, float]]:
    best = np.argsort(-logits, kind="stable")[:2]
    chances = np.exp(logits[best].astype(np.float64))
    return list(zip(best.tolist(), (chances / chances.sum()).tolist(), strict=True))


def test_the_policy_learns_and_its_figures_are_in_the_statistics() -> None:
    engine = varlen_engine()
    ask(engine, temperature=0)
    stats = engine.stats()
    assert len(stats["predicted_acceptance"]) == len(stats["real_acceptance"]) == DRAFTS
    # The toy's confidences are sigmoid(-3 … 3) whatever happens; three of four of its drafts are the target's.
    assert 0.3 < stats["predicted_acceptance"][0] < 0.7 and 0.5 < stats["real_acceptance"][0] < 0.95
    assert stats["verification_slope_ms"] >= 0
    policy = engine.core.scheduler.verification
    assert isinstance(policy, DraftPolicy) and policy.acceptance.judged[0] > 20


@pytest.mark.slow
def test_outputs_tell_the_confidences_of_what_was_verified_at_their_temperatures() -> None:
    with variables(DFLASH_CONFIDENCE_HEAD_TEMPERATURE="1,2,4,0.5,1"):
        engine = varlen_engine(choose="random")
    engine.add_request("u", "r", SamplingParams(temperature=0, max_tokens=30, ignore_eos=True), random_prompt(5))
    outputs = run(engine)["r"]
    last = [output for output in outputs[1:] if output.draft_tok]
    assert {output.draft_tok for output in last} > {1, 6}
    logits = np.arange(-3, 4)
    for output in last:
        assert output.confidence_score is not None and len(output.confidence_score) == output.draft_tok - 1
        for score, temperature in zip(output.confidence_score, (1, 2, 4, 0.5, 1), strict=False):
            assert np.isclose(score, 1 / (1 + np.exp(-logits / temperature))).any()


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("hot", "is 'hot'; expected a positive number, or a comma list of one for each draft"),
        ("1,0,1,1,1", "expected a positive number"),
        ("nan", "expected a positive number"),
        ("1,2", "is '1,2', 2 temperatures, but 5 tokens are drafted per step"),
    ],
)
def test_impossible_temperatures_are_refused(value: str, sentence: str) -> None:
    with (
        variables(DFLASH_CONFIDENCE_HEAD_TEMPERATURE=value),
        pytest.raises(ValueError, match=f"DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE {sentence}|{sentence}"),
    ):
        varlen_engine()


def test_step_times_are_measured_once_and_kept(tmp_path: object) -> None:
    with variables(DECODE_PERF_CACHE_DIR=str(tmp_path)):
        varlen_engine()
        with mock.patch(
            "deepinfer_jax.runtime.runner.Runner.time_decode", side_effect=AssertionError("measured again")
        ):
            varlen_engine()


@pytest.mark.slow
def test_state_of_any_kind_goes_along_with_packed_rows() -> None:
    engine = varlen_engine(choose="random", model=DummyKindModel(), num_kv_blocks=28, stop_preempted_request=False)
    answers = ask(engine, temperature=0)
    for i in range(6):
        count = min(20 + i, 41 - (3 + 2 * i))
        assert answers[str(i)] == dummy_kind_twin(TABLE, random_prompt(3 + 2 * i, seed=i), count)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", ["1", "0"])
def test_constrained_requests_give_what_each_gives_alone(overlap: str) -> None:
    grammar = {"schema_type": "regex", "schema": "(ab|c[0-9]{1,2})+x?"}
    with (
        variables(ENABLE_MTP_VARLEN="1", USE_NEXTN_DECODE=str(DRAFTS), ZERO_OVERHEAD_SCHEDULING=overlap),
        mock.patch("deepinfer_jax.engine.llm_engine.load_parts", grammar_parts),
    ):
        engine = LLMEngine(EngineArgs(model="toy", disable_log_stats=True, max_num_seqs=6, tokens_per_block=4))
    random_choice(engine)
    prompts = [random_prompt(1 + number * 7 % 19, seed=number) for number in range(12)]
    for number, prompt in enumerate(prompts):
        how = SamplingParams(temperature=0, max_tokens=20, so_args=grammar if number % 2 else None)
        engine.add_request("u", str(number), how, prompt)
    found = run(engine)
    for number, prompt in enumerate(prompts):
        wanted = constrained_twin(prompt, grammar, 20) if number % 2 else greedy_twin(TABLE, prompt, 20)
        assert tokens(found[str(number)]) == wanted


@pytest.mark.slow
def test_two_data_indices_verify_each_its_own() -> None:
    found = served("two_devices_varlen")
    assert found["data_indices"] == [0, 1] and found["steps_by_size"].keys() == {"10", "24"}
    for i in range(12):
        assert found["tokens"][str(i)] == greedy_twin(TABLE, random_prompt(1 + 3 * i % 23, seed=i), 2 + i % 9)
