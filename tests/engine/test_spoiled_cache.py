"""NaN in what is cached fails those that read it, and goes with them; in the debug mode what is given up is NaN."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from deepinfer_jax.cache.pools import StateSpec
from deepinfer_jax.engine.environ import env
from deepinfer_jax.engine.llm_engine import LLMEngine
from deepinfer_jax.engine.requests.sampling_params import SamplingParams
from deepinfer_jax.runtime.paged_model import Advanced, StepBatch
from tests.support.toy import (
    NUM_STATES,
    TOY,
    VOCAB,
    at_new_tokens,
    extend_history,
    greedy_twin,
    make_table,
    random_prompt,
    rows_before,
    run,
    tokens,
    toy_engine,
    write_rows,
)

pytestmark = [pytest.mark.toy, pytest.mark.unoptimised]

TABLE = make_table()
GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


@dataclass(frozen=True)
class FragileModel:
    """A `StepModel`: the toy, whose logits are NaN behind a NaN in the blocks or the slot; it writes zeros there."""

    batch_invariant = False
    vocab_size = VOCAB

    def state(self, tokens_per_block: int) -> dict[str, Any]:
        number = jnp.dtype(jnp.float32)
        return {
            "toy": TOY.state(tokens_per_block),
            "block": StateSpec("block", "block", (tokens_per_block,), number),
            "slot": StateSpec("slot", "slot", (), number, reach=1),
        }

    def advance(self, params: Array, cache: dict[str, Any], batch: StepBatch) -> Advanced:
        hidden, lengths, toy = TOY.advance(params, cache["toy"], batch)
        block, history = extend_history(cache["block"], batch, jnp.zeros(batch.tokens.shape))
        read = at_new_tokens(jnp.cumsum(history, axis=1), batch) + rows_before(
            cache["slot"], batch.slots, batch.starts, 1
        )
        spoiled = jnp.where(jnp.isnan(read)[..., None], NUM_STATES, hidden)
        cache = {"toy": toy, "block": block, "slot": write_rows(cache["slot"], batch, read)}
        return Advanced(spoiled, lengths, cache)

    def logits(self, params: Array, hidden: Array) -> Array:
        return TOY.logits(params, hidden)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("DEEPINFER_POISON_FREED_STATE", "1")
    env.rearm()
    yield
    monkeypatch.undo()
    env.rearm()


def ask(engine: LLMEngine, prompt: list[int]) -> tuple[list[int], int, str]:
    """Its tokens, how many of the prompt's were restored, and how it ended."""
    engine.add_request("u", "r", GREEDY, prompt)
    outputs = run(engine)["r"]
    return tokens(outputs), outputs[0].num_cached_tokens, outputs[-1].finish_reason


def snapshots(engine: LLMEngine) -> list[np.ndarray]:
    return list(engine.core.scheduler.snapshots._states.values())


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("where", ["block", "snapshot"])
def test_a_nan_in_the_cache_fails_one_request_and_the_next_computes_it_anew(where: str, overlap: bool) -> None:
    engine = toy_engine(model=FragileModel(), overlap=overlap)
    prompt, other = random_prompt(19), random_prompt(9, seed=1)
    longer = [*prompt[:16], 5, 6, 7, 8, 9]
    right = greedy_twin(TABLE, prompt, 3)
    assert ask(engine, prompt) == (right, 0, "length")
    assert ask(engine, other) == (greedy_twin(TABLE, other, 3), 0, "length")
    if where == "block":
        block = engine.core.scheduler._residents.blocks[0].match(key_of_first_block(engine))
        assert block is not None
        engine.core.runner.poison([[block]], [[]])
    else:
        for state in snapshots(engine):
            state.fill(0xFF)
    assert ask(engine, longer)[2] == "logits_not_finite"
    assert engine.stats()["num_cached_tokens"] == 16
    assert ask(engine, prompt) == (right, 0, "length")
    assert ask(engine, prompt) == (right, 16, "length")
    assert ask(engine, longer) == (greedy_twin(TABLE, longer, 3), 16, "length")
    if where == "block":
        assert ask(engine, other) == (greedy_twin(TABLE, other, 3), 8, "length")


def key_of_first_block(engine: LLMEngine) -> bytes:
    """Of the least recently used text."""
    return next(iter(engine.core.scheduler._residents.blocks[0]._block_of))


def test_snapshots_that_are_given_up_are_overwritten() -> None:
    engine = toy_engine(model=FragileModel())
    prompt = random_prompt(19)
    ask(engine, prompt)
    size = snapshots(engine)[0].nbytes
    engine.close()

    engine = toy_engine(model=FragileModel(), snapshot_memory_bytes=2 * size)
    ask(engine, prompt)
    first = snapshots(engine)
    copies = [state.copy() for state in first]
    assert len(first) == 2 and not any((state == 0xFF).all() for state in first)
    for seed in (1, 2):
        ask(engine, random_prompt(9, seed=seed))
    last = snapshots(engine)
    engine.step()  # what the last step drove out is reported by the next plan
    assert all((state == 0xFF).all() for state in first)
    assert not any((state == 0xFF).all() for state in last)
    assert ask(engine, prompt) == (greedy_twin(TABLE, prompt, 3), 0, "length")
    for state, copy in zip(snapshots(engine), copies, strict=True):
        np.testing.assert_array_equal(state, copy)  # those that take their place are right


def test_a_snapshot_that_is_given_up_while_its_copy_is_in_flight_is_restored_right() -> None:
    """One fits. What the first step of `new` leaves is committed when the plan that starts from the old is launched."""
    size = snapshots_of(random_prompt(9))[0].nbytes
    engine = toy_engine(model=FragileModel(), snapshot_memory_bytes=size)
    prompt, new = random_prompt(8), random_prompt(12, seed=1)
    ask(engine, prompt)
    (old,) = snapshots(engine)
    engine.add_request("u", "new", GREEDY, new)
    engine.step()
    engine.add_request("u", "hit", GREEDY, [*prompt, 5, 6])
    engine.step()
    assert snapshots(engine)[0] is not old
    results = run(engine)
    assert (old == 0xFF).all()
    assert results["hit"][0].num_cached_tokens == 8
    assert tokens(results["hit"]) == greedy_twin(TABLE, [*prompt, 5, 6], 3)
    assert tokens(results["new"]) == greedy_twin(TABLE, new, 3)


def snapshots_of(prompt: list[int]) -> list[np.ndarray]:
    engine = toy_engine(model=FragileModel())
    ask(engine, prompt)
    return snapshots(engine)
