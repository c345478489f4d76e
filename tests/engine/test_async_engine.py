"""`AsyncLLMEngine`: the tokens are those of `LLM`, what cannot run is said, and readers do not wait for each other."""

import asyncio
import random
from typing import Any

import pytest

from deepinfer_jax import LLM, AsyncLLMEngine, EngineArgs, RequestOutput, SamplingParams
from tests.support.async_toy import LONG, Gate, greedy, read, run_on
from tests.support.toy import POISON, VOCAB, greedy_twin, make_table, random_prompt, tokens, toy_engine, use_toy

pytestmark = [pytest.mark.toy, pytest.mark.unoptimised]

TABLE = make_table()
# Those of `toy_engine`, so that nothing is compiled again.
SAME_PROGRAMS: dict[str, Any] = {"model": "toy", "disable_log_stats": True, "max_num_seqs": 6, "tokens_per_block": 4}


@pytest.mark.parametrize("overlap", [True, False])
def test_tokens_of_many_requests_in_any_order_are_those_of_llm(overlap: bool) -> None:
    prompts = [random_prompt(1 + 7 * i % 23, seed=i) for i in range(30)]
    params = [SamplingParams(max_tokens=1 + i % 9, seq_seed=i, top_p=0.9, top_logprobs=i % 3) for i in range(30)]
    with use_toy():
        llm = LLM("toy", decode_sequence=False, max_num_seqs=6, tokens_per_block=4)
    expected: Any = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
    order = list(range(30))
    random.Random(0).shuffle(order)

    async def use(engine: AsyncLLMEngine) -> dict[int, list[RequestOutput]]:
        tasks = {}
        for i in order:
            tasks[i] = asyncio.create_task(read(engine.generate(prompts[i], params[i])))
            if i % 4 == 0:
                await engine.stats()  # the engine goes on meanwhile
        return {i: await task for i, task in tasks.items()}

    results = run_on(toy_engine(overlap=overlap), use)
    for i in range(30):
        assert tokens(results[i]) == tokens(expected[i])
        assert [o.token_logprobs for o in results[i]] == pytest.approx([o.token_logprobs for o in expected[i]])
        assert [o.top_token_ids for o in results[i]] == [o.top_token_ids for o in expected[i]]
        assert [o.finish_reason for o in results[i]] == [o.finish_reason for o in expected[i]]
        assert len({o.request_id for o in results[i]}) == 1


def test_a_text_is_encoded_and_an_engine_is_made_off_the_loop() -> None:
    async def main() -> list[RequestOutput]:
        with use_toy():
            engine = await AsyncLLMEngine.create(EngineArgs(**SAME_PROGRAMS))
        async with engine:
            assert engine.get_tokenizer().eos_token_id == 1
            return await read(engine.generate("ABC", {"temperature": 0, "max_tokens": 4}, "named", user_id="me"))

    outputs = asyncio.run(main())
    assert tokens(outputs) == greedy_twin(TABLE, [17, 18, 19], 4)
    assert {output.request_id for output in outputs} == {"named"}


def test_the_constructor_makes_an_engine() -> None:
    async def main() -> list[RequestOutput]:
        async with AsyncLLMEngine(EngineArgs(**SAME_PROGRAMS)) as engine:
            return await read(engine.generate([5, 6], greedy(3)))

    with use_toy():
        assert tokens(asyncio.run(main())) == greedy_twin(TABLE, [5, 6], 3)


@pytest.mark.parametrize(
    ("arguments", "kind", "sentence"),
    [
        (([],), ValueError, "request r: prompt must not be empty"),
        (([5, VOCAB + 5],), ValueError, f"request r: token id {VOCAB + 5} at position 1 is outside the vocabulary"),
        (("AB!",), ValueError, "request r: '!' is not in this alphabet"),
        (([5], 7), TypeError, "sampling_params must be"),
        (([5], {"golden_token_ids": [VOCAB]}), ValueError, "request r: golden_token_ids: token id"),
        (([5], {"max_tokns": 3}), TypeError, "max_tokns"),
    ],
)
def test_what_cannot_run_raises_at_the_first_iteration(arguments: Any, kind: type[Exception], sentence: str) -> None:
    async def use(engine: AsyncLLMEngine) -> None:
        outputs = engine.generate(
            *arguments, **({"sampling_params": None} if len(arguments) < 2 else {}), request_id="r"
        )
        with pytest.raises(kind, match=sentence):
            await anext(outputs)
        with pytest.raises(StopAsyncIteration):
            await anext(outputs)
        assert tokens(await read(engine.generate([5, 6], greedy(2), "r"))) == greedy_twin(TABLE, [5, 6], 2)

    run_on(toy_engine(), use)


def test_a_name_in_use_is_refused_and_a_name_that_is_no_string() -> None:
    async def use(engine: AsyncLLMEngine) -> None:
        with pytest.raises(TypeError, match="request_id must be a string, got 7"):
            await anext(engine.generate([5], request_id=7))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"request_id must be a string, got \[\]"):
            await anext(engine.generate([5], request_id=[]))  # type: ignore[arg-type]
        gate = Gate(engine.llm_engine)
        first = asyncio.create_task(read(engine.generate([5, 6], LONG, "r")))
        await asyncio.sleep(0)
        second = asyncio.create_task(read(engine.generate([5], LONG, "r")))
        await asyncio.sleep(0)
        gate.open()
        with pytest.raises(ValueError, match="request r is unfinished"):
            await second
        assert tokens(await first) == greedy_twin(TABLE, [5, 6], 20)

    run_on(toy_engine(), use)


def test_a_too_long_prompt_yields_its_one_output() -> None:
    async def use(engine: AsyncLLMEngine) -> None:
        (output,) = await read(engine.generate(random_prompt(41)))
        assert output.finish_reason == "prompt_length_exceeded" and "limit is 40" in output.message

    run_on(toy_engine(), use)


def test_a_request_with_infinite_logits_fails_alone() -> None:
    async def use(engine: AsyncLLMEngine) -> None:
        bad, good = await asyncio.gather(
            read(engine.generate([POISON], greedy(4))), read(engine.generate([5, 6], greedy(4)))
        )
        assert [output.finish_reason for output in bad] == ["logits_not_finite"]
        assert tokens(good) == greedy_twin(TABLE, [5, 6], 4)

    run_on(toy_engine(), use)


def test_the_caller_may_change_prompt_and_parameters_while_the_request_waits() -> None:
    async def use(engine: AsyncLLMEngine) -> None:
        gate = Gate(engine.llm_engine)
        prompt, params = [5, 6], greedy(4)
        blocker = asyncio.create_task(read(engine.generate([9], greedy(1))))
        task = asyncio.create_task(read(engine.generate(prompt, params)))
        await asyncio.sleep(0)
        prompt[:] = [40, 41, 42]
        params.max_tokens = 9
        gate.open()
        await blocker
        assert tokens(await task) == greedy_twin(TABLE, [5, 6], 4)

    run_on(toy_engine(), use)


def test_a_slow_reader_stops_nobody_and_loses_nothing() -> None:
    async def use(engine: AsyncLLMEngine) -> None:
        slow = engine.generate([5, 6], LONG)
        outputs = [await anext(slow)]
        for i in range(10):
            assert len(await read(engine.generate([8, 9 + i], LONG))) == 20
        # The engine has long done its part; the outputs wait.
        stats = await engine.stats()
        assert (stats["num_running"], stats["free_blocks"]) == (0, stats["total_blocks"])
        outputs += await read(slow)
        assert tokens(outputs) == greedy_twin(TABLE, [5, 6], 20)
        assert outputs[-1].finish_reason == "length"

    run_on(toy_engine(), use)


def test_a_request_may_be_handed_to_another_task() -> None:
    async def use(engine: AsyncLLMEngine) -> None:
        outputs = engine.generate([5, 6], LONG)
        reached = asyncio.Event()

        async def begin() -> None:
            taken.append(await anext(outputs))
            reached.set()
            await asyncio.Event().wait()

        taken: list[RequestOutput] = []
        first = asyncio.create_task(begin())
        await reached.wait()
        taken.append(await anext(outputs))
        first.cancel()
        await asyncio.wait([first])
        assert tokens(taken + await read(outputs)) == greedy_twin(TABLE, [5, 6], 20)

    run_on(toy_engine(), use)


def test_a_request_has_one_reader_at_a_time() -> None:
    async def use(engine: AsyncLLMEngine) -> None:
        gate = Gate(engine.llm_engine)
        outputs = engine.generate([5, 6], greedy(3), "r")
        first = asyncio.create_task(anext(outputs))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        for call in (anext(outputs), outputs.aclose()):
            with pytest.raises(RuntimeError, match="request r is being read by another task"):
                await call
        gate.open()
        assert tokens([await first, *await read(outputs)]) == greedy_twin(TABLE, [5, 6], 3)
        await outputs.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(outputs)

    run_on(toy_engine(), use)


def test_the_event_loop_turns_while_a_step_runs() -> None:
    async def use(engine: AsyncLLMEngine) -> None:
        gate = Gate(engine.llm_engine)
        task = asyncio.create_task(read(engine.generate([5, 6], greedy(2))))
        await gate.reaches(1)  # the engine thread is inside a step, and stays there
        for _ in range(100):
            await asyncio.sleep(0)
        assert not task.done()
        gate.open()
        assert len(await task) == 2

    run_on(toy_engine(), use)
