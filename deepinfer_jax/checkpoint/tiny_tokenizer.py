"""The tokenizer of `tiny.py`'s models: byte-level BPE of any size, not trained, the same on every machine (DB §3.1)."""

import itertools
import json
import string
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import pre_tokenizers

_BYTES = 256

_WORDS = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an they which one
you were all her she there would their we him been has when who will more no if out so said what up its about into
than them can only other new some could time these two may then do first any my now such like our over man me even
most made after also did many before must through back years where much your way well down should because each just
those people how too little state good very make world still own see men work long get here between both life being
under never day same another know while last might us great old year off come since against go came right used take
"""


def special_token_names(config: Mapping[str, Any]) -> dict[int, str]:
    """Id -> name of the special tokens of a decoded `config.json`; an id with two roles keeps the first name."""
    names = {
        "<bos>": config["bos_token_id"],
        "<eos>": config["eos_token_id"],
        "<pad>": config["pad_token_id"],
        "<image>": config["image_token_id"],
    }
    if config["text_config"].get("num_nextn_predict_layers"):
        names["<noise>"] = config["text_config"]["dspark_noise_token_id"]
    special: dict[int, str] = {}
    for name, token in names.items():
        special.setdefault(token, name)
    return special


def missing_bytes(vocab_size: int, special: Mapping[int, str]) -> int:
    """How many of the 256 byte values a vocabulary of this size has no token for."""
    return max(0, _BYTES + len(special) - vocab_size)


def write_tokenizer(
    folder: Path, vocab_size: int, special: Mapping[int, str], roles: Mapping[str, int], max_length: int
) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json` of exactly `vocab_size` entries.

    Bytes come first, so that every text has ids, then pieces of English words, then runs of letters. A vocabulary
    too small for all bytes has the ASCII ones; the others are read as `<pad>`. As in the release, `<bos>` opens
    every encoded text.

    Args:
        special: id -> name, at least those of `special_token_names`.
        roles: "bos", "eos" and "pad" -> id, each in `special`; two may share one.
        max_length: `model_max_length` of the tokenizer.
    """
    regular = vocab_size - len(special)
    # The blank and the line end are spelt Ġ and Ċ; printable ASCII stands for itself.
    ascii_first = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda c: (c not in "ĠĊ", not c.isascii(), c))
    pieces = ascii_first[:regular]
    merges = list(itertools.islice(_merges(set(pieces)), regular - len(pieces)))
    pieces += [left + right for left, right in merges]
    ids = (token for token in range(vocab_size) if token not in special)
    vocabulary = dict(zip(pieces, ids, strict=True)) | {name: token for token, name in special.items()}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added_token(token, special[token]) for token in sorted(special)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": _opening_with(special[roles["bos"]], roles["bos"]),
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": special[roles["pad"]] if missing_bytes(vocab_size, special) else None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": dict(sorted(vocabulary.items(), key=lambda item: item[1])),
            "merges": [list(pair) for pair in merges],
        },
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        # By id: a second name for one id would be appended beyond the vocabulary.
        **{f"{role}_token": special[token] for role, token in roles.items()},
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    for name, content in (("tokenizer.json", tokenizer), ("tokenizer_config.json", settings)):
        (folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")


def _merges(known: set[str]) -> Iterator[tuple[str, str]]:
    """Merge rules without end for practical sizes: each piece from its longest prefix and its last letter."""
    space = "Ġ"  # how byte-level BPE spells a blank
    letters = string.ascii_lowercase
    words = _WORDS.split()
    forms = (*(space + word for word in words), *words, *(space + word.capitalize() for word in words))
    runs = ("".join(run) for length in (2, 3, 4) for run in itertools.product(letters, repeat=length))
    for piece in itertools.chain(forms, runs):
        for end in range(2, len(piece) + 1):
            if piece[:end] not in known:
                known.add(piece[:end])
                yield piece[: end - 1], piece[end - 1]


def _added_token(token: int, name: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token, "content": name, **flags, "special": True}


def _opening_with(name: str, token: int) -> dict[str, Any]:
    opening = {"SpecialToken": {"id": name, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [opening, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [opening, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {name: {"id": name, "ids": [token], "tokens": [name]}},
    }
