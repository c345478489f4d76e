"""EBNF to Lark: finds lexemes that the greedy lexer would end too late, so that they must be cut further.

The lexer is greedy and never goes back: while some lexeme that may stand here goes on with the next byte, none ends.
`[a-z]+ "x"` as two lexemes could never end: the first takes every x. Lexemes of one character each are always right,
and slow; so each part is first taken whole, and the parts that go on with a byte which could also open what follows
another one are taken apart, until no such pair is left.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from deepinfer_jax.structured.nodes import Call, Characters, Choice, Marker, Node, Repeat, Row, Text

_EXACT_POSITIONS = 16
"""A part is repeated as often as it says while that makes no more positions; beyond, as if without end."""
_MAX_POSITIONS = 1000
_MARKER = 1 << 256
"""The first byte of a marker: none that a text has."""


@dataclass(frozen=True)
class Automaton:
    """The positions of characters in a regular part (Glushkov). It may know more texts than the part has.

    Attributes:
        nullable: whether it has the empty text.
        bytes: of each position, bit b is set if its character may begin with byte b (in UTF-8).
        first, last: positions that may open and end a text.
        follow: of each position, those that may come next.
    """

    nullable: bool
    bytes: tuple[int, ...]
    first: frozenset[int]
    last: frozenset[int]
    follow: tuple[frozenset[int], ...]

    def first_bytes(self) -> int:
        return self._bytes(self.first)

    def next_bytes(self, position: int) -> int:
        """The bytes that may come after a character at this position."""
        return self._bytes(self.follow[position])

    def _bytes(self, positions: Iterable[int]) -> int:
        mask = 0
        for position in positions:
            mask |= self.bytes[position]
        return mask


def automaton(node: Node, rules: Mapping[str, Node]) -> Automaton | None:
    """Of a regular part; None if it is too large to be looked at.

    Arguments:
        rules: those that the part uses; none of them leads back to itself.
    """
    builder = _Builder(rules)
    try:
        nullable, first, last = builder.add(node)
    except OverflowError:
        return None
    return Automaton(nullable, tuple(builder.bytes), first, last, tuple(map(frozenset, builder.follow)))


def same_texts(left: Automaton, right: Automaton) -> set[tuple[int, int]]:
    """All pairs of positions at which both may be after one and the same text."""
    # Sets of right positions are bits of one integer: pairs one by one would take minutes where hundreds of parts are
    # optional.
    alike = [_bits(i for i, own in enumerate(right.bytes) if own & mask) for mask in left.bytes]
    follow = [_bits(positions) for positions in right.follow]
    found = [0] * len(left.bytes)
    new = [0] * len(left.bytes)
    first = _bits(right.first)
    for position in left.first:
        new[position] = first & alike[position]
    open_positions = set(left.first)
    while open_positions:
        position = open_positions.pop()
        following = 0
        for other in _positions(new[position]):
            following |= follow[other]
        found[position] |= new[position]
        new[position] = 0
        for after in left.follow[position]:
            if more := following & alike[after] & ~found[after]:
                new[after] |= more
                open_positions.add(after)
    return {(position, other) for position, others in enumerate(found) for other in _positions(others)}


@dataclass(frozen=True)
class Context:
    """Where lexemes stand in a grammar, by their numbers.

    Attributes:
        opening: those that may come first.
        following: of each lexeme, those that may come next.
    """

    opening: frozenset[int]
    following: tuple[frozenset[int], ...]


def too_greedy(automata: list[Automaton], context: Context) -> set[int]:
    """The lexemes that may go on with a byte where another one, which may stand there too, ends and that byte opens
    what follows it. Empty: the greedy lexer allows what the grammar allows."""
    after = [0] * len(automata)
    for number, following in enumerate(context.following):
        for other in following:
            after[number] |= automata[other].first_bytes()
    greedy: set[int] = set()
    seen: set[tuple[int, int]] = set()
    open_pairs = [pair for together in (context.opening, *context.following) for pair in product(together, together)]
    while open_pairs:
        pair = open_pairs.pop()
        if pair in seen:
            continue
        seen.add(pair)
        ends, goes_on = automata[pair[0]], automata[pair[1]]
        both_end = False
        for left, right in same_texts(ends, goes_on):
            if left in ends.last:
                both_end |= right in goes_on.last
                if goes_on.next_bytes(right) & after[pair[0]]:
                    greedy.add(pair[1])
        if both_end:  # what follows either may stand here
            open_pairs += product(context.following[pair[0]], context.following[pair[1]])
    return greedy


def lead_bytes(ranges: Iterable[tuple[int, int]]) -> int:
    """Bit b is set if some character of these ranges begins with byte b in UTF-8."""
    mask = 0
    for low, high in ranges:
        for start, end, shift, lead in (
            (0x0, 0x7F, 0, 0x00),
            (0x80, 0x7FF, 6, 0xC0),
            (0x800, 0xFFFF, 12, 0xE0),
            (0x10000, 0x10FFFF, 18, 0xF0),
        ):
            if low <= end and high >= start:
                bottom, top = lead | (max(low, start) >> shift), lead | (min(high, end) >> shift)
                mask |= (1 << (top + 1)) - (1 << bottom)
    return mask


def _bits(positions: Iterable[int]) -> int:
    return sum(1 << position for position in positions)


def _positions(bits: int) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


class _Builder:
    def __init__(self, rules: Mapping[str, Node]) -> None:
        self.rules = rules
        self.bytes: list[int] = []
        self.follow: list[set[int]] = []

    def add(self, node: Node) -> tuple[bool, frozenset[int], frozenset[int]]:
        """Adds the positions of a node: whether it may be empty, its first positions and its last ones."""
        match node:
            case Characters(ranges):
                return self.position(lead_bytes(ranges))
            case Text(value):
                return self.row([Characters(((ord(character), ord(character)),)) for character in value])
            case Marker():
                return self.position(_MARKER)
            case Call(name):
                return self.add(self.rules[name])
            case Row(parts):
                return self.row(parts)
            case Choice(parts):
                each = [self.add(part) for part in parts]
                return (
                    any(nullable for nullable, _, _ in each),
                    frozenset().union(*(first for _, first, _ in each)),
                    frozenset().union(*(last for _, _, last in each)),
                )
            case Repeat(part, least, most):
                return self.repeat(part, least, most)
            case _:
                raise AssertionError(node)

    def position(self, mask: int) -> tuple[bool, frozenset[int], frozenset[int]]:
        if len(self.bytes) == _MAX_POSITIONS:
            raise OverflowError
        self.bytes.append(mask)
        self.follow.append(set())
        here = frozenset([len(self.bytes) - 1])
        return False, here, here

    def row(self, parts: Iterable[Node]) -> tuple[bool, frozenset[int], frozenset[int]]:
        nullable, first, last = True, frozenset[int](), frozenset[int]()
        for part in parts:
            part_nullable, part_first, part_last = self.add(part)
            self.join(last, part_first)
            first = first | part_first if nullable else first
            last = last | part_last if part_nullable else part_last
            nullable &= part_nullable
        return nullable, first, last

    def repeat(self, part: Node, least: int, most: int | None) -> tuple[bool, frozenset[int], frozenset[int]]:
        if most == 0:
            return self.row(())
        before = len(self.bytes)
        nullable, first, last = self.add(part)
        size = len(self.bytes) - before
        if most is None or (most > 1 and size * most > _EXACT_POSITIONS):
            self.join(last, first)
            return nullable or least == 0, first, last
        optional = Repeat(part, 0, 1)
        rest_nullable, rest_first, rest_last = self.row([part] * (least - 1) + [optional] * (most - max(least, 1)))
        self.join(last, rest_first)
        first = first | rest_first if nullable else first
        return nullable or least == 0, first, last | rest_last if rest_nullable else rest_last

    def join(self, last: Iterable[int], first: frozenset[int]) -> None:
        for position in last:
            self.follow[position] |= first
