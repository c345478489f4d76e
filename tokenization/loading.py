"""`get_hf_tokenizer`: loads a model directory's tokenizer, checked and safe to feed the engine (DB §3.1)."""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import sys
import types
from pathlib import Path
from typing import Any

from .raw_tokenizer import load_raw_tokenizer
from .release_policy import BOS_ID, BOS_TOKEN, EOS_TOKEN, SPAN_TOKENS, apply_release_policy
from .text_guard import guard_text

logger = logging.getLogger(__name__)

# What a tokenizer class that rebuilds the pipeline gets wrong without an error: spaces, CJK, combining accents,
# digits, line ends, code, and special tokens.
_PROBE = (
    f"Hello world, 你好世界! e\u0301 é ﬁ 1234567\r\n\tdef f(x):  return x**2 # {EOS_TOKEN}\n\n"
    "かな 한국어 🙂👩‍👩‍👧 <|EOT|> <｜User｜> </think>  end "
)


def get_hf_tokenizer(
    tokenizer_dir: str | os.PathLike[str],
    trust_remote_code: bool = False,
    *,
    tokenizer_revision: str | None = None,
    revision: str | None = None,
) -> Any:
    """Loads the tokenizer of a local directory under the policy that its `config.json` names (DB §3.1-3.2).

    `tokenizer_compatibility: "release"` (the default, also without config.json) checks the released special tokens,
    repairs BOS, PAD and span tokens, and checks again; then for every text `encode(x) == [0] + raw(x)` and
    `decode(encode(x)[1:]) == x`, where raw is tokenizer.json alone. `"native"` takes the files as they are. Text
    with a lone surrogate is a ValueError in both, and text with the name of a span token in "release".

    Only files of the directory are read. A class named by `auto_map` in tokenizer_config.json is used, but its code
    runs only with `trust_remote_code=True`.

    Args:
        tokenizer_dir: holds tokenizer.json, tokenizer_config.json and usually config.json.
        tokenizer_revision: of no use for a local directory; a warning says so.
        revision: likewise.

    Returns:
        A Hugging Face tokenizer.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: unknown `tokenizer_compatibility`, a broken rule, `auto_map` without trust, text that is not
            encoded as tokenizer.json says.
    """
    if given := [name for name in (tokenizer_revision, revision) if name is not None]:
        logger.warning("%s is a local directory: revision %s is not looked at", tokenizer_dir, given[0])
    compatibility = tokenizer_compatibility(tokenizer_dir)
    tokenizer = load_unrepaired_tokenizer(tokenizer_dir, trust_remote_code)
    if compatibility == "native":
        return guard_text(tokenizer)
    try:
        tokenizer = apply_release_policy(tokenizer)
        _check_text_path(tokenizer, Path(tokenizer_dir) / "tokenizer.json")
    except ValueError as error:
        raise ValueError(f"{tokenizer_dir}: {error}") from error
    return guard_text(tokenizer, reserved=SPAN_TOKENS, inserted_bos=BOS_TOKEN)


def tokenizer_compatibility(tokenizer_dir: str | os.PathLike[str]) -> str:
    """`"release"` or `"native"`: the top-level key of config.json, "release" when absent (DB §3.1).

    Raises:
        ValueError: any other value.
    """
    config = Path(tokenizer_dir) / "config.json"
    compatibility = _read_json(config).get("tokenizer_compatibility", "release") if config.is_file() else "release"
    if compatibility not in ("release", "native"):
        raise ValueError(f'{config}: tokenizer_compatibility is {compatibility!r}, expected "release" or "native"')
    return str(compatibility)


def load_unrepaired_tokenizer(tokenizer_dir: str | os.PathLike[str], trust_remote_code: bool = False) -> Any:
    """The tokenizer as its files say, before any policy. Errors as in `get_hf_tokenizer`."""
    # Not at the top of the file: it takes a second, and the Engram hash of this package needs none of it.
    from transformers import PreTrainedTokenizerFast

    directory = Path(tokenizer_dir)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if not (directory / name).is_file():
            raise FileNotFoundError(f"{directory / name} does not exist: a tokenizer needs it as a local file")
    settings = _read_json(directory / "tokenizer_config.json")
    if settings.get("auto_map") is not None:
        tokenizer_class = _auto_map_class(directory, settings["auto_map"], trust_remote_code)
    else:
        # Not AutoTokenizer, not LlamaTokenizerFast: in transformers 5 the latter builds a Llama pipeline instead of
        # the file's, and the former picks it if tokenizer_config.json names it. This one keeps tokenizer.json.
        tokenizer_class = PreTrainedTokenizerFast
    # transformers 5 drops these two from tokenizer_config.json whenever there is a tokenizer.json.
    flags = {key: settings[key] for key in ("add_bos_token", "add_eos_token") if key in settings}
    try:
        return tokenizer_class.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=trust_remote_code, **flags
        )
    except FileNotFoundError:
        raise
    except Exception as error:  # KeyError, TypeError or bare Exception, depending on what is malformed
        raise ValueError(f"{directory}: {tokenizer_class.__name__} cannot load the tokenizer: {error}") from error


def _auto_map_class(directory: Path, auto_map: Any, trust_remote_code: bool) -> Any:
    """The class that `auto_map["AutoTokenizer"]` names: its first entry that is not null, "module.Class"."""
    source = directory / "tokenizer_config.json"
    entries = auto_map.get("AutoTokenizer") if isinstance(auto_map, dict) else auto_map
    named = [entry for entry in (entries if isinstance(entries, list) else [entries]) if entry is not None]
    module, _, name = str(named[0]).rpartition(".") if named else ("", "", "")
    # An entry "repository--module.Class" points outside the directory and fails here too.
    if not (module.isidentifier() and name.isidentifier()):
        raise ValueError(f'{source}: auto_map["AutoTokenizer"] is {entries!r}, expected ["module.Class", …]')
    code = directory / f"{module}.py"
    if not trust_remote_code:
        raise ValueError(
            f"{source}: auto_map asks to run the code of {code}; read it, then pass trust_remote_code=True"
        )
    if not code.is_file():
        raise FileNotFoundError(f"{code} does not exist, but auto_map in {source} names it")
    # A package of its own for each directory, so that two checkpoints may both have a `tokenization.py`, and that
    # the module's relative imports find its neighbours.
    package = f"_auto_map_{hashlib.sha256(str(directory.resolve()).encode()).hexdigest()[:16]}"
    if package not in sys.modules:
        sys.modules[package] = types.ModuleType(package)
        sys.modules[package].__path__ = [str(directory.resolve())]
    try:
        loaded = importlib.import_module(f"{package}.{module}")
    except Exception as error:  # whatever the code of the checkpoint does
        raise ValueError(f"{code} cannot be imported: {type(error).__name__}: {error}") from error
    found = getattr(loaded, name, None)
    if not isinstance(found, type):
        raise ValueError(f"{code} defines no class {name}, but auto_map in {source} names it")
    return found


def _check_text_path(tokenizer: Any, tokenizer_json: Path) -> None:
    """Raises ValueError unless the probe text goes through the tokenizer exactly as through tokenizer.json."""
    raw = load_raw_tokenizer(tokenizer_json).encode(_PROBE, add_special_tokens=False).ids
    ids = list(tokenizer.encode(_PROBE))
    if ids != [BOS_ID, *raw]:
        at = next((i for i, pair in enumerate(zip(ids, [BOS_ID, *raw], strict=False)) if pair[0] != pair[1]), len(raw))
        raise ValueError(
            f"{type(tokenizer).__name__} encodes text differently from {tokenizer_json.name}: the probe text has "
            f"{len(ids)} tokens instead of {len(raw) + 1} and differs from token {at} on; the class rebuilds the "
            "pipeline, use one that keeps tokenizer.json"
        )
    if (text := tokenizer.decode(ids[1:])) != _PROBE:
        raise ValueError(f"the tokenizer does not give back the text it encoded: {_PROBE!r} came back as {text!r}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # bad JSON, bad UTF-8; JSON nested without end
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, expected a JSON object")
    return value
