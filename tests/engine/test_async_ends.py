"""The ends of an `AsyncLLMEngine`: steps that break, a thread that dies, closing, and the interpreter's end."""

import asyncio
import functools
import gc
import logging
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from deepinfer_jax import LLM, AsyncLLMEngine, EngineType
from deepinfer_jax.engine.llm_engine import LLMEngine
from tests.support.async_toy import LONG, Gate, greedy, read, run_on, settle
from tests.support.paths import ROOT
from tests.support.toy import greedy_twin, make_table, tokens, toy_engine

pytestmark = [pytest.mark.toy, pytest.mark.unoptimised]

TABLE = make_table()


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
        ("core.scheduler.schedule", never_again, "OSError: out of order"),  # nothing could end: it would fail for ever
        ("step", exits, "SystemExit: 3"),
        ("add_prepared", exits, "SystemExit: 3"),
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
        owner = gate if where == "step" else functools.reduce(getattr, path, llm_engine)
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


@pytest.mark.slow
def test_an_interpreter_ends_though_nobody_closed_the_engine() -> None:
    code = (
        "import asyncio\n"
        "from tests.support.toy import toy_engine\n"
        "from deepinfer_jax import AsyncLLMEngine\n"
        "engine = AsyncLLMEngine.from_engine(toy_engine())\n"
        "params = {'temperature': 0, 'max_tokens': 30, 'ignore_eos': True}\n"
        "loop = asyncio.new_event_loop()\n"
        "print(loop.run_until_complete(anext(engine.generate([5, 6], params))).token_id)\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, f"{greedy_twin(TABLE, [5, 6], 1)[0]}\n"), done.stderr


@pytest.mark.parametrize("engine_type", [EngineType.PROMPT, EngineType.COMPLETION])
def test_an_engine_of_half_requests_is_refused(toy_model: None, engine_type: EngineType) -> None:
    half = toy_engine(engine_type=engine_type)
    with pytest.raises(ValueError, match=f"a {engine_type.name} engine is stepped by its owner"):
        AsyncLLMEngine.from_engine(half)
    with pytest.raises(ValueError, match=f"a {engine_type.name} engine is an LLMEngine of its own"):
        LLM("toy", engine_type=engine_type)
