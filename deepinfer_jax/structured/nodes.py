"""The syntax tree of EBNF rules, shared by the steps from parsing to Lark."""

from collections.abc import Mapping
from dataclasses import dataclass

MAX_CHARACTER = 0x10FFFF


@dataclass(frozen=True)
class Characters:
    """One character of these ranges, ends included, sorted and disjoint."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Text:
    """These characters in a row."""

    value: str


@dataclass(frozen=True)
class Call:
    """What the rule of this name gives."""

    name: str


@dataclass(frozen=True)
class Row:
    """One part after the other; none: the empty text."""

    parts: tuple["Node", ...]


@dataclass(frozen=True)
class Choice:
    """Any one of the parts."""

    parts: tuple["Node", ...]


@dataclass(frozen=True)
class Repeat:
    """The part `least` to `most` times; most None: without end."""

    part: "Node"
    least: int
    most: int | None


@dataclass(frozen=True)
class Marker:
    """One token that is no text (`GrammarVocabulary.markers`)."""

    token: int


@dataclass(frozen=True)
class Lexeme:
    """What the lexer takes as one, by its number."""

    number: int


type Node = Characters | Text | Call | Row | Choice | Repeat | Marker | Lexeme


def parts_of(node: Node) -> tuple[Node, ...]:
    """The nodes directly within one; of a call none."""
    match node:
        case Row(parts) | Choice(parts):
            return parts
        case Repeat(part):
            return (part,)
        case _:
            return ()


def calls(node: Node) -> set[str]:
    """The names of the rules that a node uses itself."""
    return {node.name} if isinstance(node, Call) else set().union(*map(calls, parts_of(node)))


def depth(node: Node, rules: Mapping[str, Node], known: dict[str, int]) -> int:
    """How many parts lie within each other at most, in the node and the rules that it uses.

    Arguments:
        known: of each rule; 0 while it is looked at, as it may lead back to itself. Filled here.
    """
    if isinstance(node, Call):
        if node.name not in known:
            known[node.name] = 0
            known[node.name] = depth(rules[node.name], rules, known)
        return 1 + known[node.name]
    return 1 + max([depth(part, rules, known) for part in parts_of(node)], default=0)


def joined_ranges(pairs: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Sorted and disjoint, neighbours merged."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(pairs):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return tuple(merged)


def all_but(ranges: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """All characters that are not in sorted, disjoint ranges."""
    edges = [-1, *(edge for pair in ranges for edge in pair), MAX_CHARACTER + 1]
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return tuple((low + 1, high - 1) for low, high in pairs if low + 1 <= high - 1)
