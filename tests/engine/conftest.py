import pytest
from toy import toy_parts


@pytest.fixture
def toy_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every engine of the test runs the toy language model."""
    monkeypatch.setattr("deepinfer_jax.engine.engine.load_parts", toy_parts)
