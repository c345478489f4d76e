"""Follows one request through its compiled grammar: masks of the allowed tokens after text and drafts (DB §8.4-8.5)."""

from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer_jax.structured.arguments import StructuredArgs
from deepinfer_jax.structured.grammar import CompiledGrammar, GrammarError, library_error
from deepinfer_jax.structured.trigger import Progress, Trigger


class Matcher:
    """What one text of a grammar has come to; a function of the tokens that were accepted.

    Before the trigger everything may come, after the bound token only the trigger. After the end-of-sequence token, for
    requests that go on after it, everything may come again.

    Arguments:
        grammar: compiled from the same `args`.
        args: of the request.
    """

    def __init__(self, grammar: CompiledGrammar, args: StructuredArgs) -> None:
        self._vocabulary = grammar.vocabulary
        self._grammar: Any = grammar.matcher.deep_copy()
        self._trigger = Trigger(args.trigger, args.bound)
        self._progress = Progress()
        self._ended = False
        self._consumed = 0  # by the grammar

    def copy(self) -> "Matcher":
        """An independent one in the same state; about a microsecond."""
        other = object.__new__(Matcher)
        other.__dict__.update(self.__dict__, _grammar=self._grammar.deep_copy())
        return other

    def accept(self, tokens: list[int]) -> None:
        """Goes on by these tokens.

        Raises GrammarError for one that may not come; the matcher is of no use then.
        """
        for token in tokens:
            if not self._advanced(token):
                raise GrammarError(self._error() or f"the grammar does not allow token {token} here")

    def fill_masks(self, drafts: list[int], masks: npt.NDArray[np.uint32]) -> npt.NDArray[np.bool_]:
        """Writes which tokens may come next, and which after each of the drafts; its state stays what it is.

        Arguments:
            drafts: the tokens that may be next, in their order.
            masks: uint32 [rows, words], rows > len(drafts), contiguous; bit i & 31 of word i >> 5 belongs to id i.

        Returns bool [rows]: for which rows there is a mask, and was written. There is none where everything may come,
        nor after a draft that may not: no text gets there.

        Raises GrammarError if no token may come, or the grammar is too complex to say.
        """
        before = self._progress, self._ended, self._consumed
        masked = np.zeros(len(masks), np.bool_)
        for row, draft in enumerate([*drafts, None]):
            masked[row] = self._fill(masks[row])
            if draft is None or not self._advanced(draft):
                break
        back = self._consumed - before[2]
        if back and not self._grammar.rollback(back):
            raise GrammarError(f"the grammar could not be rolled back: {self._error()}")
        self._progress, self._ended, self._consumed = before
        return masked

    def _fill(self, row: npt.NDArray[np.uint32]) -> bool:
        """Writes the mask of the next token, unless everything may come; returns whether."""
        if (forced := self._progress.forced(self._trigger)) is not None:
            row[:] = 0
            row[forced >> 5] = 1 << (forced & 31)
            return True
        if self._ended or self._progress.pending(self._trigger):
            return False
        self._grammar.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if error := self._error():
            raise GrammarError(error)
        return True

    def _allows(self, token: int) -> bool:
        """Whether a token may come next. (A grammar of the library that was given one that may not is dead.)"""
        if (forced := self._progress.forced(self._trigger)) is not None:
            return token == forced
        if self._ended or self._progress.pending(self._trigger):
            return True
        if token == self._vocabulary.eos:
            return bool(self._grammar.is_accepting())
        return bool(self._grammar.validate_tokens([token]) == 1)

    def _advanced(self, token: int) -> bool:
        """Goes on by a token; returns whether it may come."""
        if not self._allows(token):
            return False
        if self._progress.pending(self._trigger):
            self._progress = self._progress.after(token, self._trigger)
        elif self._ended:
            pass
        elif token == self._vocabulary.eos:
            self._ended = True
        else:
            self._consumed += 1
            return bool(self._grammar.consume_token(token))
        return True

    def _error(self) -> str:
        """Why the grammar is of no use any more, "" if it is."""
        return library_error(self._grammar)
