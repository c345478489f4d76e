"""Whoever leaves `AsyncLLMEngine.generate`, in whatever way, frees what the request holds, and its name."""

import asyncio
import gc
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from deepinfer_jax import AsyncLLMEngine
from tests.support.async_toy import LONG, Gate, greedy, read, run_on, settle
from tests.support.toy import greedy_twin, make_table, tokens, toy_engine

pytestmark = [pytest.mark.toy, pytest.mark.unoptimised]

TABLE = make_table()
KEPT: list[asyncio.Task[None]] = []


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
