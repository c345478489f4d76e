"""Checks and normalises a request's `so_args` (DB §8.1), and turns OpenAI's `response_format` into them."""

import functools
import json
from dataclasses import dataclass
from typing import Any, Literal

from deepinfer_jax.structured.ebnf import parse_ebnf
from deepinfer_jax.structured.schema import checked_schema, parsed_schema

SCHEMA_TYPES = ("json", "regex", "ebnf")
_KEYS = ("schema_type", "schema", "trigger_token_ids", "bound_token_id")


@dataclass(frozen=True)
class StructuredArgs:
    """`so_args`, checked.

    Attributes:
        schema_type: what `schema` is.
        schema: a JSON Schema, a regular expression for the whole text, or an EBNF grammar with the rule `root`.
        trigger: the text is free until these ids have come in a row; () if it is constrained from the start.
        bound: after this id the trigger must come at once; None: it may come at any time, or never.
    """

    schema_type: Literal["json", "regex", "ebnf"]
    schema: str
    trigger: tuple[int, ...] = ()
    bound: int | None = None


def structured_args(so_args: Any) -> StructuredArgs:
    """Checks the `so_args` of a request, as far as that needs no vocabulary.

    Raises TypeError if it is no dict, ValueError for everything else that is wrong with it: unknown keys, a trigger
    that is no list of ids, JSON that does not parse, keywords of a schema that are misspelt or cannot be enforced, with
    their paths, an EBNF grammar that does not parse.
    """
    if not isinstance(so_args, dict):
        raise TypeError(f"so_args must be a dict with the keys {', '.join(_KEYS)}, got {so_args!r}")
    if "serialized" in so_args:
        raise ValueError("so_args: 'serialized' grammars of another library cannot be read; pass the schema itself")
    if "bound_token_ids" in so_args:
        raise ValueError("so_args: there is one bound token; write bound_token_id, not bound_token_ids")
    if unknown := sorted(map(str, set(so_args) - set(_KEYS))):
        raise ValueError(f"so_args has no key {', '.join(unknown)}; there are {', '.join(_KEYS)}")
    schema_type, schema = so_args.get("schema_type"), so_args.get("schema")
    if schema_type not in SCHEMA_TYPES:
        raise ValueError(f"so_args: schema_type must be one of {', '.join(SCHEMA_TYPES)}, got {schema_type!r}")
    if not isinstance(schema, str):
        hint = "; write it with json.dumps" if schema_type == "json" else ""
        raise ValueError(f"so_args: schema must be a string, got {type(schema).__name__}{hint}")
    trigger, bound = _trigger(so_args.get("trigger_token_ids")), so_args.get("bound_token_id")
    if bound is not None:
        if not _is_id(bound):
            raise ValueError(f"so_args: bound_token_id must be an id >= 0, got {bound!r}")
        if not trigger:
            raise ValueError("so_args: bound_token_id says when the trigger must come; give trigger_token_ids too")
    _check_schema(schema_type, schema)
    return StructuredArgs(schema_type, schema, trigger, bound)


def so_args_of(response_format: Any) -> dict[str, Any] | None:
    """OpenAI's `response_format` as `so_args`; None for `{"type": "text"}` and for None.

    `json_object` is any JSON object. A `json_schema` with `strict` true allows no properties but those it lists, as
    `so_args` do; otherwise it means what JSON Schema says.

    Raises ValueError for other types and for a schema that `structured_args` refuses.
    """
    if response_format is None:
        return None
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"schema_type": "json", "schema": '{"type": "object"}'}
    if kind != "json_schema":
        raise ValueError(
            f"response_format must be a dict whose type is text, json_object or json_schema, got {response_format!r}"
        )
    wanted = response_format.get("json_schema")
    if not isinstance(wanted, dict) or "schema" not in wanted:
        raise ValueError("response_format of type json_schema needs {'json_schema': {'schema': …}}")
    strict = wanted.get("strict") or False
    if not isinstance(strict, bool):
        raise ValueError(f"response_format: strict must be true or false, got {strict!r}")
    try:
        text = json.dumps(wanted["schema"])
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"response_format: the schema is no JSON: {error}") from None
    if not strict:
        text = json.dumps(checked_schema(parsed_schema(text), closed=False))
    so_args = {"schema_type": "json", "schema": text}
    structured_args(so_args)
    return so_args


@functools.lru_cache(maxsize=64)  # one request is checked at every place that it passes, and many are alike
def _check_schema(schema_type: str, schema: str) -> None:
    if schema_type == "json":
        checked_schema(parsed_schema(schema), closed=True)
    elif schema_type == "ebnf":
        parse_ebnf(schema)


def _trigger(ids: Any) -> tuple[int, ...]:
    if ids is None:
        return ()
    if not isinstance(ids, (list, tuple)) or not all(map(_is_id, ids)):
        raise ValueError(f"so_args: trigger_token_ids must be a list of ids >= 0, got {ids!r}")
    return tuple(ids)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
