"""The README's Python runs as it stands."""

import re
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("code", BLOCKS, ids=["generate", "forward"])
def test_example(code: str) -> None:
    namespace: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), namespace)
    if "texts" in namespace:
        texts = namespace["texts"]
        assert isinstance(texts, list) and len(texts) == 2 and all(texts)
