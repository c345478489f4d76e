"""The pages for users: their Python runs as it stands, their links lead somewhere, and the README stays short."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tests.support.markdown_pages import Snippet, anchors, broken_links, python_snippets
from tests.support.paths import ROOT

pytestmark = [pytest.mark.real, pytest.mark.unoptimised]

README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
SNIPPETS = {
    str(page.relative_to(ROOT)): snippets
    for page in (README, *DOCS)
    if (snippets := python_snippets(page.read_text(encoding="utf-8")))
}


def check_readme(names: dict[str, Any]) -> None:
    assert len(names["texts"]) == 2 and all(names["texts"])
    assert names["output"].logits.shape[:2] == names["tokens"].shape
    assert names["output"].captured


def check_engine(names: dict[str, Any]) -> None:
    assert [len(names["answers"][name]) for name in "ab"] == [8, 8]
    assert names["ports"] == [9400]
    metrics = generate_latest(names["registry"]).decode()
    assert 'deepinfer_generation_tokens_total{model_name="deepinfer-model"} 16.0' in metrics
    assert len(names["streamed"]) == 8
    assert len(names["tokens"]) == 8
    assert [file.name for file in Path.cwd().iterdir()] == ["sequence.safetensors"]


def check_images(names: dict[str, Any]) -> None:
    assert isinstance(names["caption"], str) and names["caption"]


def check_structured(names: dict[str, Any]) -> None:
    assert set(json.loads(names["document"])) == {"name", "age"}


def check_research(names: dict[str, Any]) -> None:
    assert len({*names["tokens"][0, :12].tolist(), *names["drawn"][0].tolist()}) == 32  # no token twice
    assert not np.allclose(names["changed"].logits, names["output"].logits)
    assert {name.split(".")[-1] for name in names["changed"].captured} == {"index_picks", "final_norm"}
    assert isinstance(names["slope"], jax.Array) and np.isfinite(names["loss"]) and np.any(names["slope"])


CHECKS: dict[str, Callable[[dict[str, Any]], None]] = {
    "README.md": check_readme,
    "docs/engine.md": check_engine,
    "docs/images.md": check_images,
    "docs/structured-output.md": check_structured,
    "docs/research.md": check_research,
}


@pytest.mark.parametrize("page", SNIPPETS)
def test_the_snippets_of_a_page_run_one_after_the_other(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    registry, ports = CollectorRegistry(), list[int]()
    monkeypatch.setattr("prometheus_client.REGISTRY", registry)
    monkeypatch.setattr("prometheus_client.start_http_server", ports.append)
    namespace: dict[str, Any] = {}
    for snippet in SNIPPETS[page]:
        in_place = "\n" * (snippet.line - 1) + snippet.code  # a traceback names the line of the page
        exec(compile(in_place, page, "exec"), namespace)
    if page in CHECKS:
        CHECKS[page]({**namespace, "registry": registry, "ports": ports})


def test_every_page_with_a_check_has_snippets() -> None:
    assert set(CHECKS) <= set(SNIPPETS)


def test_the_readme_is_read_to_its_end() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.parametrize("page", [README, ROOT / "CONTRIBUTING.md", *DOCS], ids=lambda page: page.name)
def test_every_relative_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    assert broken_links(page) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One `two`: three\n[ok](#one-two-three) [ok](other.md#same-1) [ok](https://nowhere.example/x)\n"
        "[gone](gone.md) and [no heading](other.md#gone)\n`[code](gone.md)`\n```\n[block](gone.md)\n# no heading\n```\n"
        "![image](gone.png) [no page](folder#x)\n[here]: gone.md#a\n[itself](#no-heading)\n"
    )
    (tmp_path / "other.md").write_text("# Same\n\n## Same\n")
    (tmp_path / "folder").mkdir()
    assert broken_links(page) == [
        "page.md:3: gone.md: there is no such file",
        "page.md:3: other.md#gone: the file has no such heading",
        "page.md:9: gone.png: there is no such file",
        "page.md:9: folder#x: the file has no such heading",
        "page.md:10: gone.md#a: there is no such file",
        "page.md:11: #no-heading: the file has no such heading",
    ]
    assert anchors((tmp_path / "other.md").read_text()) == {"same", "same-1"}


def test_only_blocks_marked_python_are_snippets() -> None:
    text = "```python\na = 1\n```\n```text\nb\n```\n```\nc\n```\n````python\nd = '''\n```\n'''\n````\n"
    assert python_snippets(text) == [Snippet(2, "a = 1\n"), Snippet(11, "d = '''\n```\n'''\n")]
