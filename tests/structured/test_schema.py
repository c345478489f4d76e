"""JSON Schemas: what comes out validates, by another library; what cannot be enforced is said at once."""

import json
import re
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.structured import GrammarError, so_args_of, structured_args
from deepinfer_jax.structured.schema import ENFORCED, UNENFORCED, checked_schema
from tests.support.walks import MARKER, allowed, matcher, spelt, takes, text_of, walk

pytestmark = pytest.mark.pure

FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
CORPUS: dict[str, list[Any]] = {
    "type": [{"type": ["integer", "null"]}, {"type": "boolean"}, {"type": "array"}, {"type": "object"}, {}, True],
    "enum": [{"enum": [1, "a", None, True]}, {"enum": [{"a": [1]}]}],
    "const": [{"const": {"a": [1, 2.5, "x"]}}, {"const": "｜"}],
    "$ref": [{"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "null"}}}],
    "$defs": [{"$defs": {"n": {"type": ["null", "array"], "items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"}],
    "definitions": [{"definitions": {"a": {"type": "integer"}}, "type": "array", "items": {"$ref": "#/definitions/a"}}],
    "anyOf": [{"anyOf": [{"type": "integer", "minimum": 5}, {"type": "string", "maxLength": 2}]}],
    "oneOf": [{"oneOf": [{"type": "integer"}, {"type": "null"}]}],
    "allOf": [
        {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]},
        {
            "allOf": [
                {"properties": {"a": {"type": "null"}}, "required": ["a"]},
                {"type": "object", "properties": {"b": {"type": "null"}}, "required": ["b"]},
            ]
        },
    ],
    "items": [{"type": "array", "items": {"type": "integer"}}],
    "prefixItems": [{"type": "array", "prefixItems": [{"type": "null"}, {"type": "boolean"}], "items": False}],
    "additionalItems": [
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "array",
            "items": [{"type": "null"}],
            "additionalItems": {"type": "boolean"},
        }
    ],
    "minItems": [{"type": "array", "items": {"type": "null"}, "minItems": 2}],
    "maxItems": [{"type": "array", "items": {"type": "null"}, "maxItems": 1}],
    "properties": [{"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "boolean"}}}],
    "required": [
        {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "boolean"}}, "required": ["b"]}
    ],
    "additionalProperties": [
        {"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": {"type": "boolean"}},
        {"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": False},
    ],
    "patternProperties": [{"type": "object", "patternProperties": {"^x[0-9]$": {"type": "null"}}}],
    "minProperties": [{"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 1}],
    "maxProperties": [{"type": "object", "additionalProperties": {"type": "null"}, "maxProperties": 1}],
    "minLength": [{"type": "string", "minLength": 3}],
    "maxLength": [{"type": "string", "maxLength": 2}],
    "pattern": [{"type": "string", "pattern": "^[a-c]{2,3}x?$"}, {"type": "string", "pattern": "^b?\\d\\.$"}],
    "format": [{"type": "string", "format": name} for name in FORMATS],
    "minimum": [{"type": "integer", "minimum": 37}, {"type": "number", "minimum": -2.5}],
    "maximum": [{"type": "integer", "maximum": -5}, {"type": "number", "maximum": 0.125}],
    "exclusiveMinimum": [{"type": "integer", "exclusiveMinimum": 9, "maximum": 11}],
    "exclusiveMaximum": [{"type": "number", "exclusiveMaximum": 1, "minimum": 0}],
    "multipleOf": [{"type": "integer", "multipleOf": 7}, {"type": "number", "multipleOf": 0.25, "maximum": 4}],
}
"""By keyword, schemas that show it; every keyword that is enforced is here."""


def texts(schema: Any, count: int, *, length: int = 60, seed: int = 0) -> list[str]:
    """Random texts of a schema."""
    whole, rng = matcher("json", schema), np.random.default_rng(seed)
    walks = [walk(whole.copy(), rng, length=length) for _ in range(count)]
    return [text_of(tokens) for tokens in walks if tokens is not None]


def validate(text: str, schema: Any) -> None:
    validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    validator(schema, format_checker=validator.FORMAT_CHECKER).validate(json.loads(text, parse_int=int))


def test_every_enforced_keyword_has_a_schema() -> None:
    assert set(CORPUS) == ENFORCED


@pytest.mark.parametrize("keyword", CORPUS)
def test_what_comes_out_of_a_keyword_validates(keyword: str) -> None:
    for schema in CORPUS[keyword]:
        found = texts(schema, 30)
        assert len(found) >= 3, schema
        for text in found:
            validate(text, schema)


@st.composite
def schemas(draw: st.DrawFn, depth: int = 2) -> dict[str, Any]:
    kinds = ["integer", "number", "string", "null", "boolean", "enum"] + ["array", "object", "anyOf"] * (depth > 0)
    low = draw(st.integers(-20, 20))
    match draw(st.sampled_from(kinds)):
        case "integer":
            steps = draw(st.sampled_from([{}, {"multipleOf": 3}]))
            return {"type": "integer", "minimum": low, "maximum": low + draw(st.integers(5, 200)), **steps}
        case "number":
            return {"type": "number", "exclusiveMinimum": low, "maximum": low + draw(st.integers(1, 30)) / 4}
        case "string":
            least = draw(st.integers(0, 3))
            kinds_of_text = [{"minLength": least, "maxLength": least + 4}, {"pattern": "^[a-f]{1,4}$"}]
            return {"type": "string", **draw(st.sampled_from(kinds_of_text))}
        case "enum":
            values = st.one_of(st.integers(-5, 5), st.none(), st.text('aé"\\/\n', max_size=3))
            return {"enum": draw(st.lists(values, min_size=1, max_size=3, unique_by=repr))}
        case "array":
            least = draw(st.integers(0, 2))
            first = draw(st.lists(schemas(depth - 1), max_size=2))
            size = {"minItems": least, "maxItems": least + draw(st.integers(0, 2))}
            return {
                "type": "array",
                "items": draw(schemas(depth - 1)),
                **size,
                **({"prefixItems": first} if first else {}),
            }
        case "object":
            names = draw(st.lists(st.sampled_from(["a", "bb", "c c", 'd"']), max_size=3, unique=True))
            needed = draw(st.lists(st.sampled_from(names), unique=True)) if names else []
            properties = {name: draw(schemas(depth - 1)) for name in names}
            extra = draw(st.sampled_from([{}, {"additionalProperties": {"type": "null"}}]))
            return {"type": "object", "properties": properties, "required": needed, **extra}
        case "anyOf":
            return {"anyOf": [draw(schemas(depth - 1)), draw(schemas(depth - 1))]}
        case kind:
            return {"type": kind}


@given(schemas(), st.integers(0, 1000))
@settings(max_examples=100)
def test_what_comes_out_of_any_schema_validates(schema: dict[str, Any], seed: int) -> None:
    try:
        found = texts(schema, 3, length=120, seed=seed)
    except GrammarError as error:
        assert "Unsatisfiable" in str(error)
        return
    except ValueError as error:
        assert "'exclusiveMinimum'" in str(error)
        return
    for text in found:
        validate(text, schema)


def test_whitespace_is_free() -> None:
    whole = matcher("json", {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]})
    for text in ('{"a":null}', '{ "a" : null }', '{\n\t"a":\r\n  null\n}'):
        assert takes(whole.copy(), text)
    assert not takes(whole.copy(), ' {"a":null}')


def test_a_schema_that_lists_properties_allows_no_others_unless_it_says_so() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "null"}}}
    other = '{"b": null}'
    assert not takes(matcher("json", schema), other)
    assert takes(matcher("json", schema | {"additionalProperties": True}), other)
    assert takes(matcher("json", {"type": "object"}), other)
    asked = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    for strict, allows in ((True, False), (False, True), (None, True)):
        asked["json_schema"]["strict"] = strict
        so_args = so_args_of(asked)
        assert takes(matcher(so_args["schema_type"], so_args["schema"]), other) == allows


def test_objects_that_several_schemas_describe_stay_open_and_the_others_close() -> None:
    defs = {
        "base": {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]},
        "alone": {"type": "object", "properties": {"b": {"type": "null"}}},
    }
    together = {"allOf": [{"$ref": "#/$defs/base"}, {"properties": {"b": {"type": "null"}}, "required": ["b"]}]}
    schema = {"$defs": defs, "type": "array", "items": {"anyOf": [together, {"$ref": "#/$defs/alone"}]}}
    closed = checked_schema(schema, closed=True)
    assert closed["$defs"]["base"]["additionalProperties"] is True
    assert closed["$defs"]["alone"]["additionalProperties"] is False
    assert "additionalProperties" not in schema["$defs"]["base"]  # the caller's schema is not touched
    assert takes(matcher("json", schema), '[{"a":null,"b":null},{"b":null}]')
    assert not takes(matcher("json", schema), '[{"b":null,"c":null}]')


def test_what_is_misspelt_or_not_supported_is_said_at_once_with_its_place() -> None:
    schema = {
        "type": "object",
        "properties": {"a/b": {"type": "string", "minLenght": 3}, "c": {"not": {"type": "null"}, "minItms": 1}},
        "uniqueItems": True,
        "$defs": {"d": {"anyOf": [{"contains": {}}, 5]}},
        "zzz": 1,
    }
    with pytest.raises(ValueError) as raised:
        structured_args({"schema_type": "json", "schema": json.dumps(schema)})
    assert str(raised.value) == (
        "the JSON Schema cannot be enforced: 'uniqueItems' at # is not supported; unknown keyword 'zzz' at #; "
        "unknown keyword 'minLenght' at #/properties/a~1b (did you mean 'minLength'?); "
        "'not' at #/properties/c is not supported; "
        "unknown keyword 'minItms' at #/properties/c (did you mean 'minItems'?); "
        "'contains' at #/$defs/d/anyOf/0 is not supported; #/$defs/d/anyOf/1 must be a schema, an object or a boolean, "
        "and is 5"
    )


@pytest.mark.parametrize("keyword", sorted(UNENFORCED))
def test_what_the_library_does_not_enforce_is_refused(keyword: str) -> None:
    with pytest.raises(ValueError, match="is not supported"):
        checked_schema({"items": {keyword: {}}}, closed=True)


def test_annotations_and_the_names_of_properties_are_no_keywords() -> None:
    schema = {
        "title": "t",
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "examples": [{"minLenght": 1}],
        "uniqueItems": False,
        "x-order": 3,
        "type": "object",
        "properties": {"minLenght": {"default": {"not": 1}, "enum": [{"if": 1}]}, "not": {"const": {"else": 2}}},
    }
    assert takes(matcher("json", schema), '{"minLenght": {"if": 1}, "not": {"else": 2}}')


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ('{"a": ', "is no JSON"),
        ('{"minimum": NaN}', "NaN is no JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("3", "# must be a schema, an object or a boolean, and is 3"),
        ('{"anyOf": {}}', "'anyOf' at # must be a list of schemas"),
        ('{"properties": []}', "'properties' at # must be an object of schemas"),
        ('{"items": [{}]}', "'items' at # is a list; that is called 'prefixItems'"),
        ('{"x-guidance": {"lenient": true}}', "'x-guidance' at # is not supported"),
        ('{"$ref": "#/$defs/none"}', "'$ref' at # leads to '#/$defs/none', and there is no schema"),
        ('{"$ref": "#name"}', "leads to '#name', and there is no schema"),
        ('{"$ref": "https://example.com/x"}', "and there is no schema"),
        ('{"$schema": "draft-07", "items": [{"maxLenght": 1}]}', "'maxLenght' at #/items/0"),
    ],
)
def test_what_is_no_schema_is_refused(schema: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        structured_args({"schema_type": "json", "schema": schema})


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "string", "format": "colour"}, "Unknown format: colour"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    ],
)
def test_what_the_library_finds_wrong_is_passed_on(schema: Any, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        matcher("json", schema)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"x-defs": {"a": {"maxLenght": 1}}, "$ref": "#/x-defs/a"}, "#/x-defs/a"),
        ({"default": {"maxLenght": 1}, "$ref": "#/default"}, "#/default"),
        ({"properties": {"a": {"const": {"maxLenght": 1}}}, "items": {"$ref": "#/properties/a/const"}}, "a/const"),
    ],
)
def test_a_reference_leads_to_no_schema_that_was_not_checked(schema: Any, place: str) -> None:
    with pytest.raises(ValueError, match=rf"leads to '.*{place}', and there is no schema"):
        structured_args({"schema_type": "json", "schema": json.dumps(schema)})


def test_references_by_place_and_by_name_are_followed() -> None:
    definitions = {"a b": {"type": "null"}, "c/d": {"const": 1}, "e": {"$anchor": "name", "const": 2}}
    refs = ["#/$defs/a%20b", "#/$defs/c~1d", "#name", "#/$defs/e"]
    schema = {"prefixItems": [{"$ref": ref} for ref in refs], "minItems": 4, "type": "array", "$defs": definitions}
    assert takes(matcher("json", schema), "[null,1,2,2]")
    assert not takes(matcher("json", schema), "[null,1,1,2]")


def test_objects_in_the_lists_of_old_drafts_are_closed_too() -> None:
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", "items": [{"properties": {"a": {}}}]}
    (item,) = checked_schema(schema, closed=True)["items"]
    assert item["additionalProperties"] is False


@pytest.mark.parametrize("anchored", [False, True])
@pytest.mark.parametrize("length", [100, 4000])
def test_long_chains_of_references_are_refused(length: int, anchored: bool) -> None:
    """The library follows them by recursion: its stack would overflow, and end the process."""
    definitions: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(length)}
    if anchored:
        definitions = {f"d{i}": {"$anchor": f"n{i}", "$ref": f"#n{i + 1}"} for i in range(length)}
    definitions[f"d{length}"] = {"$anchor": f"n{length}", "type": "null"}
    schema = {"$defs": definitions, "$ref": "#/$defs/d0"}
    if length > 300:
        with pytest.raises(ValueError, match="nested too deeply"):
            checked_schema(schema, closed=True)
    else:
        assert takes(matcher("json", schema), "null")


@pytest.mark.parametrize("low", (0, 1, 2.5, -1, -3))
@pytest.mark.parametrize("span", (0.25, 0.75, 1, 1.5))
def test_an_exclusive_bound_is_never_allowed(low: float, span: float) -> None:
    """The library lets some through; these are refused, and no others."""
    high = low + span
    for schema, bound in (
        ({"exclusiveMinimum": low, "maximum": high}, low),
        ({"exclusiveMinimum": low, "exclusiveMaximum": high}, low),
        ({"minimum": low, "exclusiveMaximum": high}, high),
        ({"exclusiveMinimum": low, "exclusiveMaximum": high}, high),
    ):
        lost = (low >= 0 and low == int(low) and high < low + 1) or (
            high <= 0 and high == int(high) and low > high - 1 and "exclusiveMaximum" in schema
        )
        try:
            whole = matcher("json", {"type": "number"} | schema)
        except ValueError as error:
            assert lost, (schema, error)
            continue
        for text in (str(bound), f"{bound:g}", f"{bound:.1f}", f"{bound:.2f}", f"-{bound:g}".replace("--", "")):
            if float(text) == bound:
                assert not takes(whole.copy(), text), (schema, text)


def test_a_marker_is_never_part_of_a_string_but_its_letters_may_be() -> None:
    whole = matcher("json", {"type": "string"})
    assert takes(whole.copy(), '"<｜DSML｜calls>"')
    whole.accept(spelt('"a'))
    ids = allowed(whole)
    assert ids is not None and not {MARKER, 0, 2, 3, 5} & set(ids) and ids.max() < 512


def test_response_formats() -> None:
    circle: dict[str, Any] = {}
    circle["items"] = circle
    assert so_args_of(None) is None
    assert so_args_of({"type": "text"}) is None
    anything = so_args_of({"type": "json_object"})
    assert takes(matcher(**anything), '{"a": [1, {"b": "c"}]}')
    assert not takes(matcher(**anything), "[1]")
    for wrong, message in (
        ({"type": "xml"}, "must be a dict whose type is text, json_object or json_schema"),
        ("text", "must be a dict whose type"),
        ({"type": "json_schema", "json_schema": {}}, "needs"),
        ({"type": "json_schema", "json_schema": {"schema": {}, "strict": "yes"}}, "strict must be true or false"),
        ({"type": "json_schema", "json_schema": {"schema": {"maxLenght": 3}}}, "did you mean 'maxLength'"),
        ({"type": "json_schema", "json_schema": {"schema": {1: 2}}}, "unknown keyword '1'"),
        (
            {"type": "json_schema", "json_schema": {"schema": {"enum": [{1}]}}},
            "is no JSON: Object of type set",
        ),
        ({"type": "json_schema", "json_schema": {"schema": circle}}, "the schema is no JSON: Circular"),
    ):
        with pytest.raises(ValueError, match=message):
            so_args_of(wrong)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"serialized": "…"}, "'serialized' grammars of another library cannot be read"),
        ({"bound_token_ids": [1]}, "write bound_token_id"),
        ({"trigger": [1]}, "so_args has no key trigger"),
        ({"schema": None}, "schema must be a string, got NoneType"),
        ({"schema": {"type": "null"}}, "write it with json.dumps"),
        ({"schema_type": None}, "schema_type must be one of json, regex, ebnf, got None"),
        ({"schema_type": "lark"}, "must be one of json, regex, ebnf, got 'lark'"),
        ({"trigger_token_ids": 5}, "trigger_token_ids must be a list of ids >= 0"),
        ({"trigger_token_ids": [True]}, "trigger_token_ids must be a list of ids >= 0"),
        ({"trigger_token_ids": [-1]}, "trigger_token_ids must be a list of ids >= 0"),
        ({"bound_token_id": 3}, "give trigger_token_ids too"),
        ({"bound_token_id": -3, "trigger_token_ids": [1]}, "bound_token_id must be an id >= 0"),
        ({"bound_token_id": 3, "trigger_token_ids": []}, "give trigger_token_ids too"),
    ],
)
def test_so_args_that_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        structured_args({"schema_type": "json", "schema": "{}"} | change)
    with pytest.raises(TypeError, match="so_args must be a dict"):
        structured_args("{}")
