"""A tokenizer for tests of grammars, and random texts that a grammar allows."""

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer_jax.checkpoint.tiny_tokenizer import write_tokenizer
from deepinfer_jax.structured import (
    GrammarVocabulary,
    Matcher,
    compile_grammar,
    grammar_vocabulary,
    structured_args,
)
from deepinfer_jax.tokenization import get_hf_tokenizer

EOS = 1
MARKER = 4
"""The id of ｜DSML｜, an added token that is not special, as in the release."""
SIZE = 517
"""Wider than the tokenizer's 512 ids, and no multiple of 32."""
SPECIAL = {0: "<bos>", 1: "<eos>", 2: "<pad>", 3: "<think>", 4: "｜DSML｜", 5: "</think>"}


@functools.cache
def tokenizer(size: int = 512) -> Any:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tokenizer(folder, size, SPECIAL, {"bos": 0, "eos": 1, "pad": 2}, 4096)
        document = json.loads((folder / "tokenizer.json").read_text())
        for token in document["added_tokens"]:
            token["special"] = token["id"] < 3
        (folder / "tokenizer.json").write_text(json.dumps(document))
        (folder / "config.json").write_text('{"tokenizer_compatibility": "native"}')
        return get_hf_tokenizer(folder)


@functools.cache
def vocabulary() -> GrammarVocabulary:
    return grammar_vocabulary(tokenizer(), SIZE, EOS)


def matcher(schema_type: str, schema: Any, **others: Any) -> Matcher:
    if not isinstance(schema, str):
        schema = json.dumps(schema)
    args = structured_args({"schema_type": schema_type, "schema": schema, **others})
    return Matcher(compile_grammar(args, vocabulary()), args)


def allowed(matcher: Matcher) -> np.ndarray | None:
    """Ids that may come next; None: all."""
    masks = np.zeros((1, vocabulary().num_words), np.uint32)
    (masked,) = matcher.fill_masks([], masks)
    return np.flatnonzero(bits(masks[0])) if masked else None


def bits(mask: np.ndarray) -> np.ndarray:
    return np.unpackbits(mask.view(np.uint8), bitorder="little")


def walk(matcher: Matcher, rng: np.random.Generator, *, length: int = 60) -> list[int] | None:
    """A random text that the grammar allows, without its end; ids. None if it was not ended after `length` tokens.

    It ends as soon as half of the length is reached and it may.
    """
    tokens: list[int] = []
    for _ in range(length):
        ids = allowed(matcher)
        assert ids is not None and ids.max() < 512
        if EOS in ids and (len(ids) == 1 or len(tokens) > length // 2 or rng.random() < 0.3):
            matcher.accept([EOS])
            return tokens
        token = _likely(ids[ids != EOS], rng)
        matcher.accept([token])
        tokens.append(token)
    return None


def _likely(ids: np.ndarray, rng: np.random.Generator) -> int:
    """Closing tokens rather often, so that texts end."""
    closing = ids[np.isin(ids, _closing())]
    return int(rng.choice(closing if len(closing) and rng.random() < 0.3 else ids))


@functools.cache
def _closing() -> list[int]:
    return [token for text in '"]}' for token in spelt(text)]


def text_of(tokens: list[int]) -> str:
    return vocabulary().tokenizer.decode_bytes(tokens).decode()


def spelt(text: str) -> list[int]:
    """A text as the tokens of its bytes, longest first."""
    return vocabulary().tokenizer.greedy_tokenize(text)


def takes(matcher: Matcher, text: str) -> bool:
    """Whether the grammar allows exactly this text, byte by byte."""
    ids = [token for byte in text.encode() for token in _byte(byte)]
    for token in [*ids, EOS]:
        found = allowed(matcher)
        if found is not None and token not in found:
            return False
        matcher.accept([token])
    return True


@functools.cache
def _byte(byte: int) -> list[int]:
    for token in range(512):
        if vocabulary().tokenizer.decode_bytes([token]) == bytes([byte]) and token not in SPECIAL:
            return [token]
    raise ValueError(f"no token is byte {byte}")
