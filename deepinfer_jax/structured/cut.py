"""EBNF to Lark: cuts rules into lexemes, for the library's lexer, and rules over them, for its parser."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from deepinfer_jax.structured.lexemes import Context
from deepinfer_jax.structured.nodes import Call, Choice, Lexeme, Marker, Node, Repeat, Row, Text, calls, parts_of


@dataclass(frozen=True)
class Cut:
    """
    Attributes:
        lexemes: regular parts and markers; `Lexeme(i)` stands for the i-th.
        rules: over lexemes; those that `root` reaches.
    """

    lexemes: tuple[Node, ...]
    rules: Mapping[str, Node]


def cut(rules: Mapping[str, Node], regular: set[str], apart: set[Node]) -> Cut:
    """The largest regular parts become lexemes, but the nodes of `apart` are taken apart."""
    cutter = _Cutter(rules, regular, apart)
    cutter.rule("root")
    return Cut(tuple(cutter.numbers), cutter.bodies)


def regular_rules(rules: Mapping[str, Node]) -> set[str]:
    """The rules from which neither a marker is reached nor a rule that leads back to itself."""
    regular: set[str] = set()
    while True:  # from the rules that call none upwards
        more = {name for name, node in rules.items() if name not in regular and _is_regular(node, regular)}
        if not more:
            return regular
        regular |= more


def context(cut: Cut, nullable: set[int]) -> Context:
    """Which lexemes may open the text, and which may come after each.

    Arguments:
        nullable: the lexemes that may be empty.
    """
    following: list[set[int]] = [set() for _ in cut.lexemes]
    # Of each rule: whether it may be empty, the lexemes that may open it and that may end it. They grow until they
    # suffice.
    known: dict[str, tuple[bool, frozenset[int], frozenset[int]]]
    known = dict.fromkeys(cut.rules, (False, frozenset(), frozenset()))

    def visit(node: Node) -> tuple[bool, frozenset[int], frozenset[int]]:
        match node:
            case Lexeme(number):
                return number in nullable, frozenset([number]), frozenset([number])
            case Call(name):
                return known[name]
            case Choice(parts):
                empty, opening, ending = zip(*map(visit, parts), strict=True)
                return any(empty), frozenset().union(*opening), frozenset().union(*ending)
            case Row(parts):
                may, first, last = True, frozenset[int](), frozenset[int]()
                for part in parts:
                    part_may, part_first, part_last = visit(part)
                    follows(last, part_first)
                    first = first | part_first if may else first
                    last = last | part_last if part_may else part_last
                    may &= part_may
                return may, first, last
            case Repeat(part, least, most):
                may, first, last = visit(part)
                if most != 1:
                    follows(last, first)
                return may or least == 0, first, last
            case _:
                raise AssertionError(node)

    def follows(last: frozenset[int], first: frozenset[int]) -> None:
        for number in last:
            following[number] |= first

    before = None
    while before != (before := (dict(known), sum(map(len, following)))):
        for name, body in cut.rules.items():
            known[name] = visit(body)
    return Context(known["root"][1], tuple(map(frozenset, following)))


def _is_regular(node: Node, regular: set[str]) -> bool:
    return calls(node) <= regular and not _has_marker(node)


def _has_marker(node: Node) -> bool:
    return isinstance(node, Marker) or any(map(_has_marker, parts_of(node)))


class _Cutter:
    def __init__(self, rules: Mapping[str, Node], regular: set[str], apart: set[Node]) -> None:
        self.rules = rules
        self.regular = regular
        self.apart = apart
        self.numbers: dict[Node, int] = {}
        self.bodies: dict[str, Node] = {}

    def rule(self, name: str) -> Node:
        if name not in self.bodies:
            self.bodies[name] = Row(())  # so that it may call itself
            # A regular rule is here only to be taken apart.
            cut = self.within if name in self.regular else self.cut
            self.bodies[name] = cut(self.rules[name])
        return Call(name)

    def cut(self, node: Node) -> Node:
        if isinstance(node, Marker) or (self.is_regular(node) and node not in self.apart):
            return Lexeme(self.numbers.setdefault(node, len(self.numbers)))
        return self.within(node)

    def within(self, node: Node) -> Node:
        match node:
            case Call(name):
                return self.rule(name)
            case Text(value) if len(value) > 1:
                return Row(tuple(self.cut(Text(character)) for character in value))
            case Row(parts):
                return Row(tuple(map(self.cut, self.joined(node, parts))))
            case Choice(parts):
                return Choice(tuple(map(self.cut, parts)))
            case Repeat(Choice(parts), 0 | 1 as least, None) if 0 < sum(map(self.is_regular, parts)) < len(parts):
                return self.within(self.runs(parts, least))
            case Repeat(part, least, most):
                return Repeat(self.cut(part), least, most)
            case _:
                return self.cut(node)

    def is_regular(self, node: Node) -> bool:
        return _is_regular(node, self.regular)

    def runs(self, parts: tuple[Node, ...], least: int) -> Node:
        """`(a | b)*` as `a* (b a*)*`, where a is what is regular: then a run of it may be one lexeme."""
        own = Choice(tuple(part for part in parts if self.is_regular(part)))
        other = Choice(tuple(part for part in parts if not self.is_regular(part)))
        run = Repeat(own, 0, None)
        rest = Row((other, run))
        if least == 0:
            return Row((run, Repeat(rest, 0, None)))
        return Choice((Row((Repeat(own, 1, None), Repeat(rest, 0, None))), Repeat(rest, 1, None)))

    def joined(self, row: Node, parts: tuple[Node, ...]) -> Iterator[Node]:
        """The parts of a row, regular neighbours as one, unless they were to be taken apart."""
        if row in self.apart:
            yield from parts
            return
        run: list[Node] = []
        for part in (*parts, None):
            if part is not None and self.is_regular(part):
                run.append(part)
                continue
            together = Row(tuple(run))
            yield from run if len(run) == 1 or together in self.apart else [together] * bool(run)
            run = []
            if part is not None:
                yield part
