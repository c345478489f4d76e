"""Scripts of `tests.support` in processes of their own, as several devices need."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run_child(name: str, *arguments: str, root: Path = ROOT) -> Any:
    """What the script `tests/support/{name}.py` printed last, a JSON value; root: the folder of packages and tests."""
    command = [sys.executable, "-m", f"tests.support.{name}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=root)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
