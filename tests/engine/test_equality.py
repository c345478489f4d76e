"""The engine on the real model gives the tokens of `forward` alone, however it is run, with everything that is freed
overwritten by NaN. Exact tokens in "float32_exact", where no rounding can flip one (design.md §5)."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from deepinfer_jax import LLM
from deepinfer_jax.engine.environ import env
from deepinfer_jax.kernels.choice import KernelChoice
from tests.support.real_model import MAX_POSITIONS, generate, long_golden_a, requests, what_forward_says
from tests.support.small_model import write_small_model

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("poisoned")]
PRECISION = "float32_exact"
# Pools of 11 blocks: one sequence of max_model_len takes 10, so several of these lengths do not fit together.
SMALL = {"max_num_seqs": 4, "max_model_len": 160, "tokens_per_block": 16, "num_kv_blocks": 11}
LENGTHS = [1, 2, 15, 16, 17, 33, 64, 100, 117, 5]
# For the full product: many blocks of 16, or few of 128 with edges inside and between them.
LONG_LENGTHS = [1, 2, 3, 16, 17, 127, 128, 129, 255, 257, 300, 40]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_model(tmp_path_factory.mktemp("models") / "small", MAX_POSITIONS)


@pytest.fixture(scope="module")
def small_engine(folder: Path) -> Iterator[LLM]:
    llm = LLM(folder, precision=PRECISION, decode_sequence=False, **SMALL)
    assert "poison" in llm.llm_engine.core.runner._programs.state_ops
    yield llm
    llm.close()


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
def test_the_engine_gives_the_tokens_of_forward_crowded_or_one_by_one(
    folder: Path, small_engine: LLM, greedy: bool
) -> None:
    prompts, params = requests(LENGTHS, greedy=greedy)
    stats, compiled = small_engine.llm_engine.stats, small_engine.llm_engine.compile_count
    before = stats()["num_preemptions"]
    crowded = generate(small_engine, prompts, params)
    assert stats()["num_preemptions"] > before
    before = stats()["num_preemptions"]
    one_by_one = [generate(small_engine, [prompt], [own])[0] for prompt, own in zip(prompts, params, strict=True)]
    assert stats()["num_preemptions"] == before
    expected = [
        what_forward_says(folder, PRECISION, prompt, own, output)
        for prompt, own, output in zip(prompts, params, crowded, strict=True)
    ]
    assert crowded == expected
    assert one_by_one == expected
    assert small_engine.llm_engine.compile_count == compiled
    assert stats()["free_blocks"] == stats()["total_blocks"] and stats()["free_slots"] == stats()["total_slots"]


def test_without_zero_overhead_scheduling_the_tokens_are_the_same(
    folder: Path, small_engine: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, params = requests(LENGTHS, greedy=False)
    expected = generate(small_engine, prompts, params)
    monkeypatch.setenv("DEEPINFER_ZERO_OVERHEAD_SCHEDULING", "0")
    env.rearm()
    try:
        llm = LLM(folder, precision=PRECISION, decode_sequence=False, **SMALL)
    finally:
        monkeypatch.undo()
        env.rearm()
    assert not llm.llm_engine.limits.zero_overhead_scheduling
    assert small_engine.llm_engine.limits.zero_overhead_scheduling
    assert generate(llm, prompts, params) == expected


BASE = {"max_num_seqs": 4, "max_model_len": 330, "tokens_per_block": 16, "num_kv_blocks": 64}
VARIANTS = {
    "one at a time, in chunks of 128": {"max_num_seqs": 1},
    "chunks of 1": {"max_num_batched_tokens": 4},
    "chunks of 3": {"max_num_batched_tokens": 12},
    "whole prompts": {"chunked_prefill": False},
    "preempted": {"num_kv_blocks": 24, "max_num_seqs": 8},
    "blocks of 128": {"tokens_per_block": 128, "num_kv_blocks": 9},
    "blocks of 2": {"tokens_per_block": 2, "num_kv_blocks": 512},
    "a wide pool": {"max_num_seqs": 12, "num_kv_blocks": None},
}


@pytest.mark.slow
class TestEveryWayToRun:
    """Golden A beyond its 128 positions; each variant compiles programs of its own."""

    @pytest.fixture(scope="class")
    def folder(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return long_golden_a(tmp_path_factory.mktemp("models") / "a")

    @pytest.fixture(scope="class")
    def expected(self, folder: Path) -> dict[bool, list[list[int]]]:
        """From an engine that is itself held against `forward`."""
        llm = LLM(folder, precision=PRECISION, decode_sequence=False, **BASE)
        found = {}
        for greedy in (True, False):
            prompts, params = requests(LONG_LENGTHS, greedy=greedy, max_tokens=20)
            found[greedy] = generate(llm, prompts, params)
            for prompt, own, output in zip(prompts, params, found[greedy], strict=True):
                assert output == what_forward_says(folder, PRECISION, prompt, own, output)
        return found

    @pytest.mark.parametrize("variant", VARIANTS)
    def test_every_variant_gives_the_same_tokens(
        self, folder: Path, expected: dict[bool, list[list[int]]], variant: str
    ) -> None:
        llm = LLM(
            folder,
            precision=PRECISION,
            decode_sequence=False,
            **BASE | VARIANTS[variant],  # type: ignore[arg-type]
        )
        for greedy in (True, False):
            prompts, params = requests(LONG_LENGTHS, greedy=greedy, max_tokens=20)
            assert generate(llm, prompts, params) == expected[greedy]
            assert generate(llm, prompts, params) == expected[greedy]  # and again, on used blocks and slots
        if variant == "preempted":
            assert llm.llm_engine.stats()["num_preemptions"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bf16", "reference"])
def test_packed_and_unpacked_caches_give_the_same_tokens_and_log_probabilities(folder: Path, precision: str) -> None:
    prompts, params = requests(LENGTHS, greedy=False)
    found = []
    for kv_cache_format in ("packed", "unpacked"):
        llm = LLM(folder, precision=precision, decode_sequence=False, kv_cache_format=kv_cache_format, **SMALL)
        results = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
        found.append([[(output.token_id, output.token_logprobs) for output in outputs] for outputs in results])
    assert found[0] == found[1]  # the same numbers come out of either format, so the same bits


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bf16", "reference"])
def test_batch_invariance_makes_tokens_exact_in_every_precision(
    folder: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    """Roundings that depend on the shape of a step would flip tokens here; with the switch on there are none."""
    monkeypatch.setenv("DEEPINFER_BATCH_INVARIANT", "1")
    env.rearm()
    try:
        crowded, chunked = (
            LLM(folder, precision=precision, decode_sequence=False, **SMALL | options)
            for options in ({"stop_preempted_request": False}, {"max_num_batched_tokens": 12, "max_num_seqs": 3})
        )
    finally:
        monkeypatch.undo()
        env.rearm()
    for greedy in (True, False):
        prompts, params = requests(LENGTHS, greedy=greedy)
        expected = generate(crowded, prompts, params)
        one_by_one = [generate(crowded, [prompt], [own])[0] for prompt, own in zip(prompts, params, strict=True)]
        assert one_by_one == expected
        assert generate(chunked, prompts, params) == expected
        kernels = KernelChoice(batch_invariant=True)
        for prompt, own, output in zip(prompts, params, expected, strict=True):
            assert output == what_forward_says(folder, precision, prompt, own, output, kernels=kernels)
    assert crowded.llm_engine.stats()["num_preemptions"] > 0
