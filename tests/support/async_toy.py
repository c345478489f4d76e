"""What the tests of `AsyncLLMEngine` share: its steps one by one, and what must hold when all is over."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from deepinfer_jax.engine.async_engine import AsyncLLMEngine
from deepinfer_jax.engine.llm_engine import LLMEngine
from deepinfer_jax.engine.requests.outputs import RequestOutput
from deepinfer_jax.engine.requests.sampling_params import SamplingParams
from tests.support.engine_runs import while_unfinished

LONG = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


class Gate:
    """Holds back the steps of an engine: from now on each waits for a permit.

    Attributes:
        num_steps: how many have come to the gate.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self.num_steps = 0
        self._arrivals = threading.Semaphore(0)
        self._permits = threading.Semaphore(0)
        self._is_open = False
        self._runner = engine.core.runner
        self.step = engine.step
        engine.step = self._step  # type: ignore[method-assign]

    async def reaches(self, count: int) -> None:
        """Waits until so many steps more have come to the gate; the last of them waits there for its permit."""
        for _ in range(count):
            await asyncio.to_thread(self._arrivals.acquire)

    def permit(self, count: int = 1) -> None:
        """Lets so many steps pass."""
        self._permits.release(count)

    def open(self) -> None:
        """Lets all steps pass."""
        self._is_open = True
        self._permits.release()

    def break_after(self, count: int) -> None:
        """Lets the next decode launch after `count` more fail, and take the state with it."""
        decode, launches = self._runner.decode, [0]

        def decode_or_break(*arguments: Any) -> Any:
            launches[0] += 1
            if launches[0] != count + 1:
                return decode(*arguments)
            self._runner._state = None
            raise RuntimeError("the device is gone")

        self._runner.decode = decode_or_break  # type: ignore[method-assign]

    def _step(self) -> list[RequestOutput]:
        self.num_steps += 1
        self._arrivals.release()
        if not self._is_open:
            self._permits.acquire()
        return self.step()


async def settle(engine: AsyncLLMEngine) -> None:
    """Waits until nothing runs; then every block and slot is free, no request open and no other task pending."""
    assert asyncio.all_tasks() == {asyncio.current_task()}
    for _ in while_unfinished(engine.llm_engine, also=lambda: engine._thread._streams):
        await engine.stats()  # answered between two steps
    await engine.stats()  # nothing is unfinished: what is in flight is read after this is answered and before the next
    stats = await engine.stats()
    assert (stats["num_running"], stats["num_waiting"]) == (0, 0)
    assert (stats["free_blocks"], stats["free_slots"]) == (stats["total_blocks"], stats["total_slots"])
    assert not engine.llm_engine.core.launched
    engine.llm_engine.core.scheduler.check_idle()


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
