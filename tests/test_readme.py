"""The README's Python runs as it stands."""

import json
import re
from pathlib import Path

import jax
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tests.support.paths import ROOT

pytestmark = pytest.mark.real

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


NAMES = ["generate", "images", "structured", "engine", "async", "hand-over", "forward", "sampler"]
SLOW = ["structured", "forward"]  # compile programs that no other example has


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(code, id=name, marks=pytest.mark.slow if name in SLOW else [])
        for name, code in zip(NAMES, BLOCKS, strict=True)
    ],
)
def test_every_example_of_the_readme_runs(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    registry, ports = CollectorRegistry(), list[int]()
    monkeypatch.setattr("prometheus_client.REGISTRY", registry)
    monkeypatch.setattr("prometheus_client.start_http_server", ports.append)
    namespace: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), namespace)
    if "texts" in namespace:
        texts = namespace["texts"]
        assert isinstance(texts, list) and len(texts) == 2 and all(texts)
    if "caption" in namespace:
        assert isinstance(namespace["caption"], str) and namespace["caption"]
    if "document" in namespace:
        document = namespace["document"]
        assert isinstance(document, str) and set(json.loads(document)) == {"name", "age"}
    if "answers" in namespace:
        answers = namespace["answers"]
        assert isinstance(answers, dict) and [len(answers[name]) for name in "ab"] == [8, 8]
        assert ports == [9400]
        assert (
            'deepinfer_generation_tokens_total{model_name="deepinfer-model"} 16.0' in generate_latest(registry).decode()
        )
    if "streamed" in namespace:
        streamed = namespace["streamed"]
        assert isinstance(streamed, list) and len(streamed) == 8
    if "drawn" in namespace:
        drawn = namespace["drawn"]
        assert isinstance(drawn, jax.Array) and len({3, 4, 5, *drawn[0].tolist()}) == 11
    if "completions" in namespace:
        tokens = namespace["tokens"]
        assert isinstance(tokens, list) and len(tokens) == 8
        assert [file.name for file in tmp_path.iterdir()] == ["sequence.safetensors"]
