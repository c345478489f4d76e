"""`AsyncLLMEngine`: the tokens are those of `LLM`, leaving the loop frees, and nobody waits for nothing."""

import asyncio
import gc
import logging
import os
import random
import subprocess
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from async_toy import Gate, settle
from toy import POISON, VOCAB, greedy_twin, make_table, random_prompt, tokens, toy_engine, use_toy

from deepinfer_jax import LLM, AsyncLLMEngine, EngineArgs, RequestOutput, SamplingParams
from deepinfer_jax.engine.engine import LLMEngine

TABLE = make_table()
# Those of `toy_engine`, so that nothing is compiled again.
SAME_PROGRAMS: dict[str, Any] = {"model": "toy", "disable_log_stats": True, "max_num_seqs": 6, "tokens_per_block": 4}
KEPT: list[asyncio.Task[None]] = []
LONG = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens)


async def read(outputs: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in outputs]


def run_on[T](engine: LLMEngine, use: Callable[[AsyncLLMEngine], Coroutine[Any, Any, T]]) -> T:
    """What `use` gives; before the engine is closed everything is free and no task is left."""

    async def main() -> T:
        async with AsyncLLMEngine.from_engine(engine) as asynchronous:
            result = await use(asynchronous)
            await settle(asynchronous)
            return result

    return asyncio.run(main())


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


async def leave_by_break(engine: AsyncLLMEngine) -> None:
    async for _ in engine.generate([5, 6], LONG, "r"):
        break


async def leave_by_aclose(engine: AsyncLLMEngine) -> None:
    outputs = engine.generate([5, 6], LONG, "r")
    await anext(outputs)
    await outputs.aclose()


async def leave_by_cancelling_while_it_waits(engine: AsyncLLMEngine) -> None:
    gate = Gate(engine.llm_engine)
    task = asyncio.create_task(read(engine.generate([5, 6], LONG, "r")))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.open()


async def leave_by_cancelling_while_the_reader_does_something_else(engine: AsyncLLMEngine) -> None:
    reached = asyncio.Event()

    async def reader() -> None:
        async for _ in engine.generate([5, 6], LONG, "r"):
            reached.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(reader())
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def leave_by_cancelling_a_task_that_is_kept_with_all_it_holds(engine: AsyncLLMEngine) -> None:
    reached = asyncio.Event()

    async def reader() -> None:
        outputs = engine.generate([5, 6], LONG, "r")  # the traceback of the cancelled task keeps it alive
        await anext(outputs)
        reached.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(reader())
    KEPT.append(task)
    await reached.wait()
    task.cancel()
    await asyncio.wait([task])


async def leave_by_timeout(engine: AsyncLLMEngine) -> None:
    gate = Gate(engine.llm_engine)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(engine.generate([5, 6], LONG, "r")), 0.001)
    gate.open()


async def leave_by_forgetting(engine: AsyncLLMEngine) -> None:
    outputs = engine.generate([5, 6], LONG, "r")
    cycle: list[Any] = [outputs]
    cycle.append(cycle)
    await anext(outputs)
    del outputs, cycle
    gc.collect()


async def leave_by_an_error(engine: AsyncLLMEngine) -> None:
    with pytest.raises(ZeroDivisionError):
        async for _ in engine.generate([5, 6], LONG, "r"):
            _ = 1 / 0


async def leave_before_the_start(engine: AsyncLLMEngine) -> None:
    outputs = engine.generate([5, 6], LONG, "r")
    await outputs.aclose()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    "leave",
    [
        leave_by_break,
        leave_by_aclose,
        leave_by_cancelling_while_it_waits,
        leave_by_cancelling_while_the_reader_does_something_else,
        leave_by_cancelling_a_task_that_is_kept_with_all_it_holds,
        leave_by_timeout,
        leave_by_forgetting,
        leave_by_an_error,
        leave_before_the_start,
    ],
)
def test_leaving_frees_at_once_and_the_others_go_on(
    leave: Callable[[AsyncLLMEngine], Coroutine[Any, Any, None]], overlap: bool
) -> None:
    async def use(engine: AsyncLLMEngine) -> None:
        other = asyncio.create_task(read(engine.generate([8, 9], LONG, "other")))
        for _ in range(3):  # the name is free again each time, whether or not the engine has said its last word
            await leave(engine)
        stats = await engine.stats()
        assert stats["num_running"] + stats["num_waiting"] <= 1
        assert tokens(await other) == greedy_twin(TABLE, [8, 9], 20)
        assert tokens(await read(engine.generate([5, 6], greedy(2), "r"))) == greedy_twin(TABLE, [5, 6], 2)

    run_on(toy_engine(overlap=overlap), use)


def test_a_request_that_waits_for_its_name_may_be_left_too() -> None:
    async def use(engine: AsyncLLMEngine) -> None:
        gate = Gate(engine.llm_engine)
        for is_first in (True, False):  # the first has its name, the second waits for it
            task = asyncio.create_task(read(engine.generate([5, 6], LONG, "r")))
            await asyncio.sleep(0)
            if is_first:
                gate.permit(2)
                await gate.reaches(3)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        gate.open()
        await settle(engine)
        assert gate.num_steps == 4  # the one that waited for its permit, and one for the last words of the first
        assert (await engine.stats())["num_finished"] == {"abort": 1}

    run_on(toy_engine(), use)


def test_an_abort_yields_one_more_output() -> None:
    async def use(engine: AsyncLLMEngine) -> None:
        gate = Gate(engine.llm_engine)
        reading = asyncio.create_task(read(engine.generate([5, 6], LONG, "r")))
        gate.permit(4)
        await gate.reaches(5)
        aborting = asyncio.create_task(engine.abort({"r", "unknown"}))
        await asyncio.sleep(0)
        gate.open()
        *before, last = await reading
        assert tokens(before) == greedy_twin(TABLE, [5, 6], len(before)) and 3 <= len(before) <= 5
        assert last.finish_reason == "abort" and last.finished
        assert await aborting == (1, 2 + len(before))
        assert await engine.abort("r") == (0, 0)
        with pytest.raises(TypeError, match="request_id must be"):
            await engine.abort(7)  # type: ignore[arg-type]

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


def test_one_reader_at_a_time() -> None:
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


@pytest.mark.parametrize("overlap", [True, False])
def test_a_step_that_breaks_ends_what_ran_and_the_engine_goes_on(
    overlap: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def use(engine: AsyncLLMEngine) -> None:
        gate = Gate(engine.llm_engine)
        lost = [asyncio.create_task(read(engine.generate([5, 6], LONG))) for _ in range(6)]
        await asyncio.sleep(0)
        following = asyncio.create_task(read(engine.generate([8, 9], greedy(3))))
        gate.break_after(2)
        gate.open()
        for outputs in await asyncio.gather(*lost):
            assert outputs[-1].finish_reason == "abort" and "(RuntimeError: the device is gone)" in outputs[-1].message
            assert tokens(outputs[:-1]) == greedy_twin(TABLE, [5, 6], len(outputs) - 1)
        assert tokens(await following) == greedy_twin(TABLE, [8, 9], 3)
        assert len(await read(engine.generate([5], LONG))) == 20

    with caplog.at_level(logging.ERROR):
        run_on(toy_engine(overlap=overlap), use)
    assert "a step of the engine failed" in caplog.text and "the device is gone" in caplog.text


def never_again(*arguments: Any) -> Any:
    raise OSError("out of order")


def exits(*arguments: Any) -> Any:
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("where", "how", "cause"),
    [
        ("_scheduler.schedule", never_again, "OSError: out of order"),  # nothing could end: it would fail for ever
        ("step", exits, "SystemExit: 3"),
        ("add_request", exits, "SystemExit: 3"),
        ("abort_request", exits, "SystemExit: 3"),
    ],
)
def test_if_the_thread_dies_everybody_hears_why(
    where: str, how: Callable[..., Any], cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        llm_engine = toy_engine()
        engine = AsyncLLMEngine.from_engine(llm_engine)
        gate = Gate(llm_engine)
        waiting = [asyncio.create_task(read(engine.generate([5, 6 + i], LONG, str(i)))) for i in range(8)]
        await gate.reaches(1)
        *path, name = where.split(".")
        owner = getattr(llm_engine, path[0]) if path else gate if where == "step" else llm_engine
        setattr(owner, name, how)
        asked = [asyncio.create_task(engine.abort("7"))]
        late = asyncio.create_task(read(engine.generate([5], LONG, "late")))
        await asyncio.sleep(0)
        gate.open()
        results = await asyncio.gather(*waiting, late, *asked, return_exceptions=True)
        for result in results:
            if isinstance(result, tuple):  # the abort came before the end
                continue
            if isinstance(result, list):  # its end came before that of the engine
                assert result[-1].finished
                continue
            assert isinstance(result, RuntimeError) and f"ended because of an error ({cause})" in str(result)
            assert isinstance(result.__cause__, OSError | SystemExit)
        assert any(isinstance(result, RuntimeError) for result in results)
        for call in (engine.stats(), engine.abort("r"), anext(engine.generate([5]))):
            with pytest.raises(RuntimeError, match=f"because of an error \\({cause}"):
                await call
        await engine.close()
        assert not engine._thread._thread.is_alive() and not engine._thread._streams

    with caplog.at_level(logging.ERROR):
        asyncio.run(main())
    assert "the thread of the engine ends" in caplog.text


def test_closing_is_an_error_for_those_who_read_and_may_be_repeated() -> None:
    async def main() -> None:
        engine = AsyncLLMEngine.from_engine(toy_engine())
        gate = Gate(engine.llm_engine)
        started = engine.generate([5, 6], LONG)
        first = asyncio.create_task(anext(started))
        waiting = [asyncio.create_task(read(engine.generate([7, i], LONG))) for i in range(10)]
        gate.permit(2)
        assert (await first).num_output_tokens == 1
        closing = asyncio.create_task(engine.close())
        await asyncio.sleep(0)
        gate.open()
        await closing
        for result in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(result, RuntimeError) and "the engine was closed" in str(result)
        outputs = []
        with pytest.raises(RuntimeError, match="the engine was closed"):
            async for output in started:
                outputs.append(output)  # what was there before is not lost
        assert tokens(outputs) == greedy_twin(TABLE, [5, 6], 1 + len(outputs))[1:]
        for call in (engine.stats(), engine.abort("r"), anext(engine.generate("AB"))):
            with pytest.raises(RuntimeError, match="the engine was closed"):
                await call
        await engine.close()
        assert not engine._thread._thread.is_alive()
        with pytest.raises(RuntimeError, match="closed"):
            engine.llm_engine.step()

    asyncio.run(main())


def test_what_is_asked_of_an_engine_while_it_closes_is_refused() -> None:
    async def main() -> None:
        async with AsyncLLMEngine.from_engine(toy_engine()) as engine:
            thread, gate = engine._thread, Gate(engine.llm_engine)
            reading = asyncio.create_task(read(engine.generate([5, 6], LONG)))
            await gate.reaches(1)
            thread.stop()
            # The second question is asked between the last look at the questions and the end.
            first = thread.ask(lambda _: thread.ask(LLMEngine.stats))
            gate.open()
            second = await asyncio.wrap_future(first)
            for waiting in (asyncio.wrap_future(second), reading, engine.stats()):
                with pytest.raises(RuntimeError, match="the engine was closed"):
                    await waiting

    asyncio.run(main())


def test_an_engine_with_requests_of_its_own_is_not_taken_over() -> None:
    engine = toy_engine()
    engine.add_request("u", "r", LONG, [5])
    with pytest.raises(ValueError, match="unfinished requests"):
        AsyncLLMEngine.from_engine(engine)


def test_several_event_loops_share_an_engine() -> None:
    engine = AsyncLLMEngine.from_engine(toy_engine())
    results: dict[int, list[int]] = {}

    def work(i: int) -> None:
        async def main() -> None:
            both = await asyncio.gather(*(read(engine.generate([5 + i, j], LONG)) for j in (6, 7)))
            results[i] = [token for outputs in both for token in tokens(outputs)]

        asyncio.run(main())

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    asyncio.run(engine.close())
    assert results == {i: greedy_twin(TABLE, [5 + i, 6], 20) + greedy_twin(TABLE, [5 + i, 7], 20) for i in range(4)}


def test_the_requests_of_a_loop_that_was_closed_are_aborted() -> None:
    engine = AsyncLLMEngine.from_engine(toy_engine())
    gate = Gate(engine.llm_engine)
    loop = asyncio.new_event_loop()
    left = engine.generate([5, 6], LONG)
    first = loop.create_task(anext(left))  # type: ignore[arg-type]
    gate.permit(2)
    assert loop.run_until_complete(first).num_output_tokens == 1
    loop.close()
    gate.open()

    async def use() -> dict[str, Any]:
        assert len(await read(engine.generate([8], LONG))) == 20
        await settle(engine)
        return await engine.stats()

    assert asyncio.run(use())["num_finished"] == {"abort": 1, "length": 1}
    asyncio.run(engine.close())


def test_an_engine_that_is_dropped_ends_its_thread() -> None:
    engine = AsyncLLMEngine.from_engine(toy_engine())
    thread, gone = engine._thread._thread, weakref.ref(engine)
    assert tokens(asyncio.run(read(engine.generate([5, 6], greedy(3))))) == greedy_twin(TABLE, [5, 6], 3)
    del engine
    gc.collect()
    assert gone() is None
    thread.join(60)
    assert not thread.is_alive()


def test_an_interpreter_ends_though_nobody_closed_the_engine() -> None:
    code = (
        "import asyncio\n"
        "from toy import toy_engine\n"
        "from deepinfer_jax import AsyncLLMEngine\n"
        "engine = AsyncLLMEngine.from_engine(toy_engine())\n"
        "params = {'temperature': 0, 'max_tokens': 30, 'ignore_eos': True}\n"
        "loop = asyncio.new_event_loop()\n"
        "print(loop.run_until_complete(anext(engine.generate([5, 6], params))).token_id)\n"
    )
    here = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": f"{here}:{here.parent.parent}"}
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert (done.returncode, done.stdout) == (0, f"{greedy_twin(TABLE, [5, 6], 1)[0]}\n"), done.stderr
