"""The matcher: one token at a time and with drafts, triggers, ends, copies, and the masks' bits."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.structured import GrammarError, Matcher, compile_grammar, grammar_vocabulary, structured_args
from tests.support.walks import EOS, MARKER, SIZE, allowed, bits, matcher, spelt, tokenizer, vocabulary, walk

pytestmark = pytest.mark.pure

THINK_END = 5
SCHEMA = {"type": "array", "items": {"enum": ["ab", "abc", 12, 123, None]}}
GRAMMARS: list[tuple[str, Any]] = [
    ("json", SCHEMA),
    ("json", {"type": "object", "additionalProperties": {"type": "string"}}),
    ("regex", "(ab|a)*c"),
    ("ebnf", 'root ::= "(" root? ")" | [a-c]+'),
]


def masks_of(one: Matcher, drafts: list[int], *, rows: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    masks = np.full((rows or len(drafts) + 1, vocabulary().num_words), 0xABCDEF01, np.uint32)
    masked = one.fill_masks(drafts, masks)
    return masks, masked


def one_by_one(one: Matcher, drafts: list[int]) -> list[np.ndarray | None]:
    """Per row, the ids allowed there, up to the first draft that is not; by copies that take one token each."""
    found = [allowed(one)]
    one = one.copy()
    for draft in drafts:
        if found[-1] is not None and draft not in found[-1]:
            break
        one.accept([draft])
        found.append(allowed(one))
    return found


@given(st.sampled_from(GRAMMARS), st.integers(0, 10_000), st.booleans())
@settings(max_examples=150)
def test_drafts_see_what_one_token_at_a_time_sees_and_leave_nothing(grammar, seed: int, thinks: bool) -> None:
    rng = np.random.default_rng(seed)
    others = {"trigger_token_ids": [THINK_END, 40, THINK_END]} if thinks else {}
    used, plain = matcher(*grammar, **others), matcher(*grammar, **others)
    found = walk(matcher(*grammar), rng, length=20)
    text = [] if found is None else [*found, EOS, 77, EOS, 78]
    if thinks:
        text = [*rng.integers(6, 60, 3).tolist(), THINK_END, THINK_END, 40, THINK_END, *text]
    at = 0
    while at < len(text):
        drafts = text[at : at + int(rng.integers(0, 6))]
        if drafts and rng.random() < 0.6:
            drafts[int(rng.integers(len(drafts)))] = int(rng.integers(0, SIZE))
        masks, masked = masks_of(used, drafts)
        for row, ids in enumerate(one_by_one(plain, drafts)):
            assert masked[row] == (ids is not None)
            if ids is not None:
                np.testing.assert_array_equal(np.flatnonzero(bits(masks[row])), ids)
        assert not masked[row + 1 :].any()
        step = text[at : at + int(rng.integers(1, 4))]
        used.accept(step)
        for token in step:
            plain.accept([token])
        at += len(step)


def test_the_bits_are_those_of_the_ids_and_ids_beyond_the_tokenizer_are_never_set() -> None:
    one = matcher("regex", "(.|\\n)*")
    masks, masked = masks_of(one, [])
    assert masked.tolist() == [True] and masks.shape == (1, 17)
    ids = {32 * word + bit for word in range(17) for bit in range(32) if masks[0, word] >> np.uint32(bit) & 1}
    assert ids == set(allowed(one))
    assert max(ids) < 512 and EOS in ids and not {0, 2, 3, MARKER, THINK_END} & ids


def test_the_end_comes_when_the_grammar_may_end_and_after_it_everything() -> None:
    one = matcher("regex", "ab?")
    assert EOS not in allowed(one)
    one.accept(spelt("a"))
    assert EOS in allowed(one)
    one.accept(spelt("b"))
    assert list(allowed(one)) == [EOS]
    _, masked = masks_of(one, [EOS, 300, MARKER], rows=5)
    assert masked.tolist() == [True, False, False, False, False]
    one.accept([EOS, 300, EOS])
    assert allowed(one) is None


def test_before_the_trigger_everything_may_come() -> None:
    """Thinking text first: the grammar starts after `</think>`."""
    one = matcher("json", {"type": "null"}, trigger_token_ids=[THINK_END])
    one.accept([EOS, MARKER, 200])
    assert allowed(one) is None
    _, masked = masks_of(one, [30, THINK_END, spelt("null")[0], 30])
    assert masked.tolist() == [False, False, True, True, False]
    one.accept([THINK_END])
    assert list(allowed(one)) == sorted({spelt(text)[0] for text in ("null", "nul", "nu", "n")})


@pytest.mark.parametrize(
    ("trigger", "text", "after"),
    [
        ([7, 7, 8], [7, 7, 7, 8], 4),
        ([7, 8, 7, 9], [7, 8, 7, 8, 7, 9], 6),
        ([7, 7, 7], [7, 7, 8, 7, 7, 7], 6),
        ([7, 8, 9], [7, 8, 7, 8, 9], 5),
    ],
)
def test_a_trigger_is_found_wherever_it_starts(trigger: list[int], text: list[int], after: int) -> None:
    one = matcher("regex", "a", trigger_token_ids=trigger)
    for number, token in enumerate(text, 1):
        one.accept([token])
        assert (allowed(one) is not None) == (number >= after)


@given(st.lists(st.integers(10, 12), min_size=1, max_size=4), st.lists(st.integers(10, 12), max_size=30))
def test_a_trigger_is_found_as_soon_as_it_is_there(trigger: list[int], text: list[int]) -> None:
    one = matcher("regex", "a*", trigger_token_ids=trigger)
    for number, token in enumerate(text, 1):
        one.accept([token])
        found = any(text[i : i + len(trigger)] == trigger for i in range(number))
        there = any(text[i : i + len(trigger)] == trigger for i in range(number - len(trigger) + 1))
        assert (allowed(one) is not None) == there
        if found and there:
            break


def test_after_the_bound_token_the_trigger_must_come() -> None:
    one = matcher("regex", "a", trigger_token_ids=[20, 21, 22], bound_token_id=21)
    one.accept([30, 20])
    assert allowed(one) is None
    masks, masked = masks_of(one, [21, 22, spelt("a")[0]])  # the bound token belongs to the trigger itself
    assert masked.tolist() == [False, True, True, True]
    assert np.flatnonzero(bits(masks[1])).tolist() == [22]
    one.accept([40, 21])  # here it does not
    assert list(allowed(one)) == [20]
    one.accept([20, 21])
    assert list(allowed(one)) == [22]
    with pytest.raises(GrammarError, match="does not allow token 21 here"):
        one.accept([21])


def test_a_token_that_may_not_come_is_an_error_but_a_draft_is_not() -> None:
    one = matcher("json", SCHEMA)
    bad = spelt("x")
    for _ in range(3):
        masks_of(one, bad)
    one.accept(spelt("["))
    with pytest.raises(GrammarError, match=f"does not allow token {bad[0]} here"):
        one.accept(bad)


def test_drafts_that_propose_a_marker_are_not_allowed() -> None:
    """Field report R11: with drafts the masks are those without."""
    one = matcher("json", {"type": "string"}, trigger_token_ids=[THINK_END])
    one.accept([THINK_END])
    quote = spelt('"')[0]
    masks, masked = masks_of(one, [quote, MARKER, quote])
    assert masked.tolist() == [True, True, False, False]
    assert not bits(masks[1])[MARKER]


def test_copies_go_their_own_way() -> None:
    one = matcher("regex", "(ab|cd)e")
    other = one.copy()
    one.accept(spelt("a"))
    other.accept(spelt("c"))
    third = other.copy()
    third.accept(spelt("d"))
    assert list(allowed(one)) == [spelt("b")[0]]
    assert list(allowed(other)) == [spelt("d")[0]]
    assert list(allowed(third)) == [spelt("e")[0]]


def test_a_grammar_that_no_token_can_spell_is_an_error() -> None:
    few = grammar_vocabulary(tokenizer(120), 120, EOS)  # ASCII only
    with pytest.raises(GrammarError, match="the regex grammar cannot be used: no token of the vocabulary"):
        compile_grammar(structured_args({"schema_type": "regex", "schema": "é|か"}), few)
    args = structured_args({"schema_type": "regex", "schema": "a(é|か)"})
    one = Matcher(compile_grammar(args, few), args)
    one.accept(few.tokenizer.tokenize_str("a"))
    with pytest.raises(GrammarError, match="no token of the vocabulary"):
        one.fill_masks([], np.zeros((1, few.num_words), np.uint32))
