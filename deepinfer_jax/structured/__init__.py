"""Structured outputs: masks of the tokens that a JSON Schema, regular expression or EBNF grammar allows next (DB §8).

Plain Python over the llguidance library. Never jax: masks are bit arrays here, and the engine brings them to the
device.

- arguments: what a request may ask for. schema: checks of JSON Schemas. vocabulary: the tokenizer for the library.
- grammar: compiles one request's grammar; pool: on threads, with a cache.
- matcher: follows a text and makes masks; trigger: where in the text the grammar begins to hold.
- EBNF only: ebnf parses, nodes is the syntax tree, lark translates with rewriting, cut and lexemes.
"""

from deepinfer_jax.structured.arguments import StructuredArgs, so_args_of, structured_args
from deepinfer_jax.structured.grammar import CompiledGrammar, GrammarError, compile_grammar
from deepinfer_jax.structured.matcher import Matcher
from deepinfer_jax.structured.pool import GrammarPool, PendingGrammar
from deepinfer_jax.structured.vocabulary import GrammarVocabulary, grammar_vocabulary

__all__ = [
    "CompiledGrammar",
    "GrammarError",
    "GrammarPool",
    "GrammarVocabulary",
    "Matcher",
    "PendingGrammar",
    "StructuredArgs",
    "compile_grammar",
    "grammar_vocabulary",
    "so_args_of",
    "structured_args",
]
