"""Readers that come, leave, are cancelled at any await or aborted, between steps that may break: nothing is kept."""

import asyncio
from dataclasses import dataclass, field
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.engine.async_engine import AsyncLLMEngine
from deepinfer_jax.engine.requests.outputs import RequestOutput
from deepinfer_jax.engine.requests.sampling_params import SamplingParams
from tests.support.async_toy import Gate, settle
from tests.support.toy import greedy_twin, make_table, random_prompt, toy_engine

pytestmark = [pytest.mark.toy, pytest.mark.unoptimised, pytest.mark.usefixtures("poisoned")]

MOST_TOKENS = 20


@dataclass(frozen=True)
class Plan:
    """What a reader wants, and when it leaves: after so many outputs (None: never), in which way.

    Its prompt has the first `shared` tokens of all others that have as many, and `own` of its own kind.
    """

    name: str | None
    shared: int
    own: int
    kind: int
    max_tokens: int
    as_text: bool
    reads: int | None
    by_aclose: bool
    pauses: int

    @property
    def prompt(self) -> list[int]:
        return random_prompt(self.shared) + random_prompt(self.own, seed=1 + self.kind)


@dataclass
class Reader:
    """A reader, what it got and how it ended: "cancelled" until it says otherwise."""

    plan: Plan
    outputs: list[RequestOutput] = field(default_factory=list)
    end: str = "cancelled"

    async def run(self, engine: AsyncLLMEngine) -> None:
        plan = self.plan
        ids = plan.prompt
        prompt = "".join(chr(48 + token) for token in ids) if plan.as_text else ids
        params = SamplingParams(temperature=0, max_tokens=plan.max_tokens, ignore_eos=True)
        outputs = engine.generate(prompt, params, plan.name)
        try:
            async for output in outputs:
                self.outputs.append(output)
                if len(self.outputs) == plan.reads:
                    if plan.by_aclose:
                        await outputs.aclose()
                    self.end = "left"
                    return
                for _ in range(plan.pauses):
                    await asyncio.sleep(0)
            self.end = "read"
        except ValueError as error:
            assert "is unfinished" in str(error) and not self.outputs
            self.end = "refused"
        except RuntimeError as error:
            assert "the engine was closed" in str(error)
            self.end = "closed"


@cache
def twin(prompt: tuple[int, ...]) -> list[int]:
    return greedy_twin(make_table(), list(prompt), MOST_TOKENS)


def check(reader: Reader, aborted: set[str | None], broke: bool) -> None:
    outputs = reader.outputs
    answer = [output.token_id for output in outputs if not output.message]
    assert answer == twin(tuple(reader.plan.prompt))[: len(answer)]
    assert [output.num_output_tokens for output in outputs] == list(range(1, len(outputs) + 1))
    assert not any(output.finished for output in outputs[:-1])
    for output in outputs[:1]:
        assert output.num_cached_tokens % 4 == 0 and output.num_cached_tokens < len(reader.plan.prompt)
    if reader.end == "read":
        assert outputs[-1].finished
        if outputs[-1].finish_reason == "abort":
            assert broke if "the device is gone" in outputs[-1].message else reader.plan.name in aborted
        else:
            assert (outputs[-1].finish_reason, len(answer)) == ("length", reader.plan.max_tokens)


names = st.sampled_from(["a", "b", "c"])
plans = st.builds(
    Plan,
    name=st.one_of(st.none(), names),
    shared=st.sampled_from([14, 14, 9, 3, 0]),
    own=st.integers(1, 6),
    kind=st.integers(0, 2),
    max_tokens=st.sampled_from([MOST_TOKENS, 3, 1]),
    as_text=st.booleans(),
    reads=st.one_of(st.none(), st.integers(1, 4)),
    by_aclose=st.booleans(),
    pauses=st.integers(0, 3),
)
actions = st.one_of(
    st.tuples(st.just("start"), plans),
    st.tuples(st.just("start"), plans),
    st.tuples(st.just("step"), st.integers(1, 3)),
    st.tuples(st.just("step and rest"), st.integers(1, 6)),
    st.tuples(st.just("turn"), st.integers(1, 4)),
    st.tuples(st.just("cancel"), st.integers(0, 20)),
    st.tuples(st.just("abort"), names),
    st.tuples(st.just("stats"), st.none()),
    st.tuples(st.just("break"), st.integers(0, 3)),
)


@pytest.mark.slow
def test_whatever_readers_do_the_engine_is_whole_afterwards() -> None:
    num_cached: list[int] = []
    interleave(num_cached)
    assert sum(num > 0 for num in num_cached) > 0  # beginnings of earlier readers were reused


@settings(max_examples=150)
@given(
    st.lists(actions, min_size=10, max_size=40), st.booleans(), st.sampled_from(["all leave", "all read on", "closed"])
)
def interleave(num_cached: list[int], script: list[tuple[str, object]], overlap: bool, ending: str) -> None:
    """One script on an engine of its own; appends to num_cached what each reader's first output says."""

    async def main() -> None:
        llm_engine = toy_engine(num_kv_blocks=12, stop_preempted_request=False, overlap=overlap)
        gate = Gate(llm_engine)
        readers: list[Reader] = []
        tasks: list[asyncio.Task[object]] = []
        aborted: set[str | None] = set()
        broke = False
        async with AsyncLLMEngine.from_engine(llm_engine) as engine, asyncio.timeout(60):
            for action, value in script:
                match action, value:
                    case "start", Plan():
                        readers.append(Reader(value))
                        tasks.append(asyncio.create_task(readers[-1].run(engine)))
                    case "step", int():
                        gate.permit(value)
                    case "step and rest", int():
                        gate.permit(value)
                        await asyncio.sleep(0.001 * value)  # outputs may come, but nothing rests on it
                    case "turn", int():
                        for _ in range(value):
                            await asyncio.sleep(0)
                    case "cancel", int():
                        if tasks:
                            tasks[value % len(tasks)].cancel()
                    case "abort", str():
                        aborted.add(value)
                        tasks.append(asyncio.create_task(engine.abort(value)))
                    case "stats", None:
                        tasks.append(asyncio.create_task(engine.stats()))
                    case "break", int():
                        gate.break_after(value)
                        broke = True
            gate.permit(5)  # whoever can go on does, for a while
            await asyncio.sleep(0.005)
            if ending == "all leave":
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                before = gate.num_steps
            elif ending == "closed":
                tasks.append(asyncio.create_task(engine.close()))
                await asyncio.sleep(0)
            gate.open()
            for error in await asyncio.gather(*tasks, return_exceptions=True):
                assert not isinstance(error, Exception) or (ending == "closed" and "was closed" in str(error))
            for reader in readers:
                assert ending == "closed" or reader.end != "closed"
                check(reader, aborted, broke)
                num_cached.extend(output.num_cached_tokens for output in reader.outputs[:1])
            if ending != "closed":
                await settle(engine)
            if ending == "all leave":
                # One that runs and may break, one that was about to run, and one that says the last words.
                assert gate.num_steps <= before + 3
        assert not engine._thread._thread.is_alive() and not engine._thread._streams

    asyncio.run(main())
