"""Refuses text that cannot be encoded faithfully, for every class of tokenizer."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

logger = logging.getLogger(__name__)

_SURROGATE = re.compile("[\ud800-\udfff]")


def _strings(values: Iterable[Any]) -> Iterator[str]:
    """Every string in the arguments of a tokenizer call: a text, a batch, pairs, words."""
    for value in values:
        if isinstance(value, str):
            yield value
        elif isinstance(value, list | tuple):
            yield from _strings(value)


class TextGuard:
    """Mixin before a Hugging Face tokenizer class: checks every text before the class sees it."""

    _guarded: tuple[type, tuple[str, ...], str | None]  # what `guard_text` extended, and its arguments
    _reserved: re.Pattern[str] | None
    _inserted_bos: str | None

    def __reduce__(self) -> tuple[Any, ...]:
        # The class is made at run time, so pickle cannot find it by name (and a worker process has not made it).
        return _new_guarded, self._guarded, self.__dict__

    def _check_text(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        for text in _strings([*args, *kwargs.values()]):
            if match := _SURROGATE.search(text):
                raise ValueError(
                    f"the text holds the lone surrogate U+{ord(match[0]):04X} at position {match.start()}: that is no "
                    "character and has no tokens; decode the text's bytes with errors='replace', or remove it"
                )
            if self._reserved is not None and (match := self._reserved.search(text)):
                raise ValueError(
                    f"the text holds {match[0]!r} at position {match.start()}: this name is reserved, its id would be "
                    "taken for an image position; remove it, and pass images as multi_modal_data"
                )
            if self._inserted_bos and text.startswith(self._inserted_bos) and kwargs.get("add_special_tokens", True):
                logger.warning(
                    "the text starts with %s and the tokenizer inserts another one; encode with "
                    "add_special_tokens=False if one is meant",
                    self._inserted_bos,
                )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._check_text(args, kwargs)
        return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def encode(self, *args: Any, **kwargs: Any) -> Any:
        self._check_text(args, kwargs)
        return super().encode(*args, **kwargs)  # type: ignore[misc]

    def tokenize(self, *args: Any, **kwargs: Any) -> Any:
        self._check_text(args, {"add_special_tokens": False, **kwargs})
        return super().tokenize(*args, **kwargs)  # type: ignore[misc]


def guard_text(tokenizer: Any, *, reserved: Iterable[str] = (), inserted_bos: str | None = None) -> Any:
    """Makes the tokenizer refuse lone surrogates and `reserved` names in text with a ValueError; returns it.

    The class is extended after loading, so that a custom class loads exactly as its author wrote it.

    Args:
        reserved: names that only the engine may turn into ids.
        inserted_bos: the BOS that `encode` writes before every text; a text that brings its own is warned about.
    """
    tokenizer.__class__ = _guarded_class(tokenizer.__class__, tuple(reserved), inserted_bos)
    return tokenizer


def _guarded_class(base: type, reserved: tuple[str, ...], inserted_bos: str | None) -> Any:
    pattern = re.compile("|".join(map(re.escape, reserved))) if reserved else None
    guarded = (base, reserved, inserted_bos)
    attributes = {"_guarded": guarded, "_reserved": pattern, "_inserted_bos": inserted_bos}
    return type(base.__name__, (TextGuard, base), attributes)


def _new_guarded(base: type, reserved: tuple[str, ...], inserted_bos: str | None) -> Any:
    """An empty tokenizer of the guarded class, for pickle to fill."""
    guarded = _guarded_class(base, reserved, inserted_bos)
    return guarded.__new__(guarded)
