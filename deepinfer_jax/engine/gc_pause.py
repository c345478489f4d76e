"""No garbage collection within a step."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """No garbage collection in between; one that is due comes right after.

    A step makes some thousand objects that all live until the next one. Each seven hundred would start a collection
    that finds nothing, and every hundredth of those looks through all objects of the process, for longer than a step.
    """
    was_enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_enabled:
            gc.enable()
