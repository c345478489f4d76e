"""Compiles a request's arguments to a grammar of the library (`CompiledGrammar`), of whichever kind."""

import json
from dataclasses import dataclass
from typing import Any

import llguidance
import numpy as np

from deepinfer_jax.structured.arguments import StructuredArgs
from deepinfer_jax.structured.ebnf import parse_ebnf
from deepinfer_jax.structured.lark import lark_grammar
from deepinfer_jax.structured.schema import checked_schema, parsed_schema
from deepinfer_jax.structured.vocabulary import GrammarVocabulary

_BYTES = 256 << 10
_BYTES_PER_CHARACTER = 64


class GrammarError(ValueError):
    """What is wrong with one request's grammar, or what it did not allow; it ends that request."""


@dataclass(frozen=True)
class CompiledGrammar:
    """Read-only; every request has a copy of the matcher.

    Attributes:
        vocabulary: for which it was compiled.
        matcher: of the library, before the first token.
        num_bytes: an estimate of the memory that it holds, which the library does not report; what use adds counts at
            a flat rate.
    """

    vocabulary: GrammarVocabulary
    matcher: Any
    num_bytes: int


def compile_grammar(args: StructuredArgs, vocabulary: GrammarVocabulary) -> CompiledGrammar:
    """Takes about a millisecond, for large grammars up to seconds; other threads run meanwhile.

    Raises GrammarError with the library's reason.
    """
    library = llguidance.LLMatcher
    match args.schema_type:
        case "json":
            schema = checked_schema(parsed_schema(args.schema), closed=True)
            grammar = library.grammar_from_json_schema(json.dumps(schema))
        case "regex":
            grammar = library.grammar_from_regex(args.schema)
        case "ebnf":
            markers = {spelling: token for spelling, token in vocabulary.markers.items() if token != vocabulary.eos}
            try:
                text = lark_grammar(parse_ebnf(args.schema), markers)
            except RecursionError:
                raise GrammarError("the EBNF grammar is nested too deeply") from None
            grammar = library.grammar_from_lark(text)
    limits = llguidance.LLParserLimits(verbose_errors=False)  # otherwise errors hold the whole grammar and its state
    matcher = library(vocabulary.tokenizer, grammar, log_level=0, limits=limits)
    if not matcher.is_error():  # the first mask may take seconds, and those of copies then do not
        mask = np.empty(vocabulary.num_words, np.uint32)
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    if error := library_error(matcher):
        raise GrammarError(f"the {args.schema_type} grammar cannot be used: {error}")
    return CompiledGrammar(vocabulary, matcher, _BYTES + _BYTES_PER_CHARACTER * len(grammar))


def library_error(matcher: Any) -> str:
    """Why a matcher of the library is dead, in one line, "" if it is not."""
    error = matcher.get_error() if matcher.is_error() else ""
    error = " ".join(str(error).removesuffix("<non-verbose/>").split())
    return "no token of the vocabulary goes on with this text" if error == "NoExtensionBias" else error
