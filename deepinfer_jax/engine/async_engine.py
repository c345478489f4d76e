"""`AsyncLLMEngine`: requests as asynchronous iterators, on the same core as `LLMEngine`."""

import asyncio
import copy
import uuid
import weakref
from collections.abc import AsyncIterator, Iterable
from types import TracebackType
from typing import Any, Self

from deepinfer_jax.engine.args import EngineArgs, EngineType
from deepinfer_jax.engine.engine_thread import EngineThread, OutputStream
from deepinfer_jax.engine.images.request_images import RequestImages
from deepinfer_jax.engine.llm_engine import LLMEngine
from deepinfer_jax.engine.requests.outputs import RequestOutput
from deepinfer_jax.engine.requests.prompts import encode_text
from deepinfer_jax.engine.requests.request import check_request_id, copy_params
from deepinfer_jax.engine.requests.sampling_params import SamplingParams


class AsyncLLMEngine:
    """An `LLMEngine` on a thread of its own, for any number of event loops, a notebook's among them.

    async with AsyncLLMEngine(EngineArgs(model="path")) as engine:
        async for output in engine.generate("Once upon a time"):
            ...

    No method blocks the event loop; the constructor loads and compiles, `create` does so off the loop. Methods may be
    called from any thread and loop; the outputs of a request are read on one loop. An engine that is dropped without
    `close` closes itself.

    Arguments:
        args: what to load and how large; as for `LLMEngine`.

    Attributes:
        llm_engine: the engine below, to look at. Only its thread may call `step`, `add_request` and the like;
            `stats()`, as `EngineCollector` calls it, is fine.
    """

    def __init__(self, args: EngineArgs) -> None:
        self._own(LLMEngine(args))

    @classmethod
    async def create(cls, args: EngineArgs) -> Self:
        """An engine that is loaded and compiled while the event loop goes on."""
        return cls.from_engine(await asyncio.to_thread(LLMEngine, args))

    @classmethod
    def from_engine(cls, llm_engine: LLMEngine) -> Self:
        """Takes an engine over. Raises ValueError if it has unfinished requests, or does not run whole ones."""
        if llm_engine.has_unfinished_requests():
            raise ValueError("the engine has unfinished requests of add_request(); step() or abort them first")
        engine = cls.__new__(cls)
        engine._own(llm_engine)
        return engine

    def _own(self, llm_engine: LLMEngine) -> None:
        kind = llm_engine.args.engine_type
        if kind is not EngineType.NORMAL:
            raise ValueError(f"AsyncLLMEngine runs whole requests; a {kind.name} engine is stepped by its owner")
        self.llm_engine = llm_engine
        self._thread = EngineThread(llm_engine)
        weakref.finalize(self, self._thread.stop).atexit = False  # the thread sees to the end of the interpreter

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def get_tokenizer(self) -> Any:
        """The engine's tokenizer."""
        return self.llm_engine.tokenizer

    def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | dict[str, Any] | None = None,
        request_id: str | None = None,
        *,
        user_id: str = "0",
        multi_modal_data: dict[str, Any] | None = None,
    ) -> "OutputIterator":
        """The outputs of one request, one per token, the last with a finish reason: `async for`.

        The request is queued by the first iteration. Leaving the loop, `aclose()`, cancelling the task that reads and
        dropping the iterator all abort it: its slot and blocks are free before the next step, and its name too.
        Outputs that are not read yet wait in memory; a slow reader stops nobody.

        If a step fails, the last output says so in `message`, as `LLMEngine.step` does for what ran.

        Arguments:
            prompt: a text, encoded by the tokenizer off the event loop, or one list of token ids.
            sampling_params: an object, or a dict of its fields. The engine keeps a copy.
            request_id: names the outputs; unique among unfinished requests; None: drawn.
            user_id: the caller's label; no rule depends on it.
            multi_modal_data: images of the prompt, as in `LLMEngine.add_request`; opened off the event loop.

        The first iteration raises what `LLMEngine.add_request` raises, and ValueError for an id outside the vocabulary
        or a text that cannot be encoded; each RuntimeError if the engine was closed, or ended because of an error (its
        cause is attached), or if two tasks read at once. A prompt that is too long gives one output that says so.
        """
        if request_id is None:
            request_id = uuid.uuid4().hex
        return OutputIterator(self, prompt, sampling_params, request_id, user_id, multi_modal_data)

    async def abort(self, request_id: str | Iterable[str]) -> tuple[int, int]:
        """Ends unfinished requests; each gives one more output, finish reason "abort".

        Returns and raises what `LLMEngine.abort_request` does; RuntimeError if the engine has ended.
        """
        return await asyncio.wrap_future(self._thread.ask(lambda engine: engine.abort_request(request_id)))

    async def stats(self) -> dict[str, Any]:
        """`LLMEngine.stats` between two steps. Raises RuntimeError if the engine has ended."""
        return await asyncio.wrap_future(self._thread.ask(lambda engine: engine.stats()))

    async def close(self) -> None:
        """Ends the thread after the step that runs, and frees the engine. May be called again.

        Those who read unfinished requests get a RuntimeError, after the outputs that are there.
        """
        self._thread.stop()
        await asyncio.to_thread(self._thread.join)


class OutputIterator(AsyncIterator[RequestOutput]):
    """What `AsyncLLMEngine.generate` gives.

    No generator: one that is dropped aborts its request here and now, not when its event loop finds the time, and
    also if that loop is closed.
    """

    def __init__(
        self,
        engine: AsyncLLMEngine,
        prompt: Any,
        sampling_params: SamplingParams | dict[str, Any] | None,
        request_id: str,
        user_id: str,
        multi_modal_data: dict[str, Any] | None,
    ) -> None:
        self._engine = engine
        self._prompt = prompt
        self._sampling_params = sampling_params
        self._request_id = request_id
        self._user_id = user_id
        self._multi_modal_data = multi_modal_data
        self._stream: OutputStream | None = None  # once the request is queued
        self._reader: weakref.ref[asyncio.Task[Any]] | None = None  # the task that read last
        self._reading = False
        self._over = False

    async def __anext__(self) -> RequestOutput:
        self._check_not_reading()
        if self._over:
            raise StopAsyncIteration
        self._follow(asyncio.current_task())
        self._reading = True
        try:
            if self._stream is None:
                self._stream = await self._start()
            output = await self._stream.take()
        except BaseException:  # cancelled, or there is no more to come
            self._leave()
            raise
        finally:
            self._reading = False
        self._over = output.finished
        return output

    async def aclose(self) -> None:
        """Aborts the request if it is unfinished. Raises RuntimeError while another task reads: cancel that one."""
        self._check_not_reading()
        self._leave()

    def __del__(self) -> None:
        self._leave()

    async def _start(self) -> OutputStream:
        check_request_id(self._request_id)
        params = copy_params(self._sampling_params, self._engine.get_tokenizer().eos_token_id)
        try:
            images = RequestImages.of(self._multi_modal_data)  # the caller may change it while the request waits
            if isinstance(self._prompt, str):
                ids = await asyncio.to_thread(encode_text, self._engine.get_tokenizer(), self._prompt)
            else:
                ids = copy.copy(self._prompt)  # likewise
        except ValueError as error:
            raise ValueError(f"request {self._request_id}: {error}") from error
        stream = OutputStream()
        self._engine._thread.start(self._request_id, stream, ids, params, self._user_id, images)
        return stream

    def _follow(self, task: asyncio.Task[Any] | None) -> None:
        """Leaves if the task that read last is cancelled at another await: its traceback may keep this object alive."""
        if task is None or (self._reader is not None and self._reader() is task):
            return
        self._reader = reader = weakref.ref(task)
        this = weakref.ref(self)

        def leave_if_cancelled(ended: asyncio.Task[Any]) -> None:
            iterator = this()
            if ended.cancelled() and iterator is not None and iterator._reader is reader:
                iterator._leave()

        task.add_done_callback(leave_if_cancelled)

    def _leave(self) -> None:
        if not self._over and self._stream is not None:
            self._engine._thread.drop(self._request_id, self._stream)
        self._over = True

    def _check_not_reading(self) -> None:
        if self._reading:
            raise RuntimeError(f"request {self._request_id} is being read by another task")
