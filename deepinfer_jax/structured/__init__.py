"""Structured outputs: which tokens a request's JSON Schema, regular expression or EBNF grammar allows next (DB §8).

Plain Python over the llguidance library. Never jax: masks are bit arrays here, and somebody else brings them to the
device.
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
