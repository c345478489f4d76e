"""EBNF grammars: what the grammar library allows is exactly what the rules say, by a recogniser of its own."""

import functools
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.structured.ebnf import parse_ebnf
from deepinfer_jax.structured.nodes import Call, Characters, Choice, Node, Repeat, Row, Text
from tests.support.walks import MARKER, allowed, matcher, spelt, takes, text_of, walk

pytestmark = pytest.mark.pure

CHAIN = "r0" + "".join(f'\nr{i} ::= "a" r{i + 1}?' for i in range(4000))
"""The library follows these calls by recursion: its stack would overflow, and end the process."""

CORPUS = {
    "none": 'root ::= "a"{0} "b" ("(" root ")" root{0,0})?',
    "counted": 'root ::= ([0-9]{1,3})? "."',
    "exactly": 'root ::= "a"{2} [bc]{0,2} "d"{1,}',
    "greedy": 'root ::= [a-c]+ "c" root2?\nroot2 ::= "(" root ")"',
    "prefixes": 'root ::= ("ab" "c" | "abc" "x") | "(" root ")"',
    "greedy apart": 'root ::= [a-c]+ other? "c"\nother ::= "(" root ")"',
    "prefixes apart": 'root ::= "ab" other? "c" | "abc" "x"\nother ::= "(" root ")"',
    "one text in two places": 'root ::= item "c" | "(" root ")"\nitem ::= [a] n "b" | [ad] n "bcd"\nn ::= ("(" n ")")?',
    "runs": 'root ::= "(" ([^()]+ | root)* ")" | "[" ([ab] | root | "c")+ "]"',
    "palindrome": 'root ::= "a" root "a" | "b" root "b" | [ab]?',
    "nested": 'root ::= "(" root ")" root | ""',
    "left recursion": 'root ::= root "+" term | term\nterm ::= [a-c] | "(" root ")"',
    "mutual": 'root ::= "a" other | "b"\nother ::= "c" root | "d"',
    "tail": 'root ::= "(" ws root? ws ")"\nws ::= ([ \\t] ws)?',
    "tail within": "root ::= item | item root\nitem ::= [a-b] [0-1]?",
    "optional of optional": 'root ::= ("a"? "b"?)+ "c"',
    "empty": 'root ::= ""',
    "characters": 'root ::= [^a-c\\n] . [\\x41-\\x43\\u00e9-\\u00eb] "\\U0001F600\\t\\"\\\\]" [\\]\\-a]',
    "near in UTF-8": 'root ::= ("é" root? "è" | "é")',
    "lines": """
# a comment
root ::= ( # within brackets lines do not count
    "a"    # one
    | "b"
) "c"
  | other-rule "d"
other-rule ::=
    "e" |
    "f"
""",
    "joined": 'root ::= item ("," item)*\nitem ::= word | "[" root "]"\nword ::= [a-c]+ [0-2]*',
    "shared lead": 'root ::= "<" [a-b]+ ">" root? "</" [a-b]+ ">" | "<" [a-b]+ "/>"',
}


def reached(node: Node, rules: dict, text: str) -> dict[int, set[int]]:
    """A recogniser by fixpoint: rule and start -> ends, until nothing is new."""
    ends: dict[tuple[str, int], set[int]] = {}

    def go(node: Node, start: int) -> set[int]:
        match node:
            case Characters(ranges):
                inside = start < len(text) and any(low <= ord(text[start]) <= high for low, high in ranges)
                return {start + 1} if inside else set()
            case Text(value):
                return {start + len(value)} if text.startswith(value, start) else set()
            case Call(name):
                return ends.setdefault((name, start), set())
            case Row(parts):
                return functools.reduce(lambda heads, part: set().union(*(go(part, h) for h in heads)), parts, {start})
            case Choice(parts):
                return set().union(*(go(part, start) for part in parts))
            case Repeat(part, least, most):
                found, heads = ({start} if least == 0 else set()), {start}
                for count in range(1, (most if most is not None else least + len(text) + 1) + 1):
                    heads = set().union(*(go(part, head) for head in heads))
                    found |= heads if count >= least else set()
                return found
        raise AssertionError(node)

    while True:
        before = {key: set(value) for key, value in ends.items()}
        ends.setdefault(("root", 0), set())
        for name, start in list(ends):
            ends[name, start] |= go(rules[name], start)
        if ends == before:
            return ends[("root", 0)]


def says(grammar: str, text: str) -> bool:
    rules = parse_ebnf(grammar)
    return len(text) in reached(rules["root"], rules, text)


def changed(text: str, rng: np.random.Generator, alphabet: str) -> str:
    """With a letter more, less or other."""
    at = int(rng.integers(len(text) + 1))
    return text[:at] + str(rng.choice(list(alphabet))) * int(rng.integers(2)) + text[at + int(rng.integers(2)) :]


@pytest.mark.parametrize("name", CORPUS)
def test_what_is_allowed_is_what_the_rules_say(name: str) -> None:
    grammar, rng = CORPUS[name], np.random.default_rng(0)
    alphabet = "abcdefx012()<>/+,.[] \té"
    whole = matcher("ebnf", grammar)
    texts = [walk(whole.copy(), rng, length=30) for _ in range(40)]
    found = {text_of(tokens) for tokens in texts if tokens is not None}
    assert found
    for text in found:
        assert says(grammar, text), text
    near = {changed(text, rng, alphabet) for text in found for _ in range(4)} | {""}
    verdicts = {text: says(grammar, text) for text in near if len(text) < 30}
    for text, verdict in verdicts.items():
        assert takes(whole.copy(), text) == verdict, text


LETTERS = "ab"


def nodes(depth: int) -> st.SearchStrategy[str]:
    leaf = st.sampled_from(['"a"', '"b"', '"ab"', "[ab]", "[a]", "rule", "root", '""'])
    if depth == 0:
        return leaf
    inner = nodes(depth - 1)
    suffix = st.sampled_from(["", "", "?", "*", "+", "{1,2}", "{2}"])
    row = st.lists(inner, min_size=1, max_size=3).map(" ".join)
    group = st.builds(
        lambda alternatives, end: f"({' | '.join(alternatives)}){end}", st.lists(row, max_size=3, min_size=1), suffix
    )
    return st.one_of(leaf, group, row)


@given(nodes(2), nodes(2))
@settings(max_examples=150)
def test_any_grammar_allows_what_its_rules_say(root: str, rule: str) -> None:
    """All texts of up to five letters; whether a grammar that allows none is refused is the library's business."""
    grammar = f'root ::= {root} | "a"\nrule ::= {rule} | "b"'
    whole = matcher("ebnf", grammar)
    for length in range(5):
        for letters in itertools.product(LETTERS, repeat=length):
            text = "".join(letters)
            assert takes(whole.copy(), text) == says(grammar, text), (grammar, text)


def test_the_spelling_of_a_marker_is_its_token() -> None:
    grammar = 'root ::= "<｜DSML｜" [a-c]+ (root | ">")'
    whole = matcher("ebnf", grammar)
    whole.accept(spelt("<"))
    assert allowed(whole) is not None and list(allowed(whole)) == [MARKER]
    whole.accept([MARKER])
    assert MARKER not in allowed(whole)
    assert not takes(matcher("ebnf", grammar), "<｜DSML｜a>")  # letter by letter it is not the marker


def test_hundreds_of_optional_parts_beside_a_recursion_are_cut_in_a_moment() -> None:
    """Pair by pair it would take minutes."""
    optional = " ".join(['"a"?'] * 200)
    whole = matcher("ebnf", f'root ::= ("(" root ")")? {optional}')
    assert takes(whole.copy(), "(aa)a") and not takes(whole.copy(), "(aa")


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ('start ::= "a"', "no rule 'root'; its rules are start"),
        ("root ::= other", "the EBNF rule 'root' uses 'other', which is not there"),
        ('root ::= "a', r"line 1, column 12: the grammar ends within a text"),
        ('root ::= "a\n"', r"line 1, column 12: a text in quotes ends on its line"),
        ("root ::= [b-a]", "the range 'b' to 'a' is empty"),
        ("root ::= []", "no character is in this class"),
        ('root ::= "a"{3,2}', "3 to 2 repetitions are none"),
        ('root ::= "a"{x}', r"expected {n}, {n,} or {n,m}"),
        ('root ::= "a"{20000}', "more than 10000 repetitions"),
        ('root ::= ("a"', r"expected '\)'"),
        ('root ::= "a"\nroot ::= "b"', "'root' is given twice"),
        ('root ::= "\\q"', r"\\q is no escape"),
        ('root ::= "\\ud800"', "needs 4 hexadecimal digits of a character"),
        ('root = "a"', "expected '::='"),
        ('root ::= "a" )', "expected the end of the rule"),
        ("", "its rules are none"),
        pytest.param(f"root ::= {'(' * 9999}", "nested too deeply", id="brackets"),
        pytest.param(f'root ::= {CHAIN}\nr4000 ::= "b"', "nested too deeply", id="chain"),
    ],
)
def test_what_is_no_grammar_is_said_with_its_place(grammar: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_ebnf(grammar)
