"""Every benchmark runs to its end, on sizes that take seconds. Its figures mean nothing there."""

import os
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.real

SCRIPTS = sorted(path.name for path in (ROOT / "benchmarks").glob("*.py") if path.name != "drafted.py")  # a helper


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_it_runs(script: str) -> None:
    if script == "zero_overhead.py" and len(os.sched_getaffinity(0)) < 2:
        pytest.skip("it pins host and device to a core each")
    done = subprocess.run(
        [sys.executable, f"benchmarks/{script}", "--smoke"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
