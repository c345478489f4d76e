"""The toy model with a tokenizer that grammars can read, and the twin of a constrained request."""

import dataclasses
import json
import os
import string
from typing import Any
from unittest import mock

import numpy as np
from tokenizers import Tokenizer

from deepinfer_jax.engine.args import EngineArgs
from deepinfer_jax.engine.environ import rearm
from deepinfer_jax.engine.llm_engine import LLMEngine
from deepinfer_jax.engine.loading import TokenParts
from deepinfer_jax.structured import (
    GrammarVocabulary,
    Matcher,
    compile_grammar,
    grammar_vocabulary,
    structured_args,
)
from tests.support.toy import EOS, VOCAB, history_logits, make_table, toy_parts

MARKER, IMAGE = 2, 3
"""An added token that is not special, as ｜DSML｜, and the toy's image."""
_LETTERS = '"[]{},:-.' + string.digits + string.ascii_lowercase + string.ascii_uppercase
LETTERS = dict(enumerate(_LETTERS[: VOCAB - 4], 4))


class LetteredTokenizer:
    """Ids 4 … 63 are letters; the others are added tokens."""

    eos_token_id = EOS

    def __init__(self) -> None:
        vocabulary = {letter: token for token, letter in LETTERS.items()}
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        added = [(0, "<bos>", True), (EOS, "<eos>", True), (MARKER, "｜M｜", False), (IMAGE, "<image>", True)]
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        document = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": i, "content": name, **flags, "special": special} for i, name, special in added],
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
        }
        self.backend_tokenizer = Tokenizer.from_str(json.dumps(document))
        self._ids = vocabulary

    def encode(self, text: str) -> list[int]:
        return [self._ids[letter] for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(LETTERS.get(token, f"<{token}>") for token in ids)


TOKENIZER = LetteredTokenizer()


def vocabulary() -> GrammarVocabulary:
    return grammar_vocabulary(TOKENIZER, VOCAB, EOS)


VOCABULARY = vocabulary()


def grammar_parts(args: EngineArgs) -> Any:
    return dataclasses.replace(toy_parts(args), tokens=TokenParts(TOKENIZER, IMAGE))


def grammar_engine(*, overlap: bool = True, **kwargs: Any) -> LLMEngine:
    """An engine of the toy model and this tokenizer."""
    variable = "DEEPINFER_ZERO_OVERHEAD_SCHEDULING"
    defaults = {"model": "toy", "disable_log_stats": True, "max_num_seqs": 6, "tokens_per_block": 4}
    with (
        mock.patch.dict(os.environ, {} if overlap else {variable: "0"}),
        mock.patch("deepinfer_jax.engine.llm_engine.load_parts", grammar_parts),
    ):
        rearm(variable)
        engine = LLMEngine(EngineArgs(**(defaults | kwargs)))
    rearm(variable)
    return engine


def matcher_of(so_args: dict[str, Any]) -> Matcher:
    args = structured_args(so_args)
    return Matcher(compile_grammar(args, VOCABULARY), args)


def constrained_twin(prompt: list[int], so_args: dict[str, Any], count: int) -> list[int]:
    """The greedy output of a constrained request on its own, token by token, until it ends."""
    table, history, matcher = make_table(), list(prompt), matcher_of(so_args)
    masks = np.zeros((1, VOCAB // 32), np.uint32)
    while len(history) < len(prompt) + count and history[-1] != EOS:
        logits = np.array(history_logits(table, history))
        if matcher.fill_masks([], masks)[0]:
            logits[np.unpackbits(masks[0].view(np.uint8), bitorder="little") == 0] = -np.inf
        history.append(int(np.argmax(logits)))
        matcher.accept(history[-1:])
    return history[len(prompt) :]


def text_of(tokens: list[int]) -> str:
    return TOKENIZER.decode([token for token in tokens if token != EOS])
