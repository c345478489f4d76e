"""EBNF to Lark: rewrites rules before they are cut (special tokens, tail calls); the same texts are allowed."""

import re
from collections.abc import Mapping

from deepinfer_jax.structured.nodes import Call, Choice, Marker, Node, Repeat, Row, Text, calls


def with_markers(node: Node, markers: Mapping[str, int]) -> Node:
    """The node with the spellings of markers in its texts replaced by their tokens, the longest first."""
    if not markers:
        return node
    return _with_markers(node, re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True)))), markers)


def _with_markers(node: Node, spellings: re.Pattern[str], markers: Mapping[str, int]) -> Node:
    match node:
        case Text(value):
            parts: list[Node] = []
            end = 0
            for found in spellings.finditer(value):
                parts += [Text(value[end : found.start()]), Marker(markers[found.group()])]
                end = found.end()
            parts = [part for part in (*parts, Text(value[end:])) if part != Text("")]
            return parts[0] if len(parts) == 1 else Row(tuple(parts))
        case Row(inner):
            return Row(tuple(_with_markers(part, spellings, markers) for part in inner))
        case Choice(inner):
            return Choice(tuple(_with_markers(part, spellings, markers) for part in inner))
        case Repeat(part, least, most):
            return Repeat(_with_markers(part, spellings, markers), least, most)
        case _:
            return node


def without_tail_calls(rules: Mapping[str, Node]) -> dict[str, Node]:
    """`ws ::= ([ \\t] ws)?` as `ws ::= [ \\t]*`: what a rule calls itself for only at its end is a repetition."""
    return {name: _without_tail_call(name, node) for name, node in rules.items()}


def _without_tail_call(name: str, node: Node) -> Node:
    if name not in calls(node):
        return node
    repeated: list[Node] = []
    final: list[Node] = []
    for parts in _alternatives(name, node):
        if parts and parts[-1] == Call(name):
            parts = parts[:-1]
            repeated.append(Row(parts))
        else:
            final.append(Row(parts))
        if name in calls(Row(parts)):
            return node  # it calls itself elsewhere too
    return Row((Repeat(Choice(tuple(repeated)), 0, None), Choice(tuple(final)))) if final else node


def _alternatives(name: str, node: Node) -> list[tuple[Node, ...]]:
    """The alternatives of a node, as rows, as far as the last part of each calls the rule."""
    if name not in calls(node):
        return [(node,)]
    match node:
        case Choice(parts):
            return [row for part in parts for row in _alternatives(name, part)]
        case Row(parts):
            return [(*parts[:-1], *row) for row in _alternatives(name, parts[-1])]
        case Repeat(part, 0, 1):
            return [(), *_alternatives(name, part)]
        case _:
            return [(node,)]
