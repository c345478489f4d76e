"""For all tests and notebooks: a user cache of this run alone, so that they neither read nor leave anything, one cache
of compiled programs for all runs, whose time goes into compiling, and the account of that time (tests/README.md)."""

import gc
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Generator
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

# Every test has one. Long ones come first, so that no worker waits for the other at the end.
_TIERS = ["real", "toy", "pure"]
# CPU seconds of two cores, for three and for ten minutes less a minute of lint and start.
_BUDGETS = {"pure + toy": 2 * 180, "pure + toy + real": 2 * 540}

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


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.suffix == ".ipynb":  # has no place for a mark
            item.add_marker("real")
            if item.path.stem in _SLOW_NOTEBOOKS:
                item.add_marker("slow")
    unmarked = {str(item.path.relative_to(_ROOT)) for item in items if len(_tiers(item)) != 1}
    if unmarked:
        raise pytest.UsageError(f"these need one of the marks {', '.join(_TIERS)}: {', '.join(sorted(unmarked))}")
    items.sort(
        key=lambda item: (not _is_unoptimised(item), _TIERS.index(_tiers(item)[0]))
    )  # stable: a file stays whole


_SLOW_NOTEBOOKS = ["01_quickstart"]  # the README's first example runs in each `make test`


def _tiers(item: pytest.Item) -> list[str]:
    return [tier for tier in _TIERS if item.get_closest_marker(tier)]


def _is_unoptimised(item: pytest.Item) -> bool:
    """By the nearest mark; `unoptimised(False)` takes a test out of a module that is."""
    mark = item.get_closest_marker("unoptimised")
    return mark is not None and mark.args != (False,)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before the fixtures of a test, chooses how its programs are compiled."""
    if "jax" not in sys.modules:
        return
    import jax

    unoptimised = _is_unoptimised(item)
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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport]:
    """Notes the CPU seconds of each phase of a test, its processes included: those do not depend on the neighbours."""
    report: pytest.TestReport = yield
    now = sum(os.times()[:4])
    report.cpu_seconds, item.config.stash[_CPU] = now - item.config.stash.get(_CPU, now), now
    return report


_CPU = pytest.StashKey[float]()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The CPU seconds of each tier beside its budget. They never fail a run: what is too slow gets the mark `slow`."""
    seconds, counts = Counter[str](), Counter[str]()
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
        if not isinstance(report, pytest.TestReport):
            continue
        kind = next((mark for mark in ("slow", *_TIERS) if mark in report.keywords), "")
        seconds[kind] += getattr(report, "cpu_seconds", 0)
        counts[kind] += report.when == "call"
    terminalreporter.section("CPU seconds by tier")
    for tier in [*reversed(_TIERS), "slow"]:
        if counts[tier]:
            terminalreporter.write_line(f"{tier:<18} {seconds[tier]:6.0f}  in {counts[tier]} tests")
    for name, budget in _BUDGETS.items():
        used = sum(seconds[tier] for tier in name.split(" + "))
        terminalreporter.write_line(f"{name:<18} {used:6.0f}  of {budget}")
