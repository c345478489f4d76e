"""A prompt whose beginning was computed before gives the tokens of a cold run, on the real model and with everything
that is freed overwritten by NaN. Exact tokens in "float32_exact", where no rounding can flip one (design.md §5)."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from deepinfer_jax import LLM, RequestOutput, SamplingParams
from deepinfer_jax.engine.environ import env
from tests.support.real_model import MAX_POSITIONS, generate, tokens_of, what_forward_says
from tests.support.small_model import write_small_model

PRECISION = "float32_exact"
SIZES = {"precision": PRECISION, "max_num_seqs": 4, "max_model_len": 640, "decode_sequence": False}
BLOCK = 128
RNG = np.random.default_rng(4)
TEXT = RNG.integers(3, 192, 600).tolist()
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, top_k=40, seq_seed=5, max_tokens=6, ignore_eos=True)
pytestmark = [pytest.mark.real, pytest.mark.usefixtures("poisoned")]
# Engines compile and compute for seconds: sampling comes with the slow tests, hand-over's greedy ones as well.
both = pytest.mark.parametrize(
    "params", [pytest.param(GREEDY, id="greedy"), pytest.param(SAMPLED, id="sampled", marks=pytest.mark.slow)]
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_model(tmp_path_factory.mktemp("models") / "small", MAX_POSITIONS)


@pytest.fixture(scope="module")
def cold(folder: Path) -> Iterator[LLM]:
    llm = LLM(folder, enable_prefix_caching=False, **SIZES)
    yield llm
    llm.close()


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    """An engine that has seen nothing yet; its programs are compiled once for all of them."""
    llm = LLM(folder, **SIZES)
    yield llm
    llm.close()


def ask(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> tuple[list[list[int]], list[int]]:
    """Tokens of the prompts, and how many of each prompt's tokens were restored."""
    results: list[list[RequestOutput]] = llm.generate(  # type: ignore[assignment]
        prompt_token_ids=prompts, sampling_params=[params] * len(prompts), use_tqdm=False
    )
    stats = llm.llm_engine.stats()
    assert stats["free_blocks"] == stats["total_blocks"] and stats["free_slots"] == stats["total_slots"]
    return tokens_of(results), [outputs[0].num_cached_tokens for outputs in results]


def other(token: int) -> int:
    return 3 + (token - 3 + 1) % 189


def parted(length: int) -> list[int]:
    """A prompt that shares `length` tokens with TEXT, and no more."""
    return [*TEXT[:length], other(TEXT[length]), *TEXT[40:60]]


@both
@pytest.mark.parametrize("shared", [0, 1, 127, 128, 129, 512, 513])
def test_a_hit_gives_the_tokens_of_a_cold_run(llm: LLM, cold: LLM, shared: int, params: SamplingParams) -> None:
    ask(llm, [TEXT], params)
    found, cached = ask(llm, [parted(shared)], params)
    assert cached == [shared // BLOCK * BLOCK]
    assert (found, [0]) == ask(cold, [parted(shared)], params)


@both
@pytest.mark.parametrize("length", [1, 127, 128, 129, 256, 512, 513])
def test_a_prompt_that_was_computed_whole_computes_at_least_one_token(
    llm: LLM, cold: LLM, length: int, params: SamplingParams
) -> None:
    expected, _ = ask(cold, [TEXT[:length]], params)
    for cached in (0, (length - 1) // BLOCK * BLOCK, (length - 1) // BLOCK * BLOCK):
        assert ask(llm, [TEXT[:length]], params) == (expected, [cached])


@pytest.mark.slow
def test_a_hit_gives_the_tokens_of_forward_alone(folder: Path, llm: LLM) -> None:
    ask(llm, [TEXT], SAMPLED)
    prompt = parted(300)
    (found,), cached = ask(llm, [prompt], SAMPLED)
    assert cached == [256]
    assert found == what_forward_says(folder, PRECISION, prompt, SAMPLED, found)


@both
def test_requests_with_hits_of_different_lengths_run_in_one_batch(llm: LLM, cold: LLM, params: SamplingParams) -> None:
    """Each row has its own window, open groups and n-gram tail (K7)."""
    ask(llm, [TEXT], params)
    prompts = [parted(5), parted(300), parted(520), TEXT[:130]]
    found, cached = ask(llm, prompts, params)
    assert cached == [0, 256, 512, 128]
    assert found == ask(cold, prompts, params)[0]


@both
def test_the_second_turn_of_a_conversation_finds_prompt_and_answer(llm: LLM, cold: LLM, params: SamplingParams) -> None:
    turn = TEXT[:250]
    (answer,), _ = ask(llm, [turn], params)
    for question in (TEXT[7:20], TEXT[90:230], TEXT[33:60]):
        turn = [*turn, *answer, *question]
        (answer,), cached = ask(llm, [turn], params)
        # All whole blocks of the turn before, and of this one's answer to it.
        assert cached == [(len(turn) - len(question) - 1) // BLOCK * BLOCK]
        assert [answer] == ask(cold, [turn], params)[0]


@pytest.mark.slow
@both
def test_hits_come_back_after_eviction(folder: Path, cold: LLM, params: SamplingParams) -> None:
    llm = LLM(folder, **SIZES, num_kv_blocks=5)  # one text of 640 tokens
    expected, _ = ask(cold, [TEXT], params)
    other_text = TEXT[::-1]
    assert ask(llm, [TEXT], params) == (expected, [0])
    assert ask(llm, [TEXT], params) == (expected, [512])
    assert ask(llm, [other_text], params) == (ask(cold, [other_text], params)[0], [0])
    found, cached = ask(llm, [TEXT], params)
    assert found == expected and cached[0] < 512
    assert ask(llm, [TEXT], params) == (expected, [512])
    llm.close()


@both
def test_without_room_for_snapshots_the_text_is_computed_from_the_last_one(
    folder: Path, cold: LLM, params: SamplingParams
) -> None:
    """The blocks alone are no hit: windows, open groups and n-gram tails at that point are gone (K4, K8)."""
    probe = LLM(folder, **SIZES)
    ask(probe, [TEXT], params)
    stats = probe.llm_engine.stats()
    one = stats["snapshot_bytes"] // stats["num_snapshots"]
    probe.close()
    expected, _ = ask(cold, [TEXT], params)
    # Room for two: those of 384 and 512 tokens. A short prompt takes the place of the older one.
    llm = LLM(folder, **SIZES, snapshot_memory_bytes=2 * one)
    ask(llm, [TEXT], params)
    assert ask(llm, [parted(400)], params)[1] == [384]
    assert ask(llm, [TEXT[300:450]], params)[1] == [0]
    assert llm.llm_engine.stats()["num_snapshots"] == 2
    found, cached = ask(llm, [TEXT], params)
    assert found == expected and cached[0] in (0, 384)
    llm.close()
    none = LLM(folder, **SIZES, snapshot_memory_bytes=0)
    assert [ask(none, [TEXT], params) for _ in range(2)] == [(expected, [0])] * 2
    none.close()


def test_a_request_for_prompt_log_probabilities_computes_its_whole_prompt(llm: LLM, cold: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=True)
    ask(llm, [TEXT], params)
    (hit,) = llm.generate(prompt_token_ids=[TEXT], sampling_params=[params], use_tqdm=False)
    (expected,) = cold.generate(prompt_token_ids=[TEXT], sampling_params=[params], use_tqdm=False)
    assert hit[0].num_cached_tokens == 0
    assert len(hit[0].prompt_logprobs) == len(TEXT) - 1
    # The same numbers in other chunks: float32 sums in another order.
    np.testing.assert_allclose(hit[0].prompt_logprobs, expected[0].prompt_logprobs, atol=2e-5)


@pytest.mark.slow
@both
def test_preempted_requests_find_their_own_state_again(folder: Path, cold: LLM, params: SamplingParams) -> None:
    llm = LLM(folder, **SIZES, num_kv_blocks=6)
    prompts = [TEXT[i : i + 250] for i in (0, 50, 100, 150)]
    wanted = [SamplingParams(**vars(params) | {"max_tokens": 30, "seq_seed": i}) for i in range(4)]
    found = generate(llm, prompts, wanted)
    assert llm.llm_engine.stats()["num_preemptions"] > 0
    assert found == generate(cold, prompts, wanted)
    llm.close()


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["reference", "bf16"])
def test_with_batch_invariance_a_hit_equals_a_cold_run_in_every_precision(
    folder: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    """And to the bit of its log-probabilities."""
    monkeypatch.setenv("DEEPINFER_BATCH_INVARIANT", "1")
    env.rearm()
    try:
        llm, cold = (LLM(folder, **SIZES | {"precision": precision}, enable_prefix_caching=on) for on in (True, False))
    finally:
        monkeypatch.delenv("DEEPINFER_BATCH_INVARIANT")
        env.rearm()

    def numbers(llm: LLM, prompt: list[int]) -> list[tuple[int, float]]:
        (outputs,) = llm.generate(prompt_token_ids=[prompt], sampling_params=[SAMPLED], use_tqdm=False)
        return [(output.token_id, output.token_logprobs) for output in outputs]  # type: ignore[union-attr]

    numbers(llm, TEXT)
    for shared in (129, 513):
        assert numbers(llm, parted(shared)) == numbers(cold, parted(shared))
    assert llm.llm_engine.stats()["num_cached_tokens"] == 128 + 512
    for engine in (llm, cold):
        engine.close()
