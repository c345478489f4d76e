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

_ROOT = Path(__file__).parent

# What `make test` compiled, `make test-slow` need not compile again, nor one worker what the other did. A program is
# found by all that it is compiled from, so a change of the code finds nothing old. Set before any import of jax.
_COMPILED = _ROOT / ".pytest_cache" / "xla"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_COMPILED))
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
_MOST_COMPILED_BYTES = 2 << 30  # a run that finds more starts anew

# Files whose programs LLVM need not optimise, which takes a third off their compilation: they compare integers, or
# numbers with a tolerance, or what XLA makes of a program before LLVM. Files that claim the same bits of different
# programs are not among them: without optimisation no product is fused into a sum, and bits agree too easily.
_UNOPTIMISED = {
    _ROOT / "tests/test_readme.py",
    *(_ROOT / f"tests/model/test_{name}.py" for name in (
        "checks", "gradients", "mechanisms", "odd_configurations", "pools_in_place",
    )),
    *(_ROOT / f"tests/engine/test_{name}.py" for name in (
        "async_ends", "async_engine", "async_interleavings", "async_leaving", "calibration", "drafts", "dummy_kind",
        "engine", "grammars", "handover_traffic", "interrupts", "lifecycle", "llm", "moves", "results",
        "reuse_traffic", "spoiled_cache", "stats", "steady_state", "step_times", "stop_texts",
        "traffic", "varlen",
    )),
}  # fmt: skip
# Long files come first, so that no worker waits for the other at the end.
_LONG_FOLDERS = ["model", "engine", "kernels", "sampling", "runtime"]

# Linux lets a process have 65,530 memory maps. Every program that XLA:CPU compiled holds some, and XLA crashes when it
# gets no more. A worker with 30,000 takes 10 GB.
_MANY_MAPS = 15_000


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        return  # a worker of a parallel run shares the cache of the run
    directory = tempfile.mkdtemp(prefix="deepinfer-jax-tests-")
    os.environ["XDG_CACHE_HOME"] = directory  # subprocesses and notebook kernels inherit it
    config.add_cleanup(lambda: shutil.rmtree(directory, ignore_errors=True))
    if _COMPILED.exists() and sum(file.stat().st_size for file in _COMPILED.iterdir()) > _MOST_COMPILED_BYTES:
        shutil.rmtree(_COMPILED)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def rank(item: pytest.Item) -> tuple[bool, bool]:
        return item.path not in _UNOPTIMISED, item.path.parent.name not in _LONG_FOLDERS

    items.sort(key=rank)  # stable: a file stays whole


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before the fixtures of a test, chooses how its programs are compiled."""
    if "jax" not in sys.modules:
        return
    import jax

    unoptimised = item.path in _UNOPTIMISED
    if jax.config.read("jax_disable_most_optimizations") != unoptimised:
        jax.config.update("jax_disable_most_optimizations", unoptimised)
        _give_up_programs()


def pytest_runtest_teardown() -> None:
    """Between tests, gives up compiled programs once there are many."""
    maps = Path("/proc/self/maps")
    if "jax" in sys.modules and maps.exists() and maps.read_bytes().count(b"\n") > _MANY_MAPS:
        _give_up_programs()


def _give_up_programs() -> None:
    import jax

    from deepinfer_jax.runtime.compiled_programs import compile_state_op, compile_step, compile_write_masks

    jax.clear_caches()
    compile_step.cache_clear()
    compile_state_op.cache_clear()
    compile_write_masks.cache_clear()
    gc.collect()
