"""One table declares what a request samples by: a scalar that is added to it, and its filter, are all that it takes."""

import dataclasses
import shutil
from pathlib import Path

import pytest

from deepinfer_jax.memory.parts import slot_table_bytes
from deepinfer_jax.sampling import SamplerState
from deepinfer_jax.sampling.fields import SamplerScalars
from tests.support.added_scalar import LEAST
from tests.support.children import run_child
from tests.support.paths import ROOT
from tests.support.toy import VOCAB

pytestmark = pytest.mark.toy

TABLE, FILTERS = "deepinfer_jax/sampling/fields.py", "deepinfer_jax/sampling/filters.py"
ADDED = [
    (
        TABLE,
        "    presence_penalty: Annotated[",
        '    least_id: Annotated[int, Scalar(">= 0", lambda value: value >= 0, "filter")] = 0\n',
    ),
    (TABLE, "    raw_logprobs: Annotated[", '    least_id: Annotated[Array, _scalar("least_id")]\n'),
    (
        FILTERS,
        "    # The maximum goes first",
        "    logits = jnp.where(jnp.arange(vocab) >= rows.least_id[:, None], logits, -jnp.inf)\n",
    ),
]
"""File, what it says behind the new line, and the new line."""


def test_a_scalar_in_the_table_and_its_filter_travel_from_request_to_token(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "deepinfer_jax", tmp_path / "deepinfer_jax")
    shutil.copytree(ROOT / "tests" / "support", tmp_path / "tests" / "support")
    for name, behind, line in ADDED:
        text = (tmp_path / name).read_text()
        assert text.count(behind) == 1, f"{name} has not one place for {line!r}"
        (tmp_path / name).write_text(text.replace(behind, line + behind))

    found = run_child("added_scalar", root=tmp_path)
    assert found["refused"] == "least_id must be >= 0, got -1"
    assert found["greedy"] == 0
    assert found["columns"] == [1, 1]
    assert found["slots"] == [[[0, 0, 0]], "int32"]
    assert found["rows"] == [[0, 0], "int32"]
    assert found["bytes"] == slot_table_bytes(VOCAB, 0).slot + 4
    for drawn in (found["sampled"], found["researched"]):
        assert min(drawn["free"]) < LEAST <= min(drawn["bound"])


def test_the_research_state_has_all_scalars_off_in_the_old_order_of_arguments() -> None:
    own = {field.name: field.default for field in dataclasses.fields(SamplerState)}
    assert own == {field.name: field.default for field in dataclasses.fields(SamplerScalars)} | {"prompt_len": 0}
    assert list(own)[:8] == [
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "prompt_len",
    ]
