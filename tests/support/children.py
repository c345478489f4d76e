"""Scripts of `tests.support` in processes of their own, as several devices need."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.drafting import drafts
from tests.support.paths import ROOT


def run_child(name: str, *arguments: str, root: Path = ROOT, unoptimised: bool = False) -> Any:
    """What the script `tests/support/{name}.py` printed last, a JSON value.

    root: the folder of packages and tests; unoptimised: as the mark.
    """
    command = [sys.executable, "-m", f"tests.support.{name}", *arguments]
    environment = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": str(int(unoptimised))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=root, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@cache
def served(script_name: str = "two_devices", num_drafts: int = 0) -> dict[str, Any]:
    """What a script of toy engines printed that draft so many tokens; run once."""
    with drafts(num_drafts):
        result: dict[str, Any] = run_child(script_name, unoptimised=True)
    return result
