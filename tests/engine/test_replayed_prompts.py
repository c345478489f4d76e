"""Bounded replay through the engine: both modes give the same tokens in crowded, cut and preempted steps."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from deepinfer_jax import LLM, SamplingParams, load_config
from deepinfer_jax.engine.environ import env
from deepinfer_jax.engine.resolution import bounded_replay
from deepinfer_jax.model.bounded_replay import Replay
from tests.support.real_model import generate, long_golden_a, requests
from tests.support.toy import toy_engine

pytestmark = [pytest.mark.toy, pytest.mark.unoptimised]

KEEP = 20  # golden A's window is 16
LENGTHS = [1, 15, 16, 17, 19, 20, 21, 33, 37, 64, 100, 117]
SMALL = {"max_num_seqs": 4, "max_model_len": 160, "tokens_per_block": 16, "precision": "float32_exact"}
CROWDED = SMALL | {"num_kv_blocks": 11, "stop_preempted_request": False}  # one sequence of max_model_len takes 10

Replaying = Callable[[str, int], AbstractContextManager[None]]


@pytest.fixture
def replaying(monkeypatch: pytest.MonkeyPatch) -> Replaying:
    """A scope in which engines are made with a mode and a number of kept tokens."""

    @contextmanager
    def scope(mode: str, keep: int) -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setenv("DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE", mode)
            patch.setenv("DEEPINFER_YOCO_PREFILL_KEEP_TOKENS", str(keep))
            env.rearm()
            yield
        env.rearm()

    return scope


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return long_golden_a(tmp_path_factory.mktemp("models") / "a")


@pytest.mark.slow
def test_both_modes_give_the_same_tokens_crowded_and_preempted(folder: Path, replaying: Replaying) -> None:
    """A preempted sequence counts its kept tokens from its new end, in both modes alike."""
    found = {}
    for mode in ("off", "mask", "compact"):
        with replaying(mode, 0 if mode == "off" else KEEP):
            llm = LLM(folder, decode_sequence=False, **CROWDED)  # type: ignore[arg-type]
        compiled = llm.llm_engine.compile_count
        found[mode] = [generate(llm, *requests(LENGTHS, greedy=greedy)) for greedy in (True, False)]
        stats = llm.llm_engine.stats()
        assert stats["num_preemptions"] > 0 and llm.llm_engine.compile_count == compiled
        assert stats["free_blocks"] == stats["total_blocks"]
        llm.close()
    assert found["compact"] == found["mask"]
    assert found["compact"] != found["off"]


@pytest.mark.slow
def test_tokens_do_not_depend_on_how_prompts_are_cut(folder: Path, replaying: Replaying) -> None:
    """Chunks shorter than what is kept, and whole prompts, of which most rows are left out."""
    found = []
    for options in ({"max_num_batched_tokens": 12}, {"chunked_prefill": False}):
        with replaying("compact", KEEP):
            llm = LLM(folder, decode_sequence=False, **SMALL | options)  # type: ignore[arg-type]
        found.append(generate(llm, *requests(LENGTHS, greedy=True)))
        llm.close()
    assert found[0] == found[1]


def test_the_environment_says_how(folder: Path, replaying: Replaying) -> None:
    config = load_config(folder)
    assert bounded_replay(config.text, num_drafts=0) is None
    with replaying("compact", 17):
        assert bounded_replay(config.text, num_drafts=0) == Replay("compact", 17)


MODE, TOKENS = "DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE", "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS"


@pytest.mark.parametrize(
    ("mode", "keep", "sentence"),
    [
        ("masked", 20, f"{MODE} is 'masked'; expected off, mask or compact"),
        (
            "off",
            20,
            f"{TOKENS} is 20, but {MODE} is off, which keeps all tokens; set it to mask or compact, or unset {TOKENS}",
        ),
        (
            "compact",
            16,
            f"{MODE} is compact and {TOKENS} is 16, but 16 tokens are kept, fewer than sliding_window + rollback = "
            "16 + 1 = 17: the windows of the first decoded tokens would reach before them",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_weights_are_read(
    folder: Path, replaying: Replaying, mode: str, keep: int, sentence: str
) -> None:
    with replaying(mode, keep), pytest.raises(ValueError) as refused:
        LLM(folder, load_format="dummy")
    assert str(refused.value) == sentence


def test_prompt_log_probabilities_are_refused_and_harm_no_other_request(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = toy_engine()
    engine.rules = dataclasses.replace(engine.rules, keep_tokens=KEEP)
    wants, free = SamplingParams(prompt_logprobs=True), SamplingParams(max_tokens=2)
    sentence = (
        "prompt_logprobs need the final states of the whole prompt, but with "
        f"DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE on only those of its last {KEEP} tokens are right; ask for none, or "
        "use an engine without it"
    )
    with pytest.raises(ValueError, match=r"^request r: prompt_logprobs need") as refused:
        engine.add_request("u", "r", wants, [4, 5, 6])
    assert str(refused.value) == f"request r: {sentence}"
    assert not engine.has_unfinished_requests()
    monkeypatch.setattr("deepinfer_jax.engine.llm.LLMEngine", lambda args: engine)
    llm = LLM("toy", decode_sequence=False)
    with pytest.raises(ValueError, match=r"^prompt 1: prompt_logprobs need"):
        llm.generate(prompt_token_ids=[[4, 5], [4, 5]], sampling_params=[free, wants])
    results = llm.generate(prompt_token_ids=[[4, 5], [4, 5]], sampling_params=[free, wants], on_invalid="report")
    assert len(results[0]) == 2
    assert results[1][-1].message == sentence
