"""`deepinfer-jax check`: does a model folder keep the token contract? One row per rule (DB §3.2, §4.1, model.md §1.3).

Reads JSON, safetensors headers and the tokenizer; no weights, no jax.
"""

from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from deepinfer_jax.checkpoint.folder import CheckpointFolder
from deepinfer_jax.config.model_config import load_config, read_json, text_values
from deepinfer_jax.config.schedule_rules import schedule_violations
from deepinfer_jax.tokenization import (
    IMAGE_PLACEHOLDERS,
    SPAN_TOKENS,
    CompressedVocabulary,
    engram_primes,
    find_image_placeholder,
    get_hf_tokenizer,
    load_unrepaired_tokenizer,
    release_rules,
    tokenizer_compatibility,
)


class CheckRow(NamedTuple):
    """One rule of the contract.

    Attributes:
        rule: what must hold.
        ok: whether it holds.
        reason: why not; with `ok`, a remark or empty.
    """

    rule: str
    ok: bool
    reason: str


class _Folder:
    """What the rules look at, each read on first use; an unreadable file fails every rule that needs it."""

    def __init__(self, directory: Path, trust_remote_code: bool) -> None:
        self.directory = directory
        self.trust_remote_code = trust_remote_code

    @cached_property
    def config(self) -> dict[str, Any]:
        path = self.directory / "config.json"
        config = read_json(path)
        if not isinstance(config, dict) or not isinstance(config.get("text_config"), dict):
            raise ValueError(f"{path} must be a JSON object with a text_config object")
        return config

    @cached_property
    def text(self) -> dict[str, Any]:
        return text_values(self.config["text_config"])

    @cached_property
    def compatibility(self) -> str:
        return tokenizer_compatibility(self.directory)

    @cached_property
    def unrepaired(self) -> Any:
        return load_unrepaired_tokenizer(self.directory, self.trust_remote_code)

    @cached_property
    def tokenizer(self) -> Any:
        return get_hf_tokenizer(self.directory, self.trust_remote_code)


def check_model(model_dir: str | Path, trust_remote_code: bool = False) -> list[CheckRow]:
    """Every rule of the token contract, judged on its own; never raises for what a folder holds or lacks.

    Args:
        model_dir: config.json, tokenizer.json, tokenizer_config.json, and the checkpoint.
        trust_remote_code: run the tokenizer code that `auto_map` names.
    """
    directory = Path(model_dir)
    if not directory.is_dir():
        return [CheckRow("the model is a local folder", False, f"{directory} is none; download the model first")]
    folder = _Folder(directory, trust_remote_code)
    return [
        _judge("config.json describes a model that this engine runs", lambda: _loads(folder)),
        *_special_token_rows(folder),
        *_image_rows(folder),
        *_vocabulary_rows(folder),
        *_engram_rows(folder),
        *_schedule_rows(folder),
        CheckRow("mind the length", True, "max_tokens is 16 unless a request says otherwise"),
    ]


def run_check(model_dir: str | Path, trust_remote_code: bool = False) -> int:
    """Prints the table of `check_model`. Returns the exit status: 1 if any rule is broken, else 0."""
    rows = check_model(model_dir, trust_remote_code)
    width = max(len(row.rule) for row in rows)
    for row in rows:
        verdict = ("pass" if row.ok else "FAIL") + (f": {row.reason}" if row.reason else "")
        print(f"{row.rule:<{width}}  {verdict}")
    broken = sum(not row.ok for row in rows)
    print(f"{broken} of {len(rows)} rules broken" if broken else f"all {len(rows)} rules hold")
    return 1 if broken else 0


def _judge(rule: str, check: Callable[[], str | None]) -> CheckRow:
    """The row of a check that returns a reason, or None when the rule holds, or raises."""
    try:
        reason = check()
    except Exception as error:
        reason = _as_reason(error)
    return CheckRow(rule, reason is None, " ".join((reason or "").split()))


def _as_reason(error: Exception) -> str:
    """One sentence, whatever a file of the wrong content leads to: a check never raises."""
    if isinstance(error, KeyError):
        return f"config.json lacks {error}"
    if isinstance(error, OSError | ValueError):
        return " ".join(str(error).split())
    return f"cannot be judged: {type(error).__name__}: {' '.join(str(error).split())}"


def _loads(folder: _Folder) -> None:
    load_config(folder.directory)


def _special_token_rows(folder: _Folder) -> Iterator[CheckRow]:
    try:
        policy = release_rules(folder.unrepaired) if folder.compatibility == "release" else []
    except Exception as error:
        yield CheckRow("the tokenizer can be judged", False, _as_reason(error))
        return
    if not policy:
        yield CheckRow("span tokens", True, "the native policy asks for none")
    for rule, reason in policy:
        yield CheckRow(rule, reason is None, reason or "")
    yield _judge("the tokenizer loads and keeps the pipeline of tokenizer.json", lambda: _opens(folder))
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        yield _judge(f"{name} of config.json is the tokenizer's", partial(_same_id, folder, name))


def _opens(folder: _Folder) -> None:
    _ = folder.tokenizer


def _same_id(folder: _Folder, name: str) -> str | None:
    found, expected = getattr(folder.tokenizer, name), folder.config[name]
    return None if found == expected else f"the tokenizer has {found}, config.json has {expected}"


def _image_rows(folder: _Folder) -> Iterator[CheckRow]:
    def by_id() -> str | None:
        image_token_id = folder.config["image_token_id"]
        held = folder.unrepaired.convert_ids_to_tokens(image_token_id)
        return None if held in IMAGE_PLACEHOLDERS else f"the tokenizer calls id {image_token_id} {held!r}"

    def by_name() -> None:
        find_image_placeholder(folder.unrepaired.get_vocab(), folder.config["image_token_id"])

    names = " or ".join(IMAGE_PLACEHOLDERS)
    yield _judge(f"image_token_id is the id of {names}", by_id)
    yield _judge(f"{names} has image_token_id", by_name)


def _vocabulary_rows(folder: _Folder) -> Iterator[CheckRow]:
    def embedding() -> str | None:
        rows = CheckpointFolder(folder.directory).entry("embed.weight").shape[0]
        expected = folder.text["vocab_size"]
        return None if rows == expected else f"embed.weight has {rows} rows, vocab_size is {expected}"

    def tokenizer() -> str | None:
        ids = [token for name, token in folder.unrepaired.get_vocab().items() if name not in SPAN_TOKENS]
        last, size = max(ids), folder.text["vocab_size"]
        return None if last < size else f"the tokenizer has id {last}, vocab_size is {size}: it would be an image's id"

    yield _judge("vocab_size is the number of embedding rows", embedding)
    yield _judge("every id of the tokenizer files, span tokens aside, is below vocab_size", tokenizer)


def _engram_rows(folder: _Folder) -> Iterator[CheckRow]:
    def compressed() -> str | None:
        if not folder.text["engram_layer_ids"]:
            return None
        found = len(CompressedVocabulary(folder.directory / "tokenizer.json"))
        expected = folder.text["engram_compressed_vocab_size"]
        if found == expected:
            return None
        return f"tokenizer.json gives {found}, config.json has {expected}: the Engram hash would read other rows"

    def tables() -> str | None:
        text = folder.text
        if not text["engram_layer_ids"]:
            return None
        least = (text["engram_max_ngram_size"] - 1) * text["engram_n_heads"] * text["engram_vocab_size"]
        if min(text["engram_num_embeddings"]) < least:  # so that absurd sizes are not worked out
            return f"the hash addresses at least {least} rows, config.json has {text['engram_num_embeddings']}"
        primes = engram_primes(
            text["engram_layer_ids"],
            text["engram_vocab_size"],
            text["engram_max_ngram_size"],
            text["engram_n_heads"],
        )
        found, expected = primes.sum(axis=(1, 2)).tolist(), list(text["engram_num_embeddings"])
        return None if found == expected else f"the hash addresses {found} rows, config.json has {expected}"

    yield _judge("engram_compressed_vocab_size is the number of compressed token ids", compressed)
    yield _judge("engram_num_embeddings is the number of rows that the hash addresses", tables)


def _schedule_rows(folder: _Folder) -> Iterator[CheckRow]:
    try:
        rules = schedule_violations(folder.text)
    except Exception as error:
        yield CheckRow("the layer schedule can be judged", False, _as_reason(error))
        return
    for rule, reason in rules:
        yield CheckRow(rule, reason is None, reason or "")
