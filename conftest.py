"""For all tests and notebooks: a user cache of this run alone, so that they neither read nor leave anything, and one
cache of compiled programs for all runs, whose time goes into compiling."""

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

# What `make test` compiled, `make test-slow` need not compile again, nor one worker what the other did. A program is
# found by all that it is compiled from, so a change of the code finds nothing old. Set before any import of jax.
_COMPILED = Path(__file__).parent / ".pytest_cache" / "xla"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_COMPILED))
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
_MOST_COMPILED_BYTES = 2 << 30  # a run that finds more starts anew

# Linux lets a process have 65,530 memory maps. Every program that XLA:CPU compiled holds some, and XLA crashes when it
# gets no more.
_MANY_MAPS = 30_000


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        return  # a worker of a parallel run shares the cache of the run
    directory = tempfile.mkdtemp(prefix="deepinfer-jax-tests-")
    os.environ["XDG_CACHE_HOME"] = directory  # subprocesses and notebook kernels inherit it
    config.add_cleanup(lambda: shutil.rmtree(directory, ignore_errors=True))
    if _COMPILED.exists() and sum(file.stat().st_size for file in _COMPILED.iterdir()) > _MOST_COMPILED_BYTES:
        shutil.rmtree(_COMPILED)


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
