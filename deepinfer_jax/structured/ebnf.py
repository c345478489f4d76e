"""Parses EBNF grammars as people write them for language models (GBNF: llama.cpp, xgrammar): text -> rules.

    root  ::= "[" item ("," item){0,3} "]"    # a comment
    item  ::= [a-z]+ | "\\u00e9" | .

A rule ends where a line ends, unless a bracket is open or the next line goes on with `|`. `[^…]` and `.` are single
characters.
"""

from collections.abc import Mapping

from deepinfer_jax.structured.nodes import (
    MAX_CHARACTER,
    Call,
    Characters,
    Choice,
    Node,
    Repeat,
    Row,
    Text,
    all_but,
    calls,
    depth,
    joined_ranges,
)

_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a", "b": "\b", "0": "\0"}
_HEX = {"x": 2, "u": 4, "U": 8}
_MAX_REPEATS = 10_000
_MAX_DEPTH = 300
"""Parts within each other, through all rules, which the grammar library follows by recursion: some thousands overflow
its stack, and end the process."""


def parse_ebnf(text: str) -> Mapping[str, Node]:
    """The rules by name.

    Raises ValueError, with line and column, for text that is no grammar; for a rule that is called and not there, given
    twice, or given and never reached with a name like one that is not there; and if there is no rule `root`.
    """
    try:
        rules = _Parser(text).rules()
        _check(rules)
    except RecursionError:
        raise ValueError("the EBNF grammar is nested too deeply") from None
    return rules


def _check(rules: Mapping[str, Node]) -> None:
    if "root" not in rules:
        raise ValueError(f"the EBNF grammar has no rule 'root'; its rules are {', '.join(rules) or 'none'}")
    for name, node in rules.items():
        if missing := sorted({call for call in calls(node) if call not in rules}):
            raise ValueError(f"the EBNF rule {name!r} uses {', '.join(map(repr, missing))}, which is not there")
    if depth(Call("root"), rules, {}) > _MAX_DEPTH:
        raise RecursionError


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.depth = 0

    def rules(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        self.space(lines=True)
        while self.at < len(self.text):
            name = self.name()
            self.space(lines=True)
            if not self.take("::="):
                raise self.error("expected '::='")
            if name in rules:
                raise self.error(f"the rule {name!r} is given twice")
            self.space(lines=True)
            rules[name] = self.choice()
            if self.at < len(self.text) and self.text[self.at] not in "\r\n":
                raise self.error("expected the end of the rule")
            self.space(lines=True)
        return rules

    def choice(self) -> Node:
        parts = [self.row()]
        while self.bar():
            self.space(lines=True)
            parts.append(self.row())
        return parts[0] if len(parts) == 1 else Choice(tuple(parts))

    def bar(self) -> bool:
        """Takes a `|`, also one that opens the next line."""
        before = self.at
        self.space(lines=True)
        if self.take("|"):
            return True
        self.at = before
        return False

    def row(self) -> Node:
        parts: list[Node] = []
        while True:
            self.space(lines=self.depth > 0)
            part = self.part()
            if part is None:
                return parts[0] if len(parts) == 1 else Row(tuple(parts))
            parts.append(self.repeated(part))

    def part(self) -> Node | None:
        if self.take('"'):
            return Text(self.quoted())
        if self.take("["):
            return self.character_class()
        if self.take("."):
            return Characters(((0, MAX_CHARACTER),))
        if self.take("("):
            self.depth += 1
            self.space(lines=True)
            inner = self.choice()
            self.space(lines=True)
            self.depth -= 1
            if not self.take(")"):
                raise self.error("expected ')'")
            return inner
        if self.at < len(self.text) and _is_name(self.text[self.at]) and not self.opens_a_rule():
            return Call(self.name())
        return None

    def repeated(self, part: Node) -> Node:
        while True:
            self.space(lines=False)
            if self.take("*"):
                part = Repeat(part, 0, None)
            elif self.take("+"):
                part = Repeat(part, 1, None)
            elif self.take("?"):
                part = Repeat(part, 0, 1)
            elif self.take("{"):
                part = self.counted(part)
            else:
                return part

    def counted(self, part: Node) -> Node:
        start = self.at
        end = self.text.find("}", start)
        bounds = [bound.strip() for bound in self.text[start : max(end, start)].split(",")]
        least, most = bounds[0] or "0", bounds[-1]
        if end < 0 or len(bounds) > 2 or not all(bound.isdecimal() for bound in (least, most or "0")) or bounds == [""]:
            raise self.error("expected {n}, {n,} or {n,m}")
        repeat = Repeat(part, int(least), int(most) if most else None)
        if repeat.most is not None and repeat.least > repeat.most:
            raise self.error(f"{repeat.least} to {repeat.most} repetitions are none")
        if max(repeat.least, repeat.most or 0) > _MAX_REPEATS:
            raise self.error(f"more than {_MAX_REPEATS} repetitions")
        self.at = end + 1
        return repeat

    def quoted(self) -> str:
        value = ""
        while not self.take('"'):
            if self.at < len(self.text) and self.text[self.at] in "\r\n":
                raise self.error("a text in quotes ends on its line; write \\n for a line end")
            value += self.character()
        return value

    def character_class(self) -> Node:
        inverted = self.take("^")
        pairs: list[tuple[int, int]] = []
        while not self.take("]"):
            low = high = ord(self.character())
            if self.text[self.at : self.at + 1] == "-" and self.text[self.at + 1 : self.at + 2] not in ("]", ""):
                self.at += 1
                high = ord(self.character())
                if high < low:
                    raise self.error(f"the range {chr(low)!r} to {chr(high)!r} is empty")
            pairs.append((low, high))
        ranges = joined_ranges(pairs)
        if inverted:
            ranges = all_but(ranges)
        if not ranges:
            raise self.error("no character is in this class")
        return Characters(ranges)

    def character(self) -> str:
        """One character, as it stands or escaped."""
        if self.at >= len(self.text):
            raise self.error("the grammar ends within a text or a class")
        character = self.text[self.at]
        self.at += 1
        if character != "\\":
            return character
        escape = self.text[self.at : self.at + 1]
        self.at += 1
        if escape in _HEX:
            digits = self.text[self.at : self.at + _HEX[escape]]
            self.at += _HEX[escape]
            try:
                if len(digits) != _HEX[escape]:
                    raise ValueError
                character = chr(int(digits, 16))
                character.encode()  # half a pair of UTF-16 is no character
                return character
            except (ValueError, OverflowError):
                raise self.error(f"\\{escape} needs {_HEX[escape]} hexadecimal digits of a character") from None
        if escape and (escape in _ESCAPES or not escape.isalnum()):
            return _ESCAPES.get(escape, escape)
        raise self.error(f"\\{escape} is no escape")

    def opens_a_rule(self) -> bool:
        before = self.at
        self.name()
        self.space(lines=True)
        opens = self.text.startswith("::=", self.at)
        self.at = before
        return opens

    def name(self) -> str:
        start = self.at
        while self.at < len(self.text) and _is_name(self.text[self.at]):
            self.at += 1
        if self.at == start:
            raise self.error("expected the name of a rule")
        return self.text[start : self.at]

    def take(self, token: str) -> bool:
        if self.text.startswith(token, self.at):
            self.at += len(token)
            return True
        return False

    def space(self, *, lines: bool) -> None:
        """Skips blanks and comments, and line ends if they mean nothing here."""
        while self.at < len(self.text):
            if self.text[self.at] == "#":
                while self.at < len(self.text) and self.text[self.at] not in "\r\n":
                    self.at += 1
            elif self.text[self.at] in (" \t\r\n" if lines else " \t"):
                self.at += 1
            else:
                return

    def error(self, message: str) -> ValueError:
        before = self.text[: self.at]
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        return ValueError(f"the EBNF grammar, line {line}, column {column}: {message}")


def _is_name(character: str) -> bool:
    return character.isalnum() or character in "-_"
