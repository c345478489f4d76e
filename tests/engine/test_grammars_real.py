"""Structured output of the real model with its own tokenizer: the embedded checkpoint, with and without drafts."""

import json
import re

import jsonschema
import pytest

from deepinfer_jax import LLM, SamplingParams
from deepinfer_jax.embedded import embedded_model
from tests.support.drafting import drafts

pytestmark = pytest.mark.real

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["red", "green", None]}, "maxItems": 3},
    },
    "required": ["name", "tags"],
}
EXPRESSION = r"(yes|no), because [a-z]{3,12}( [a-z]{2,9}){2}\."


@pytest.mark.slow
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_texts_are_what_was_asked_for_beside_free_ones(num_drafts: int) -> None:
    with drafts(num_drafts):
        llm = LLM(embedded_model(), max_num_seqs=4, precision="float32_exact", max_model_len=512)
    asked = [
        {"schema_type": "json", "schema": json.dumps(SCHEMA)},
        {"schema_type": "regex", "schema": EXPRESSION},
        {"schema_type": "ebnf", "schema": 'root ::= item ("," item){2}\nitem ::= [A-C]+ | "(" root ")"'},
        None,
    ]
    params = [
        SamplingParams(max_tokens=300 if one else 20, so_args=one, temperature=temperature, seq_seed=seed)
        for one in asked
        for seed, temperature in ((1, 0.0), (2, 1.0), (3, 0.7))
    ]
    texts = llm.generate(["Once upon a time"] * len(params), params, use_tqdm=False)
    assert not llm.last_errors
    ended = 0
    for text, own in zip(texts, params, strict=True):
        if own.so_args is None:
            continue
        ids = llm.get_tokenizer().encode(text, add_special_tokens=False)
        if len(ids) > 250:
            continue  # the model may go on with blanks, or brackets
        ended += 1
        if own.so_args["schema_type"] == "json":
            jsonschema.validate(json.loads(text), SCHEMA)
        elif own.so_args["schema_type"] == "regex":
            assert re.fullmatch(EXPRESSION, text)
        else:
            assert re.fullmatch(r"[A-C(),]+", text) and text.count("(") == text.count(")")
    assert ended >= 6


@pytest.mark.slow
def test_greedy_texts_with_drafts_are_those_without() -> None:
    found = []
    for num_drafts in (0, 2):
        with drafts(num_drafts):
            llm = LLM(embedded_model(), max_num_seqs=2, precision="float32_exact", max_model_len=512)
        asked = [{"schema_type": "json", "schema": json.dumps(SCHEMA)}, {"schema_type": "regex", "schema": EXPRESSION}]
        params = [SamplingParams(max_tokens=60, temperature=0, so_args=one) for one in (*asked, None)]
        found.append(llm.generate(["A person:", "Is it?", "Once"], params, use_tqdm=False))
    assert found[0] == found[1]
