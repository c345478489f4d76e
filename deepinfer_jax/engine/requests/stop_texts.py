"""Texts that stop a request once its output holds them."""

from collections.abc import Callable
from dataclasses import dataclass

_NO_TEXT = "\N{REPLACEMENT CHARACTER}"
"""What a decoder makes of bytes that are no text, as those of a character of which a token is still missing."""


@dataclass(frozen=True)
class StopTexts:
    """A rule on the ids of an output; it keeps nothing between two questions.

    Attributes:
        decode: ids to text.
        texts: which stop; none is empty or holds U+FFFD.
        min_tokens: none stops before there are more tokens.
    """

    decode: Callable[[list[int]], str]
    texts: tuple[str, ...]
    min_tokens: int

    def __call__(self, output: list[int]) -> str | None:
        """The text that the last token completed, the one that begins first, of several the longest; None if none."""
        if len(output) <= self.min_tokens:
            return None
        # A token is at least a byte, so this holds all of a text that the last one completes; the four tokens more
        # hold the rest of the character in front of it, and whatever a decoder does at the start.
        longest = max(len(text.encode()) for text in self.texts)
        end = output[-(longest + 4) :]
        text, before = self.decode(end), self.decode(end[:-1])
        begins = {stop: begin_of(stop, text, before) for stop in self.texts}
        found = [stop for stop, begin in begins.items() if begin >= 0]
        return min(found, key=lambda stop: (begins[stop], -len(stop))) if found else None


def begin_of(stop: str, text: str, before: str) -> int:
    """Where the first `stop` begins that the last token of a text completed, -1 if none.

    before: the text without that token.
    """
    settled = len(before.rstrip(_NO_TEXT))  # the token may have completed a character too
    return text.find(stop, max(settled - len(stop) + 1, 0))
