from collections.abc import Iterator

import pytest

from deepinfer_jax.engine.environ import env
from tests.support.toy import toy_parts


@pytest.fixture
def toy_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every engine of the test runs the toy language model."""
    monkeypatch.setattr("deepinfer_jax.engine.llm_engine.load_parts", toy_parts)


@pytest.fixture(scope="module")
def poisoned() -> Iterator[None]:
    """Every engine of the module overwrites what it frees with NaN."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEEPINFER_POISON_FREED_STATE", "1")
        env.rearm()
        yield
    env.rearm()
