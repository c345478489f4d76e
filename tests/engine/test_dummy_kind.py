"""A kind of state that nothing names but the model that declares it goes wherever a sequence goes: prefix reuse,
preemption and hand-over give the tokens of its plain twin. What is freed is poisoned."""

from pathlib import Path
from typing import Any

import pytest

from deepinfer_jax.engine.args import EngineType
from deepinfer_jax.engine.handover.sequence_state import SequenceState
from deepinfer_jax.engine.llm_engine import LLMEngine
from deepinfer_jax.engine.requests.sampling_params import SamplingParams
from tests.support.dummy_kind import DummyKindModel, dummy_kind_twin
from tests.support.engine_runs import is_idle, while_unfinished
from tests.support.reuse_traffic import BLOCK
from tests.support.toy import make_table, random_prompt, run, tokens, toy_engine

pytestmark = [pytest.mark.toy, pytest.mark.unoptimised, pytest.mark.usefixtures("poisoned")]

TABLE = make_table()
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
TEXT = random_prompt(28)


def engine(**options: Any) -> LLMEngine:
    """Of one size, so that its programs are compiled once; too few blocks for six sequences of 30 tokens."""
    return toy_engine(model=DummyKindModel(), stop_preempted_request=False, num_kv_blocks=28, **options)


def ask(llm_engine: LLMEngine, prompts: list[list[int]], max_tokens: int = 8) -> list[int]:
    """Asserts that every prompt gets the tokens of the twin; how many of its tokens were restored."""
    for i, prompt in enumerate(prompts):
        llm_engine.add_request("u", str(i), SamplingParams(temperature=0, max_tokens=max_tokens), prompt)
    results = run(llm_engine)
    for i, prompt in enumerate(prompts):
        assert tokens(results[str(i)]) == dummy_kind_twin(TABLE, prompt, max_tokens)
    return [results[str(i)][0].num_cached_tokens for i in range(len(prompts))]


@pytest.mark.parametrize("overlap", [True, False])
def test_a_prefix_hit_restores_the_dummy_kind(overlap: bool) -> None:
    one = engine(overlap=overlap)
    assert ask(one, [TEXT]) == [0]
    others = [TEXT[:shared] + random_prompt(5, seed=shared) for shared in (3, 4, 11, 12, 27)]
    assert ask(one, others) == [0, 0, 8, 8, 24]  # snapshots lie at the ends of chunks
    answer = dummy_kind_twin(TABLE, TEXT, 8)
    (cached,) = ask(one, [[*TEXT, *answer, 7]], max_tokens=2)
    assert cached == (len(TEXT) + len(answer) - 1) // BLOCK * BLOCK


def test_a_preempted_request_finds_the_dummy_kind_again() -> None:
    one = engine()
    ask(one, [random_prompt(10, seed=i) for i in range(6)], max_tokens=20)
    stats = one.stats()
    assert stats["num_preemptions"] > 0 and stats["num_cached_tokens"] > 0


@pytest.mark.parametrize("through_a_file", [False, True], ids=["memory", "file"])
def test_hand_over_takes_the_dummy_kind_along(tmp_path: Path, through_a_file: bool) -> None:
    prompts = [random_prompt(length, seed=length) for length in (1, 3, 4, 5, 17, 31)]
    prompt_engine = engine(engine_type=EngineType.PROMPT)
    completion_engine = engine(engine_type=EngineType.COMPLETION)
    for i, prompt in enumerate(prompts):
        prompt_engine.add_request("u", str(i), PARAMS, prompt)
    first: dict[str, int] = {}
    for _ in while_unfinished(prompt_engine):
        first |= {output.request_id: output.token_id for output in prompt_engine.step()}
    for name in prompt_engine.computed_requests():
        state = prompt_engine.export_sequence(name)
        if through_a_file:
            state.save(tmp_path / name)
            state = SequenceState.load(tmp_path / name)
        completion_engine.import_sequence(state)
    rest = run(completion_engine)
    for i, prompt in enumerate(prompts):
        assert [first[str(i)], *tokens(rest[str(i)])] == dummy_kind_twin(TABLE, prompt, 8)
    assert is_idle(prompt_engine.stats())
