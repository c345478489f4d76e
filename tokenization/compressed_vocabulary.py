"""Engram's compressed vocabulary: tokens that differ only in case, accent or spacing share one id (model.md §7.1)."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, normalizers

from .engram_hash import DEAD
from .raw_tokenizer import load_raw_tokenizer
from .release_policy import PAD_ID, PAD_TOKEN

# A private-use character that shields a key of exactly one space from Strip.
_LONE_SPACE = "\ue000"
_NORMALIZER = normalizers.Sequence(
    [
        normalizers.NFKC(),
        normalizers.NFD(),
        normalizers.StripAccents(),
        normalizers.Lowercase(),
        normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
        normalizers.Replace(Regex(r"^ $"), _LONE_SPACE),
        normalizers.Strip(),
        normalizers.Replace(_LONE_SPACE, " "),
    ]
)


def compress_vocabulary(texts: Sequence[str], spellings: Sequence[str]) -> npt.NDArray[np.int32]:
    """Old id -> compressed id, int32 `[vocabulary]`, numbered by first appearance of the key (model.md §7.1).

    Args:
        texts: decoded text of every id alone, special tokens kept.
        spellings: vocabulary spelling of every id; it is the key where the text is a cut UTF-8 sequence.
    """
    compressed: dict[str, int] = {}
    table = np.empty(len(texts), np.int32)
    for old, (text, spelling) in enumerate(zip(texts, spellings, strict=True)):
        key = spelling if "\ufffd" in text else _NORMALIZER.normalize_str(text) or text
        table[old] = compressed.setdefault(key, len(compressed))
    return table


class CompressedVocabulary:
    """The token map of a `tokenizer.json`, read with the plain `tokenizers` library (DB §3.3).

    Built from the file, never from a repaired tokenizer: the 21 span tokens would add 21 ids (T22).

    Attributes:
        lookup_table: old id -> compressed id, int32 `[entries of tokenizer.json]`, read-only.
    """

    lookup_table: npt.NDArray[np.int32]

    def __init__(self, tokenizer_json_path: str | os.PathLike[str]) -> None:
        """Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is malformed, its ids have gaps, or `<｜▁pad▁｜>` is not id 2.
        """
        path = os.fspath(tokenizer_json_path)
        tokenizer = load_raw_tokenizer(path)
        spelling_of = {token: name for name, token in tokenizer.get_vocab(with_added_tokens=True).items()}
        size = len(spelling_of)
        if gaps := [token for token in range(size) if token not in spelling_of]:
            raise ValueError(f"{path}: its {size} entries are not numbered 0…{size - 1}, id {gaps[0]} is missing")
        if tokenizer.token_to_id(PAD_TOKEN) not in (None, PAD_ID):
            raise ValueError(
                f"{path}: {PAD_TOKEN} has id {tokenizer.token_to_id(PAD_TOKEN)}, expected {PAD_ID}: the Engram "
                "hash pads with it"
            )
        texts = tokenizer.decode_batch([[token] for token in range(size)], skip_special_tokens=False)
        self.lookup_table = compress_vocabulary(texts, [spelling_of[token] for token in range(size)])
        self.lookup_table.flags.writeable = False
        self._size = int(self.lookup_table.max(initial=-1)) + 1

    def __len__(self) -> int:
        """Number of compressed ids (`engram_compressed_vocab_size`)."""
        return self._size


def encode_compressed(ids: npt.ArrayLike, table: npt.NDArray[np.int32], sentinel: int) -> npt.NDArray[np.int32]:
    """`table[id]` for ids inside the table, `sentinel` for all others; int32, shape of `ids` (DB §3.3).

    A negative id is outside: it never wraps round to the end of the table (A19).

    Raises:
        TypeError: `ids` are not integers.
    """
    old = np.asarray(ids)
    if old.size == 0:  # NumPy takes an empty list for floats
        return np.empty(old.shape, np.int32)
    if not np.issubdtype(old.dtype, np.integer):
        raise TypeError(f"token ids must be integers, these are {old.dtype}")
    inside = (old >= 0) & (old < len(table))
    compressed = np.full(old.shape, sentinel, np.int32)
    compressed[inside] = table[old[inside]]
    return compressed


class CompressedTokenizer:
    """Token ids -> compressed ids for the Engram hash (DB §3.3).

    Attributes:
        lookup_table: old id -> compressed id, int32 `[vocabulary]`.
        compressed_pad_token: compressed id of `engram_pad_token_id`; what the hash sees beyond a cut.
    """

    IMAGE_SENTINEL = DEAD

    lookup_table: npt.NDArray[np.int32]
    compressed_pad_token: int

    def __init__(self, vocabulary: CompressedVocabulary, pad_token_id: int = PAD_ID) -> None:
        """Raises:
        ValueError: `pad_token_id` is not in the vocabulary.
        """
        if not 0 <= pad_token_id < len(vocabulary.lookup_table):
            raise ValueError(
                f"engram_pad_token_id is {pad_token_id}, but the tokenizer has ids 0…{len(vocabulary.lookup_table) - 1}"
            )
        self.lookup_table = vocabulary.lookup_table
        self.compressed_pad_token = int(self.lookup_table[pad_token_id])

    def encode(self, ids: npt.ArrayLike) -> npt.NDArray[np.int32]:
        """Compressed ids, int32, shape of `ids`; IMAGE_SENTINEL for ids outside the vocabulary (T41)."""
        return encode_compressed(ids, self.lookup_table, self.IMAGE_SENTINEL)
