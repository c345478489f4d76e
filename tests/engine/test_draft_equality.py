"""On the real model greedy tokens with drafts are those without, and sampled ones follow from the text and the seed
alone. Exact tokens in "float32_exact", where no rounding can flip one, with everything that is freed full of NaN.

The released draft layers of the golden models accept little, as their weights are random; so some engines have draft
layers that often agree with the target (`agreeing.py`).
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepinfer_jax import LLM
from deepinfer_jax.engine.environ import env
from tests.support.agreeing import agreeing_load
from tests.support.drafting import drafts
from tests.support.real_model import MAX_POSITIONS, generate, long_golden_a, requests, what_forward_says
from tests.support.small_model import write_small_model

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("poisoned")]
PRECISION = "float32_exact"
# Pools of 11 blocks: one sequence of max_model_len takes 10, so several of these lengths do not fit together.
SMALL = {"max_num_seqs": 4, "max_model_len": 160, "tokens_per_block": 16, "num_kv_blocks": 11}
LENGTHS = [1, 2, 15, 16, 17, 33, 64, 100, 117, 5]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return long_golden_a(tmp_path_factory.mktemp("models") / "a")


def engine(folder: Path, num_drafts: int, **options: Any) -> LLM:
    with drafts(num_drafts):
        return LLM(folder, decode_sequence=False, **{"precision": PRECISION} | SMALL | options)


@pytest.fixture(scope="module")
def drafting(folder: Path, poisoned: None) -> Iterator[LLM]:
    llm = engine(folder, 4)
    yield llm
    llm.close()


@pytest.mark.slow
def test_greedy_tokens_are_those_of_forward_alone_also_when_preempted(folder: Path, drafting: LLM) -> None:
    prompts, params = requests(LENGTHS, greedy=True)
    stats = drafting.llm_engine.stats
    found = generate(drafting, prompts, params)
    assert found == [
        what_forward_says(folder, PRECISION, prompt, own, output)
        for prompt, own, output in zip(prompts, params, found, strict=True)
    ]
    assert stats()["num_preemptions"] > 0 and sum(stats()["num_drafts_verified"]) > 1000
    assert stats()["free_blocks"] == stats()["total_blocks"] and stats()["free_slots"] == stats()["total_slots"]


@pytest.mark.slow
def test_sampled_tokens_are_the_same_one_by_one(drafting: LLM) -> None:
    prompts, params = requests(LENGTHS, greedy=False)
    crowded = generate(drafting, prompts, params)
    assert crowded == [generate(drafting, [prompt], [own])[0] for prompt, own in zip(prompts, params, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("greedy", [True, False])
def test_tokens_are_the_same_where_drafts_are_accepted(
    folder: Path, monkeypatch: pytest.MonkeyPatch, greedy: bool
) -> None:
    """Greedy for every number of drafts; sampled with one number in any company."""
    monkeypatch.setattr("deepinfer_jax.engine.loading.load_params", agreeing_load)
    prompts, params = requests(LENGTHS, greedy=greedy)
    if greedy:
        expected = generate(engine(folder, 0), prompts, params)
        for num_drafts in (1, 5):
            llm = engine(folder, num_drafts)
            assert generate(llm, prompts, params) == expected
            assert llm.llm_engine.stats()["mean_accepted_length"] > 1.3
            assert llm.llm_engine.stats()["num_wasted_rows"] > 100
    else:
        crowded, roomy = engine(folder, 3), engine(folder, 3, num_kv_blocks=64, max_num_batched_tokens=20)
        expected = generate(crowded, prompts, params)
        assert generate(roomy, prompts, params) == expected
        one_by_one = [generate(roomy, [prompt], [own])[0] for prompt, own in zip(prompts, params, strict=True)]
        assert one_by_one == expected
        assert crowded.llm_engine.stats()["num_preemptions"] > 0
        assert crowded.llm_engine.stats()["mean_accepted_length"] > 1.3


@pytest.mark.slow
def test_batch_invariance_makes_greedy_tokens_exact_in_the_released_precision(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Roundings that depend on how many rows a step has would flip tokens here; with the switch on there are none."""
    monkeypatch.setattr("deepinfer_jax.engine.loading.load_params", agreeing_load)
    monkeypatch.setenv("DEEPINFER_BATCH_INVARIANT", "1")
    env.rearm()
    try:
        plain, drafting = (engine(folder, num_drafts, precision="reference") for num_drafts in (0, 5))
    finally:
        monkeypatch.undo()
        env.rearm()
    prompts, params = requests(LENGTHS[4:9], greedy=True)
    assert generate(drafting, prompts, params) == generate(plain, prompts, params)
    stats = drafting.llm_engine.stats()
    assert stats["num_preemptions"] > 0 and stats["mean_accepted_length"] > 1.3 and stats["num_wasted_rows"] > 100


@pytest.fixture
def small(tmp_path: Path) -> Iterator[LLM]:
    llm = engine(write_small_model(tmp_path / "small", MAX_POSITIONS), 4, max_num_seqs=1)
    yield llm
    llm.close()


def test_log_probabilities_of_generated_tokens_are_those_of_scoring_the_text(small: LLM) -> None:
    """Rows of drafts against chunks of a prompt. Two cuts of one text differ by 5.5e-6 in logits (golden README)."""
    prompts, params = requests(LENGTHS[:6], greedy=False)
    params = [replace(own, logprobs_mode="raw_logprobs") for own in params]
    found = small.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
    texts = [prompt + [output.token_id for output in outputs] for prompt, outputs in zip(prompts, found, strict=True)]
    scoring = [replace(own, prompt_logprobs=True, max_tokens=1) for own in params]
    scored = small.generate(prompt_token_ids=texts, sampling_params=scoring, use_tqdm=False)
    for prompt, generated, outputs in zip(prompts, found, scored, strict=True):
        logprobs = [output.token_logprobs for output in generated]
        assert len(logprobs) >= 40
        np.testing.assert_allclose(outputs[0].prompt_logprobs[len(prompt) - 1 :], logprobs, atol=2e-5)
