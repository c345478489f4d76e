"""Regular expressions: whole texts, as Python's `fullmatch` has them."""

import re

import numpy as np
import pytest

from deepinfer_jax.structured import GrammarError
from tests.support.walks import matcher, takes, text_of, walk

pytestmark = pytest.mark.pure

CORPUS = [
    "abc|ab|a",
    "a*b+c?",
    "(ab|cd){2,3}",
    "[a-f]+[0-9]{1,3}",
    "[^abc\\n]{2}",
    "(?i)yes|no",
    "a.c",
    "(?s)a.c",
    "^[+-]?[0-9]+(\\.[0-9]*)?$",
    "(?:x(?P<name>y)?)*z",
    "[a-z]+x[a-z]*",
    "[0-9]{4}-[0-9]{2}-[0-9]{2}",
    "[a-z.]{1,8}@[a-z]{1,4}\\.(com|org)",
    "\\x41\\u00e9[\\]\\-\\\\]",
    "é|è|😀+",
    "",
    "a/b|[/]",
]


@pytest.mark.parametrize("pattern", CORPUS)
def test_what_is_allowed_is_what_python_matches(pattern: str) -> None:
    rng = np.random.default_rng(1)
    whole = matcher("regex", pattern)
    walks = [walk(whole.copy(), rng, length=30) for _ in range(40)]
    found = {text_of(tokens) for tokens in walks if tokens is not None}
    assert found
    for text in found:
        assert re.fullmatch(pattern, text), text
    alphabet = list("abcxyz019.-/+A\n")
    for text in list(found):
        for _ in range(4):
            at = int(rng.integers(len(text) + 1))
            near = text[:at] + str(rng.choice(alphabet)) * int(rng.integers(2)) + text[at + int(rng.integers(2)) :]
            assert takes(whole.copy(), near) == (re.fullmatch(pattern, near) is not None), near


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(?=a)a", "look-around"),
        ("\\bfoo", "lookarounds not supported"),
        ("(a)\\1", "backreferences are not supported"),
        ("(", "unclosed group"),
    ],
)
def test_what_the_library_cannot_do_is_said(pattern: str, reason: str) -> None:
    with pytest.raises(GrammarError, match=reason) as error:
        matcher("regex", pattern)
    assert "\n" not in str(error.value)
