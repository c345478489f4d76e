"""Steps of engines until nothing is left to do; a loop that does not end is a failure, not a hang."""

from collections.abc import Callable, Iterator
from typing import Any

from deepinfer_jax.engine.llm_engine import LLMEngine
from deepinfer_jax.engine.requests.outputs import RequestOutput

MOST_STEPS = 10_000


def while_unfinished(*engines: LLMEngine, also: Callable[[], Any] = bool) -> Iterator[int]:
    """The number of each step that is still to be made: an engine has unfinished requests, or `also` gives something.

    Raises:
        AssertionError: after `MOST_STEPS`.
    """
    for step in range(MOST_STEPS):
        if not any(engine.has_unfinished_requests() for engine in engines) and not also():
            return
        yield step
    raise AssertionError(f"something is unfinished after {MOST_STEPS} steps")


def drain(engine: LLMEngine) -> dict[str, list[RequestOutput]]:
    """Steps until no request is unfinished; outputs by request id."""
    results: dict[str, list[RequestOutput]] = {}
    for _ in while_unfinished(engine):
        for output in engine.step():
            results.setdefault(output.request_id, []).append(output)
    return results


def is_idle(stats: dict[str, Any]) -> bool:
    """Whether every block and every slot is free."""
    return (stats["free_blocks"], stats["free_slots"]) == (stats["total_blocks"], stats["total_slots"])
