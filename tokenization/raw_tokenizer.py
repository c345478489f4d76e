"""Reads tokenizer.json alone: the reference pipeline that a loaded tokenizer must agree with."""

from __future__ import annotations

import os

from tokenizers import Tokenizer


def load_raw_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Reads a tokenizer.json with the plain `tokenizers` library.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the library cannot read it.
    """
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{path} does not exist: the tokenizer is read from it")
    try:
        return Tokenizer.from_file(os.fspath(path))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{path} is not a tokenizer.json: {error}") from error
