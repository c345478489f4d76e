"""JSON Schemas: reports all unsupported keywords, each with its path, and closes objects.

The grammar library passes over keywords that it does not know, so that a misspelt `maxLenght` would silently allow
everything; and of those that it knows and cannot enforce it names the first, without its path.
"""

import copy
import difflib
import json
from collections.abc import Iterator, Mapping, Set
from typing import Any
from urllib.parse import unquote

_ONE = ("items", "additionalProperties", "additionalItems")
"""Keywords whose value is a schema."""
_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
"""Keywords whose value is a list of schemas."""
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords whose value is an object of schemas."""
_FOR_ANY = ("type", "enum", "const", "$ref")
_FOR_OBJECTS_AND_ARRAYS = ("required", "minProperties", "maxProperties", "minItems", "maxItems")
_FOR_STRINGS = ("minLength", "maxLength", "pattern", "format")
_FOR_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
ENFORCED = frozenset((*_ONE, *_LISTS, *_MAPS, *_FOR_ANY, *_FOR_OBJECTS_AND_ARRAYS, *_FOR_STRINGS, *_FOR_NUMBERS))
_NAMES = ("$schema", "$id", "id", "$anchor", "$comment", "$vocabulary")
_ANNOTATIONS = ("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly")
_CONTENT = ("contentEncoding", "contentMediaType", "contentSchema", "discriminator", "externalDocs", "xml")
_WITHOUT_EFFECT = frozenset((*_NAMES, *_ANNOTATIONS, *_CONTENT))
"""Keywords of JSON Schema and OpenAPI that allow and forbid nothing."""
_CONDITIONS = ("not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies", "nullable")
_COUNTS = ("contains", "minContains", "maxContains", "uniqueItems")
_NAMES_OF_OTHERS = ("propertyNames", "unevaluatedProperties", "unevaluatedItems")
_DYNAMIC = ("$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor")
UNENFORCED = frozenset((*_CONDITIONS, *_COUNTS, *_NAMES_OF_OTHERS, *_DYNAMIC))
_BRANCHES = ("anyOf", "oneOf", "allOf")
_MAX_DEPTH = 300
"""Schemas within each other, which the grammar library follows by recursion: some thousands overflow its stack, and end
the process."""
_OLD_DRAFTS = ("draft-03", "draft-04", "draft-06", "draft-07", "2019-09")
_OBJECT_KEYWORDS = frozenset(("properties", "patternProperties", "additionalProperties", "required"))


def parsed_schema(text: str) -> Any:
    """The schema that a JSON text holds. Raises ValueError if it is no JSON."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("the JSON Schema is nested too deeply to be read") from None
    except ValueError as error:
        raise ValueError(f"the JSON Schema is no JSON: {error}") from None


def checked_schema(schema: Any, *, closed: bool) -> Any:
    """The schema for the grammar library: without what changes nothing, and with every object either closed or open.

    Arguments:
        closed: an object schema that lists properties allows no others, unless it says so by additionalProperties
            (DeepInfer's strict mode). Where several schemas hold of one object, none is closed: each would forbid what
            the others ask for.

    Raises ValueError for a schema that is no JSON Schema, and one that lists, with their paths, all keywords that are
    unknown or that no grammar here enforces.
    """
    try:
        subschemas = dict(_subschemas(schema, "#"))
        if problems := list(_problems(schema, "#", subschemas, old=_is_old(schema))):
            raise ValueError("the JSON Schema cannot be enforced: " + "; ".join(problems))
        if _depth(schema, subschemas, {}) > _MAX_DEPTH:
            raise RecursionError
        result = copy.deepcopy(schema)
        joint_refs = _joint_refs(schema)
        for _, part, joint in list(_walk(result, joint_refs)):
            part.pop("uniqueItems", None)  # false: the check leaves no other
            if ("properties" in part or "patternProperties" in part) and "additionalProperties" not in part:
                part["additionalProperties"] = not closed or joint or any(key in part for key in (*_BRANCHES, "$ref"))
        return result
    except RecursionError:
        raise ValueError("the JSON Schema is nested too deeply to be read") from None


def _problems(schema: Any, path: str, subschemas: Mapping[str, Any], *, old: bool) -> Iterator[str]:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        yield f"{path} must be a schema, an object or a boolean, and is {_short(schema)}"
        return
    for key, value in schema.items():
        if key in UNENFORCED:
            if key != "uniqueItems" or value is not False:
                yield f"{key!r} at {path} is not supported"
        elif key not in ENFORCED and key not in _WITHOUT_EFFECT and not key.startswith("x-"):
            near = difflib.get_close_matches(key, ENFORCED | UNENFORCED | _WITHOUT_EFFECT, n=1)
            yield f"unknown keyword {key!r} at {path}" + (f" (did you mean {near[0]!r}?)" if near else "")
        elif key == "x-guidance":
            yield f"{key!r} at {path} is not supported"
        elif key == "items" and isinstance(value, list):
            if not old:
                yield f"'items' at {path} is a list; that is called 'prefixItems' since draft 2020-12"
        elif key == "$ref" and isinstance(value, str) and unquote(value) not in subschemas:
            yield f"'$ref' at {path} leads to {value!r}, and there is no schema; put it into '$defs'"
    if problem := _lost_bound(schema):
        yield f"{problem} at {path} is not supported"
    for key, name, part in _parts(schema):
        if key in _LISTS and not isinstance(schema[key], list):
            yield f"{key!r} at {path} must be a list of schemas and is {_short(schema[key])}"
        elif key in _MAPS and not isinstance(schema[key], dict):
            yield f"{key!r} at {path} must be an object of schemas and is {_short(schema[key])}"
        else:
            yield from _problems(part, _within(path, key, name), subschemas, old=old)


def _subschemas(schema: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every schema within one, itself first, by its path and by the name that `$anchor` gives it."""
    yield path, schema
    if isinstance(schema, dict) and "$anchor" in schema:
        yield f"#{schema['$anchor']}", schema
    for key, name, part in _parts(schema) if isinstance(schema, dict) else ():
        yield from _subschemas(part, _within(path, key, name))


def _depth(schema: Any, subschemas: Mapping[str, Any], known: dict[str, int]) -> int:
    """How many schemas lie within each other at most, those included that a `$ref` leads to.

    Arguments:
        known: of each path that a `$ref` leads to; 0 while it is looked at. Filled here.
    """
    if not isinstance(schema, dict):
        return 1
    depths = [_depth(part, subschemas, known) for key, _, part in _parts(schema) if key not in ("$defs", "definitions")]
    if isinstance(ref := schema.get("$ref"), str):
        target = unquote(ref)
        if target not in known:
            known[target] = 0
            known[target] = _depth(subschemas[target], subschemas, known)
        depths.append(known[target])
    return 1 + max(depths, default=0)


def _lost_bound(schema: dict[str, Any]) -> str | None:
    """Where the library would allow the bound itself: `exclusiveMinimum` 1 with `maximum` 1.5 lets "1" through.

    It does so if the bound is an integer and all other numbers allowed begin with its digits.
    """
    for sign, bound_key, other_keys in (
        (1, "exclusiveMinimum", ("maximum", "exclusiveMaximum")),
        (-1, "exclusiveMaximum", ("minimum", "exclusiveMinimum")),
    ):
        bound = schema.get(bound_key)
        for other_key in other_keys:
            other = schema.get(other_key)
            if not isinstance(bound, (int, float)) or not isinstance(other, (int, float)):
                continue
            if 0 <= sign * bound < sign * other < sign * bound + 1 and bound == int(bound):
                return f"{bound_key!r} {bound} with {other_key!r} {other}"
    return None


def _parts(schema: dict[str, Any]) -> Iterator[tuple[str, str | int | None, Any]]:
    """The schemas directly within one: keyword, name or index there if there are several, schema."""
    for key, value in schema.items():
        if key in (*_LISTS, "items") and isinstance(value, list):
            for index, part in enumerate(value):
                yield key, index, part
        elif key in _MAPS and isinstance(value, dict):
            for name, part in value.items():
                yield key, name, part
        elif key in _ONE or key in _LISTS or key in _MAPS:
            yield key, None, value


def _walk(
    schema: Any, joint_refs: Set[str] = frozenset(), path: str = "#", joint: bool = False
) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """All object schemas within one, itself first: path, schema, and whether others hold of the same values.

    Arguments:
        joint_refs: paths of the schemas of which others say that by a `$ref`.
    """
    if not isinstance(schema, dict):
        return
    joint = joint or path in joint_refs
    yield path, schema, joint
    together = joint or _is_one_of_several(schema)
    for key, name, part in _parts(schema):
        branch = key in _BRANCHES and (together or (key == "allOf" and len(schema[key]) > 1))
        yield from _walk(part, joint_refs, _within(path, key, name), branch)


def _joint_refs(schema: Any) -> set[str]:
    """Paths of the schemas that hold together with others because a `$ref` says so, directly or through others."""
    found: set[str] = set()
    while True:
        new = {
            unquote(part["$ref"])
            for _, part, joint in _walk(schema, found)
            if isinstance(part.get("$ref"), str) and (joint or _is_one_of_several(part))
        }
        if new <= found:
            return found
        found |= new


def _is_one_of_several(schema: dict[str, Any]) -> bool:
    """Whether what a branch of this schema says of an object is said together with what its other keywords say."""
    branches = [key for key in (*_BRANCHES, "$ref") if key in schema]
    return len(branches) > 1 or (bool(branches) and not _OBJECT_KEYWORDS.isdisjoint(schema))


def _within(path: str, key: str, name: str | int | None) -> str:
    """The JSON pointer of a part."""
    if name is None:
        return f"{path}/{key}"
    return f"{path}/{key}/" + str(name).replace("~", "~0").replace("/", "~1")


def _is_old(schema: Any) -> bool:
    draft = schema.get("$schema") if isinstance(schema, dict) else None
    return isinstance(draft, str) and any(old in draft for old in _OLD_DRAFTS)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "…"


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
