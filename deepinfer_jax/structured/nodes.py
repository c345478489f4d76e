"""What the rules of a grammar are made of."""

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


def calls(node: Node) -> set[str]:
    """The names of the rules that a node uses itself."""
    match node:
        case Call(name):
            return {name}
        case Row(parts) | Choice(parts):
            return set().union(*map(calls, parts))
        case Repeat(part):
            return calls(part)
        case _:
            return set()


def depth(node: Node, rules: Mapping[str, Node], known: dict[str, int]) -> int:
    """How many parts lie within each other at most, in the node and the rules that it uses.

    Arguments:
        known: of each rule; 0 while it is looked at, as it may lead back to itself. Filled here.
    """
    match node:
        case Call(name):
            if name not in known:
                known[name] = 0
                known[name] = depth(rules[name], rules, known)
            return 1 + known[name]
        case Row(parts) | Choice(parts):
            return 1 + max([depth(part, rules, known) for part in parts], default=0)
        case Repeat(part):
            return 1 + depth(part, rules, known)
        case _:
            return 1


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
