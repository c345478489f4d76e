"""With one number of drafts, tokens do not depend on how an engine comes to them: toy model, against a plain twin.

The twin knows neither batches nor caches. So whoever drafts after a preemption, a hit, a hand-over or a chunk something
else than in an undisturbed run, or verifies it from another position, gives other sampled tokens here.
"""

from typing import Any

import numpy as np
import pytest

from deepinfer_jax.engine.args import EngineType
from deepinfer_jax.engine.llm_engine import LLMEngine
from deepinfer_jax.engine.requests.sampling_params import SamplingParams
from deepinfer_jax.scheduler import Sequence, SequenceStatus
from tests.support.drafting import draft_twin, drafts
from tests.support.engine_runs import while_unfinished
from tests.support.marks import slow
from tests.support.toy import (
    DRAFT_BLOCK,
    MAX_POSITIONS,
    ToyModel,
    greedy_twin,
    make_table,
    random_prompt,
    run,
    tokens,
    toy_engine,
)

pytestmark = [pytest.mark.toy, pytest.mark.unoptimised, pytest.mark.usefixtures("poisoned")]
TABLE = make_table()
STRICT = ToyModel(strict=True)  # a slot of other tokens than those in the blocks fails
NUM_DRAFTS = 3
LENGTHS = (1, 3, 4, 7, 8, 9, 16, 21, 2, 5)


def params(number: int, count: int = 18) -> SamplingParams:
    how = {"temperature": 0.0} if number % 3 == 0 else {"temperature": 0.9, "top_k": 12}
    return SamplingParams(max_tokens=count + number % 4, ignore_eos=True, seq_seed=number, **how)


PROMPTS = [random_prompt(length, seed=i) for i, length in enumerate(LENGTHS)]
EXPECTED = [draft_twin(TABLE, prompt, params(i), NUM_DRAFTS, MAX_POSITIONS).tokens for i, prompt in enumerate(PROMPTS)]


def drafting_engine(**options: Any) -> LLMEngine:
    with drafts(NUM_DRAFTS):
        return toy_engine(model=STRICT, **{"stop_preempted_request": False, "num_kv_blocks": 200} | options)


def answers(engine: LLMEngine, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    first = engine._next_seq_id
    for i, prompt in enumerate(prompts):
        engine.add_request("u", str(first + i), params(i), prompt)
    results = run(engine)
    found = [results[str(first + i)] for i in range(len(prompts))]
    assert not any(outputs[-1].message for outputs in found)
    return [tokens(outputs) for outputs in found]


@pytest.mark.parametrize(
    "options",
    [
        {"overlap": False},
        slow({"max_num_seqs": 1}),
        slow({"max_num_seqs": 10}),
        slow({"chunk": 1}),
        {"chunk": 3, "max_num_batched_tokens": 25},
        slow({"chunked_prefill": False}),
        slow({"tokens_per_block": 2}),
        slow({"tokens_per_block": 8, "enable_prefix_caching": False}),
    ],
    ids=str,
)
def test_batches_chunks_blocks_and_overlap_change_no_token(options: dict[str, Any]) -> None:
    assert answers(drafting_engine(**options)) == EXPECTED


@pytest.mark.parametrize("overlap", [True, slow(False)])
@pytest.mark.parametrize("reuse", [True, False])
def test_preemption_changes_no_token(overlap: bool, reuse: bool) -> None:
    """Also not which drafts are verified: a sequence goes on where a step had ended."""
    engine = drafting_engine(overlap=overlap, num_kv_blocks=13, enable_prefix_caching=reuse)
    assert answers(engine) == EXPECTED
    assert engine.stats()["num_preemptions"] > 3


def test_a_hit_in_the_cache_changes_no_token() -> None:
    """The second time from the cache; then texts that go on behind what was generated."""
    engine = drafting_engine()  # of 200 blocks: nothing is forgotten
    assert answers(engine) == EXPECTED
    cached = engine.stats()["num_cached_tokens"]
    assert answers(engine) == EXPECTED
    assert engine.stats()["num_cached_tokens"] > cached
    second = [[*(prompt + output[:9])[:20], 7] for prompt, output in zip(PROMPTS, EXPECTED, strict=True)]
    cached = engine.stats()["num_cached_tokens"]
    assert answers(engine, second) == [
        draft_twin(TABLE, prompt, params(i), NUM_DRAFTS, MAX_POSITIONS).tokens for i, prompt in enumerate(second)
    ]
    assert engine.stats()["num_cached_tokens"] > cached


def test_hand_over_changes_no_token() -> None:
    """What computes prompts drafts nothing; what takes them over drafts before its first step."""
    first, second = (drafting_engine(engine_type=kind) for kind in (EngineType.PROMPT, EngineType.COMPLETION))
    assert (first.limits.num_drafts, second.limits.num_drafts) == (0, NUM_DRAFTS)
    for i, prompt in enumerate(PROMPTS):
        first.add_request("u", str(i), params(i), prompt)
    found: dict[str, list[int]] = {}
    for _ in while_unfinished(first, second, also=first.computed_requests):
        for output in [*first.step(), *second.step()]:
            found.setdefault(output.request_id, []).append(output.token_id)
        for name in first.computed_requests():
            second.import_sequence(first.export_sequence(name))
    assert [found[str(i)] for i in range(len(PROMPTS))] == EXPECTED


def test_an_engine_that_lost_a_step_gives_the_same_tokens_again() -> None:
    engine = drafting_engine()
    for i, prompt in enumerate(PROMPTS[:3]):
        engine.add_request("u", f"lost{i}", params(i), prompt)
    engine.step()
    engine.step()
    broken, engine.core.runner._programs.steps = engine.core.runner._programs.steps, {}
    with pytest.raises(RuntimeError, match="no decode program"):
        engine.step()
    engine.core.runner._programs.steps = broken
    assert [outputs[-1].finish_reason for outputs in run(engine).values()] == ["abort"] * 3
    assert answers(engine) == EXPECTED


@pytest.mark.parametrize("num_drafts", [slow(1), slow(2), slow(4), slow(DRAFT_BLOCK)])
def test_greedy_tokens_are_those_without_drafts_for_any_number_of_them(num_drafts: int) -> None:
    with drafts(num_drafts):
        engine = toy_engine(model=STRICT, num_kv_blocks=14, stop_preempted_request=False)
    for i, prompt in enumerate(PROMPTS):
        engine.add_request("u", str(i), SamplingParams(temperature=0, max_tokens=19, ignore_eos=True), prompt)
    results = run(engine)
    for i, prompt in enumerate(PROMPTS):
        assert tokens(results[str(i)]) == greedy_twin(TABLE, prompt, min(19, MAX_POSITIONS + 1 - len(prompt)))
    assert engine.stats()["num_preemptions"] > 0


@pytest.mark.slow
@pytest.mark.unoptimised(False)  # compares bytes of prefill and decode
def test_rejected_drafts_leave_nothing_in_slots_and_blocks() -> None:
    """After every step the state of each sequence is that of its text, to the byte, and so are its next drafts."""
    engine, fresh = drafting_engine(overlap=False), drafting_engine(overlap=False)
    for i, prompt in enumerate(PROMPTS[:6]):
        engine.add_request("u", str(i), params(i), prompt)
    compared = 0
    for _ in range(7):
        engine.step()
        for sequence in engine.core.scheduler._residents.running:
            twin = computed_afresh(fresh, sequence)
            assert state(engine, sequence) == state(fresh, twin)
            fresh.abort_request(twin.request_id)
            compared += 1
    assert compared > 20
    assert engine.stats()["num_wasted_rows"] > 20


def computed_afresh(engine: LLMEngine, sequence: Sequence) -> Sequence:
    """A sequence of the same text, as after a preemption: all but the last token is computed, and drafts are made."""
    text = sequence.token_ids(0, len(sequence)).tolist()
    twin = engine.add_request("u", f"{sequence.request_id}-{len(text)}", sequence.request.params, text[:-1])
    assert twin is not None
    twin.output_token_ids.append(text[-1])
    while twin.status != SequenceStatus.RUNNING:
        engine.step()
    return twin


def state(engine: LLMEngine, sequence: Sequence) -> list[Any]:
    """Slot state, length and last token, drafts with distributions and confidences, and the tokens in the blocks."""
    count, place = len(sequence) - 1, (sequence.dp_rank, sequence.state_id)
    where = [np.asarray([n], np.int32) for n in (*place, count)]
    cache, table = engine.core.runner._state  # type: ignore[misc]
    blocks = cache["tokens"][sequence.dp_rank, np.asarray(sequence.block_table)].reshape(-1)[:count]
    kept = [blocks, *(array[place] for array in (table.lengths, table.last_token, *vars(table.drafts).values()))]
    return [engine.core.runner.read_slots(*where).result().tobytes(), *(np.asarray(array).tolist() for array in kept)]
