"""Stop texts over a byte-level tokenizer: characters and stops cut anywhere."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax.engine.requests.outputs import RequestOutput, answer_text
from deepinfer_jax.engine.requests.stop_texts import StopTexts

pytestmark = pytest.mark.pure


def decode(ids: list[int]) -> str:
    """One id per byte; as a byte-level tokenizer, U+FFFD for what is no text. 256 + b stands for two bytes b."""
    data = b"".join(bytes([i]) if i < 256 else bytes([i - 256]) * 2 for i in ids)
    return data.decode(errors="replace")


def stops_at(stop: StopTexts, ids: list[int]) -> int | None:
    return next((n for n in range(1, len(ids) + 1) if stop(ids[:n]) is not None), None)


texts = st.text(alphabet="ab é☃😀", max_size=12)


@given(
    text=texts,
    stops=st.lists(st.text(alphabet="ab é☃😀", min_size=1, max_size=4), min_size=1, max_size=3),
    min_tokens=st.sampled_from([0, 0, 3, 9]),
)
def test_a_text_stops_at_the_token_that_completes_a_stop(text: str, stops: list[str], min_tokens: int) -> None:
    data = text.encode()
    rule = StopTexts(decode, tuple(stops), min_tokens)
    # A byte completes a stop if the bytes up to it end with the stop's.
    ends = [n for n in range(min_tokens + 1, len(data) + 1) if any(data[:n].endswith(s.encode()) for s in stops)]
    assert stops_at(rule, list(data)) == (ends[0] if ends else None)
    if ends:
        stop = rule(list(data[: ends[0]]))
        assert stop is not None
        outputs = [RequestOutput("r", 1, byte) for byte in data[: ends[0]]]
        outputs[-1].finish_reason, outputs[-1].stop_reason = "stop", stop
        assert answer_text(outputs, decode) == data[: ends[0]].removesuffix(stop.encode()).decode()


def test_of_several_that_one_token_completes_the_first_counts() -> None:
    assert StopTexts(decode, ("b", "abb"), 0)([ord("a"), 256 + ord("b")]) == "abb"
    assert StopTexts(decode, ("bb", "b"), 0)([ord("a"), 256 + ord("b")]) == "bb"


def test_bytes_that_are_no_text_neither_stop_nor_hide_a_stop() -> None:
    rule = StopTexts(decode, ("end",), 0)
    assert stops_at(rule, [0xFF, 0xC3, *b"end"]) == 5
    assert stops_at(rule, [*b"en", 0xFF, *b"d"]) is None
