"""For all tests and notebooks: a user cache of this run alone, so that they neither read nor leave anything."""

import gc
import os
import shutil
import sys
import tempfile
from pathlib import Path

import hypothesis
import pytest

# A timing never fails a test.
hypothesis.settings.register_profile("deepinfer-jax", deadline=None)
hypothesis.settings.load_profile("deepinfer-jax")

# Linux lets a process have 65,530 memory maps. Every program that XLA:CPU compiled holds some, and XLA crashes when it
# gets no more.
_MANY_MAPS = 30_000


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        return  # a worker of a parallel run shares the cache of the run
    directory = tempfile.mkdtemp(prefix="deepinfer-jax-tests-")
    os.environ["XDG_CACHE_HOME"] = directory  # subprocesses and notebook kernels inherit it
    config.add_cleanup(lambda: shutil.rmtree(directory, ignore_errors=True))


def pytest_runtest_teardown() -> None:
    """Between tests, gives up compiled programs once there are many."""
    maps = Path("/proc/self/maps")
    if "jax" not in sys.modules or not maps.exists():
        return
    if maps.read_bytes().count(b"\n") > _MANY_MAPS:
        import jax

        from deepinfer_jax.runtime.runner import compile_move, compile_step

        jax.clear_caches()
        compile_step.cache_clear()
        compile_move.cache_clear()
        gc.collect()
