"""config.py: a damaged config.json is one sentence that names the key, whatever it holds."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.config.model_config import load_config, parse_config
from tests.support.paths import GOLDEN_A

pytestmark = pytest.mark.pure

GOLDEN: dict[str, Any] = json.loads((GOLDEN_A / "config.json").read_text())
KEYS = [
    (section, key)
    for section, values in [(None, GOLDEN), *((k, v) for k, v in GOLDEN.items() if isinstance(v, dict))]
    for key in values
]
VALUES = [0, -1, -5, 2**70, 1.5, float("nan"), float("inf"), True, None, "x", [], {}, [0], [-1], ["a"], [[1]]]


def with_value(section: str | None, key: str, value: Any) -> dict[str, Any]:
    raw = copy.deepcopy(GOLDEN)
    (raw if section is None else raw[section])[key] = value
    return raw


@settings(max_examples=300)
@given(place=st.sampled_from(KEYS), value=st.sampled_from(VALUES))
def test_any_value_of_any_key_is_taken_or_refused_with_a_sentence(place: tuple[str | None, str], value: Any) -> None:
    section, key = place
    try:
        config = parse_config(with_value(section, key, value))
    except ValueError as error:
        assert "config" in str(error) or key in str(error)
    else:
        hash(config)  # static under jit


@pytest.mark.parametrize(
    ("section", "key", "value", "sentence"),
    [
        ("text_config", "sliding_window", 0, "text_config.sliding_window is 0; it must be positive"),
        ("text_config", "rms_norm_eps", 0.0, "text_config.rms_norm_eps is 0.0; it must be positive"),
        ("text_config", "hidden_size", -1, "text_config.hidden_size is -1; it must be positive"),
        ("text_config", "index_topk", 0, "text_config.index_topk is 0; it must be positive"),
        ("text_config", "engram_head_dim", 0, "text_config.engram_head_dim is 0; it must be positive"),
        ("text_config", "rope_theta", float("nan"), "text_config.rope_theta is nan; expected a number"),
        ("text_config", "hidden_size", 2**70, "text_config.hidden_size is 1180591620717411303424"),
        ("vision_config", "num_attention_heads", 0, "vision_config.num_attention_heads is 0; it must be positive"),
        (None, "vision_config", [1], "vision_config must be a JSON object, found list"),
        (None, "architectures", ["LlamaForCausalLM"], "architectures is"),
        (None, "tokenizer_compatibility", "both", "tokenizer_compatibility is 'both'"),
        ("quantization_config", "weight_block_size", [128, 128], "quantization_config.weight_block_size is"),
    ],
)
def test_what_no_model_can_be_is_named(section: str | None, key: str, value: Any, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_config(with_value(section, key, value))
    assert sentence in str(caught.value)


@pytest.mark.parametrize("key", ["factor", "beta_fast", "beta_slow", "original_max_position_embeddings"])
def test_a_rope_scaling_of_nothing_is_named(key: str) -> None:
    scaling = {**with_value(None, "dtype", "bfloat16")["text_config"]["rope_scaling"], key: 0}
    with pytest.raises(ValueError, match=rf"text_config\.rope_scaling\.{key} is 0.*; it must be positive"):
        parse_config(with_value("text_config", "rope_scaling", scaling))


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff", b"[]", b"[" * 100_000, b"null"])
def test_a_file_that_is_no_json_object_is_named(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "config.json").write_bytes(raw)
    with pytest.raises(ValueError, match=r"config\.json"):
        load_config(tmp_path)
