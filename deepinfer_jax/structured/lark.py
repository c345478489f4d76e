"""EBNF to Lark, the whole way: rewrites and cuts rules, and prints them in the dialect of the grammar library."""

from collections.abc import Iterator, Mapping

from deepinfer_jax.structured.cut import Cut, context, cut, regular_rules
from deepinfer_jax.structured.lexemes import automaton, too_greedy
from deepinfer_jax.structured.nodes import Call, Characters, Choice, Lexeme, Marker, Node, Repeat, Row, Text
from deepinfer_jax.structured.rewriting import with_markers, without_tail_calls


def lark_grammar(rules: Mapping[str, Node], markers: Mapping[str, int]) -> str:
    """A grammar whose rule `start` is `root`.

    Arguments:
        rules: of `parse_ebnf`.
        markers: spellings that stand for one token each, wherever a text of the grammar holds them.
    """
    rules = without_tail_calls({name: with_markers(node, markers) for name, node in rules.items()})
    regular = regular_rules(rules)
    if "root" in regular:  # one lexeme, followed by nothing
        return _printed(Cut((Call("root"),), {"root": Lexeme(0)}), rules, regular)
    apart: set[Node] = set()
    while True:
        parts = cut(rules, regular, apart)
        greedy = _greedy(parts, rules)
        if not greedy:
            return _printed(parts, rules, regular)
        apart |= greedy


def _greedy(parts: Cut, rules: Mapping[str, Node]) -> set[Node]:
    """The lexemes that must be taken apart."""
    automata = {node: automaton(node, rules) for node in parts.lexemes}
    known = [found for found in automata.values() if found is not None]
    if len(known) < len(automata):
        return {node for node, found in automata.items() if found is None}
    nullable = {number for number, found in enumerate(known) if found.nullable}
    return {parts.lexemes[number] for number in too_greedy(known, context(parts, nullable))}


def _printed(parts: Cut, rules: Mapping[str, Node], regular: set[str]) -> str:
    # Names in capitals are terminals.
    names = {name: f"rule{number}" for number, name in enumerate(parts.rules)}
    terminals = {name: f"TERMINAL{number}" for number, name in enumerate(sorted(regular))}
    lexemes = [
        f"<[{node.token}]>" if isinstance(node, Marker) else f"LEXEME{number}"
        for number, node in enumerate(parts.lexemes)
    ]
    lines = [f"start: {names['root']}"]
    lines += [f"{names[name]}: {_text(body, names, lexemes)}" for name, body in parts.rules.items()]
    lines += [
        f"{lexeme}: {_text(node, terminals, lexemes)}"
        for lexeme, node in zip(lexemes, parts.lexemes, strict=True)
        if not isinstance(node, Marker)
    ]
    lines += [f"{terminal}: {_text(rules[name], terminals, lexemes)}" for name, terminal in terminals.items()]
    return "\n".join(lines) + "\n"


def _text(node: Node, names: Mapping[str, str], lexemes: list[str]) -> str:
    match node:
        case Lexeme(number):
            return lexemes[number]
        case Call(name):
            return names[name]
        case Characters(ranges):
            return f"/[{''.join(f'\\x{{{low:x}}}-\\x{{{high:x}}}' for low, high in _without_surrogates(ranges))}]/"
        case Text("") | Row(()) | Repeat(_, _, 0):  # the library refuses {0,0}
            return '""'
        case Text(value):
            return "/" + "".join(f"\\x{{{ord(character):x}}}" for character in value) + "/"
        case Row(parts):
            return f"({' '.join(_text(part, names, lexemes) for part in parts)})"
        case Choice(parts):
            return f"({' | '.join(_text(part, names, lexemes) for part in parts)})"
        case Repeat(part, least, most):
            return f"({_text(part, names, lexemes)}){{{least},{'' if most is None else most}}}"
        case Marker():
            raise AssertionError("markers are lexemes")


def _without_surrogates(ranges: tuple[tuple[int, int], ...]) -> Iterator[tuple[int, int]]:
    """UTF-8 has no codes for the halves of UTF-16's pairs."""
    for low, high in ranges:
        if low < 0xD800:
            yield low, min(high, 0xD7FF)
        if high > 0xDFFF:
            yield max(low, 0xE000), high
