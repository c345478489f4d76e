"""A Hugging Face tokenizer as the grammar library sees it: the bytes of each id, and the ids that are no text."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import llguidance

WORD_BITS = 32


@dataclass(frozen=True)
class GrammarVocabulary:
    """The ids that grammars speak of; read-only, shared by all threads.

    Attributes:
        size: ids are 0 … size − 1: the width of the model's logits. Those that the tokenizer has not are never allowed.
        num_words: uint32 words of a mask, ceil(size / 32).
        eos: the id that ends a text.
        markers: spelling → id of the added tokens, such as `<think>` and `｜DSML｜`. They are no text: a string of a
            grammar may hold the same letters, but only as ordinary tokens, so that a parser of the output can tell a
            marker by its id.
        tokenizer: the library's own.
    """

    size: int
    num_words: int
    eos: int
    markers: Mapping[str, int]
    tokenizer: Any


def grammar_vocabulary(tokenizer: Any, size: int, eos: int) -> GrammarVocabulary:
    """Reads the vocabulary of a fast tokenizer; about a second for 129,280 ids.

    Arguments:
        tokenizer: of `get_hf_tokenizer`: it has the `backend_tokenizer` of the tokenizers library.
        size: the width of the model's logits. Added tokens beyond it do not exist for grammars.
        eos: id of the end-of-sequence token.

    Raises ValueError for a tokenizer that is not the tokenizers library's, or an end token or text beyond `size`.
    """
    if not 0 <= eos < size:
        raise ValueError(f"the end-of-sequence token {eos} is outside the model's {size} ids, so no grammar could end")
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(
            f"grammars need a fast tokenizer, one with a tokenizer.json; {type(tokenizer).__name__} is not one"
        )
    document = json.loads(backend.to_str())
    document["truncation"] = document["padding"] = None
    markers = {}
    added = [token for token in document["added_tokens"] if token["id"] < size]
    for token in added:
        # What is special to the library is matched by no text. In the released tokenizer `｜DSML｜` is not special,
        # and would be allowed within every string (field report R11).
        token["special"] = True
        markers[token["content"]] = token["id"]
    document["added_tokens"] = added
    pieces: dict[str, int] = document["model"]["vocab"]
    if (last := max(pieces.values())) >= size:
        raise ValueError(f"the tokenizer has text for id {last}, but the model has only {size} ids")
    return GrammarVocabulary(
        size=size,
        num_words=-(-size // WORD_BITS),
        eos=eos,
        markers=markers,
        tokenizer=llguidance.LLTokenizer(json.dumps(document), n_vocab=size, eos_token=eos),
    )
