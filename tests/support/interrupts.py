"""Ctrl-C at any line that the engine runs."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

# Outputs that are on their way out of `step` are the caller's: an interrupt there loses them as in any function.
_FILES = (
    "engine/llm_engine.py",
    "engine/core.py",
    "engine/launch.py",
    "engine/commit.py",
    "engine/images/opener.py",
    "engine/images/workers.py",
    "engine/requests/background.py",
    "engine/requests/outputs.py",
    "engine/requests/preparation.py",
    "engine/requests/request.py",
    "engine/requests/results.py",
    "runtime/device_state.py",
    "runtime/runner.py",
    "runtime/step_result.py",
    "runtime/step_input.py",
)
_HANDING_OUT = "hand_out"


class Interrupt:
    """Raises KeyboardInterrupt at the line number `at` that the engine and its scheduler run; None: never.

    Attributes:
        lines: how many they have run.
    """

    def __init__(self, at: int | None = None) -> None:
        self.at = at
        self.lines = 0

    def during[T](self, call: Callable[[], T], interrupted: T) -> T:
        """What the call gives, `interrupted` if it was."""
        sys.settrace(self._enter)
        try:
            return call()
        except KeyboardInterrupt:
            return interrupted
        finally:
            sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        inside = name.endswith(_FILES) or "/deepinfer_jax/scheduler/" in name
        return self._line if inside and frame.f_code.co_name != _HANDING_OUT else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                raise KeyboardInterrupt
        return self._line
