"""The house: lazy package, import rules at run time, and a wheel that works outside the repository."""

import ast
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import deepinfer_jax
from tests.support.paths import ROOT

pytestmark = pytest.mark.pure


def run_python(code: str, **kwargs: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **kwargs)  # type: ignore[call-overload]


@pytest.mark.parametrize("package", ["scheduler", "tokenization", "structured"])
def test_the_package_leaves_jax_alone(package: str) -> None:
    done = run_python(f"import sys, deepinfer_jax.{package}; print('jax' in sys.modules)")
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


def test_every_public_name_is_there_and_an_unknown_one_is_an_attribute_error() -> None:
    for name in deepinfer_jax.__all__:
        found = getattr(deepinfer_jax, name)
        assert (found.__name__, found.__module__) == (name, f"deepinfer_jax.{deepinfer_jax._HOME[name]}")
        assert name in dir(deepinfer_jax)
    assert sorted(deepinfer_jax.__all__) == sorted(deepinfer_jax._HOME)
    with pytest.raises(AttributeError, match="no attribute 'LLMM'"):
        deepinfer_jax.LLMM  # noqa: B018


def test_the_makefile_finds_a_python_by_running_it(tmp_path: Path) -> None:
    finder = str(ROOT / ".ci" / "find-python")
    found = subprocess.run([finder], capture_output=True, text=True, check=True).stdout.strip()
    version = subprocess.run([found, "-c", "import sys; print(sys.version_info >= (3, 12))"], capture_output=True)
    assert version.stdout == b"True\n"

    # A shim that fails and a Python that is too old are passed over; then the sentence says what is missing.
    for name, body in [("python3.14", "exit 127"), ("python3", "exit 1")]:
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    nothing = {"PATH": str(tmp_path), "PYENV_ROOT": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run(["/bin/sh", finder], capture_output=True, text=True, env=nothing)
    assert done.returncode == 1
    assert "No Python >= 3.12 with the venv module was found" in done.stderr


def test_ci_runs_the_readmes_test_command() -> None:
    commands = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("make ")]
    assert commands == ["make test", "make test-slow", "make gpu-compile"]
    assert "make test" in (ROOT / "README.md").read_text()


def test_the_package_has_two_files_at_its_root_and_at_most_ten_layers() -> None:
    package = ROOT / "deepinfer_jax"
    assert sorted(file.name for file in package.glob("*.py")) == ["__init__.py", "embedded.py"]
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    assert len(layers) <= 10
    ordered = {name for line in layers for name in line.split(" | ")}
    folders = {f"deepinfer_jax.{folder.parent.name}" for folder in package.glob("*/__init__.py")}
    assert ordered == folders | {"deepinfer_jax.embedded"}  # nobody stands outside the order


TEST_FILES = sorted((ROOT / "tests").rglob("*.py"))


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (r"def test_\w{76,}", "the name of a test has at most 80 characters"),
        (r"sys\.path\b", "tests are imported as tests.…, from the root"),
        (r"(from|import) tests\.(\w+\.)*test_", "what several test modules use is in tests/support"),
        (
            r"while [^\n]*has_unfinished_requests",
            "a loop that does not end must fail: tests.support.engine_runs.while_unfinished",
        ),
        (r"\._loop\b", "tests see what an engine shows, not its loop"),
    ],
)
def test_no_test_breaks_the_rules_of_the_folder(pattern: str, reason: str) -> None:
    found = [str(file) for file in TEST_FILES if file != Path(__file__) and re.search(pattern, file.read_text())]
    assert found == [], reason


def test_each_folders_docstring_names_all_its_modules() -> None:
    """So that a reader of `__init__.py` knows which file to open. Kernels' folders hold one kernel each."""
    package = ROOT / "deepinfer_jax"
    folders = [package, *(path for path in package.iterdir() if path.is_dir()), *(package / "engine").iterdir()]
    for folder in (path for path in folders if (path / "__init__.py").exists()):
        contents = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
        modules = {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
        missing = [name for name in modules - {"__init__"} if not re.search(rf"\b{name}\b", contents)]
        assert not missing, folder


@pytest.mark.slow
def test_a_wheel_generates_text_outside_the_repository(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, ROOT], check=True)
    (wheel,) = tmp_path.glob("deepinfer_jax-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"deepinfer_jax/py.typed", "deepinfer_jax/scheduler/plan.py"} <= set(names)
    tops = {name.split("/")[0].split("-")[0] for name in names}
    assert tops == {"deepinfer_jax"}  # no generic name lands in site-packages

    site = tmp_path / "site"
    subprocess.run([*pip, "install", "-q", "--no-deps", "--target", site, wheel], check=True)
    code = (
        "import deepinfer_jax, sys; print(deepinfer_jax.__file__, file=sys.stderr)\n"
        "sys.argv = ['deepinfer-jax', 'generate', '--prompt', 'Once upon a time', '--max-tokens', '8', '--seed', '1']\n"
        "from deepinfer_jax.cli.main import main; main()"
    )
    environment = os.environ | {"PYTHONPATH": str(site), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = run_python(code, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert str(site) in done.stderr  # the wheel ran, not the tree
    assert done.stdout.startswith("Once upon a time") and len(done.stdout) > len("Once upon a time\n")
