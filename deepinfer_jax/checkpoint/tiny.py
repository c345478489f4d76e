"""Writes a checkpoint with random weights in the released FP8/FP4 layout, with the statistics of a real one (L10).

Uniform random weights hide scale and format faults (T37). So some output rows are outliers, some scale bytes sit at
the extremes, one embedding row is zero, and some router logits exceed 20 and some gates the SwiGLU clamp.
"""

import copy
import json
import logging
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from deepinfer_jax.checkpoint.folder import INDEX_NAME, SINGLE_NAME
from deepinfer_jax.checkpoint.host_formats import encode
from deepinfer_jax.checkpoint.init import mean_and_std
from deepinfer_jax.checkpoint.safetensors import write_safetensors
from deepinfer_jax.checkpoint.tiny_config import TINY
from deepinfer_jax.checkpoint.tiny_tokenizer import missing_bytes, special_token_names, write_tokenizer
from deepinfer_jax.config.model_config import ModelConfig, parse_config
from deepinfer_jax.tokenization import CompressedVocabulary, engram_primes
from deepinfer_jax.weights.layout import ParamSpec, param_specs, released_tensors

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]

ZERO_EMBEDDING_ROW = 3
"""This row of embed.weight is zero: rms_norm_eps = 1e-20 must carry it (model.md §11)."""

SHARD_BYTES = 4 << 30

_OUTLIER = np.float32(8)  # a row this much larger than the others
_ROUTER_OUTLIER = np.float32(16)  # ... puts a tenth of that expert's logits above 20
_MIN_GROUPS = 64  # a matrix of fewer scale groups would be mostly extremes

_log = logging.getLogger(__name__)


def make_tiny(
    out_dir: str | Path, config_path: str | Path | None = None, seed: int = 0, *, shard_bytes: int = SHARD_BYTES
) -> None:
    """Writes `config.json`, the weights and a byte-level tokenizer.

    The Engram numbers in the written config.json follow from the written tokenizer; what changes is logged. The same
    arguments give the same files. One tensor is in memory at a time.

    Args:
        out_dir: folder to write; made if it does not exist.
        config_path: a `config.json`; default: the TINY model of model.md §14.
        seed: of the weights, at least 0.
        shard_bytes: beyond this size the weights are split into shards with an index.

    Raises:
        FileExistsError: `out_dir` is not an empty folder.
        FileNotFoundError, ValueError: no such configuration, one that `load_config` refuses, one whose weights the
            disk cannot hold, or a negative seed.
    """
    if seed < 0:
        raise ValueError(f"the seed is {seed}; give one of at least 0")
    raw = copy.deepcopy(TINY) if config_path is None else _read_config(Path(config_path))
    parse_config(raw)  # refuse before anything is written
    out = Path(out_dir).absolute()
    if out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty; make-tiny writes a new folder and replaces nothing")
    disk = next(folder for folder in (out, *out.parents) if folder.exists())
    needed, free = sum(tensor.nbytes for tensor in released_tensors(parse_config(raw))), shutil.disk_usage(disk).free
    if needed > free:
        raise ValueError(f"{out}: the weights of this configuration take {needed:,} bytes, the disk has {free:,} free")
    out.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(out, raw)
    _fit_engram(out, raw)
    (out / "config.json").write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")
    _write_weights(out, parse_config(raw), seed, shard_bytes)


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; give the config.json of the model to make")
    try:
        raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        parse_config(raw)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return raw


def _write_tokenizer(out: Path, raw: dict[str, Any]) -> None:
    text, special = raw["text_config"], special_token_names(raw)
    if missing := missing_bytes(text["vocab_size"], special):
        _log.warning(
            "%s: a vocabulary of %d ids has no token for %d of the 256 bytes; the tokenizer reads them as <pad>",
            out,
            text["vocab_size"],
            missing,
        )
    roles = {role: raw[f"{role}_token_id"] for role in ("bos", "eos", "pad")}
    write_tokenizer(out, text["vocab_size"], special, roles, text["max_position_embeddings"])
    raw["tokenizer_compatibility"] = "native"


def _fit_engram(out: Path, raw: dict[str, Any]) -> None:
    """Makes the Engram numbers of the configuration those of its own tokenizer and primes (model.md §7.1, §7.2)."""
    text = raw["text_config"]
    if not text.get("engram_layer_ids"):
        return
    primes = engram_primes(
        text["engram_layer_ids"], text["engram_vocab_size"], text["engram_max_ngram_size"], text["engram_n_heads"]
    )
    fitted = {
        "engram_num_embeddings": primes.reshape(len(primes), -1).sum(axis=1).tolist(),
        "engram_compressed_vocab_size": len(CompressedVocabulary(out / "tokenizer.json")),
    }
    for key, value in fitted.items():
        if text[key] != value:
            _log.info("%s: %s is %s instead of %s, to fit the written tokenizer", out, key, value, text[key])
            text[key] = value


def _write_weights(out: Path, config: ModelConfig, seed: int, shard_bytes: int) -> None:
    shards = list(_shards(config, shard_bytes))
    names = [SINGLE_NAME]
    if len(shards) > 1:
        names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    weight_map: dict[str, str] = {}
    total = 0
    for name, shard in zip(names, shards, strict=True):
        tensors = [tensor for spec, i in shard for tensor in spec.stored(spec.names[i])]
        arrays = (array for spec, i in shard for array in _random_tensor(spec, spec.names[i], seed))
        write_safetensors(out / name, tensors, arrays)
        weight_map |= {tensor.name: name for tensor in tensors}
        total += sum(tensor.nbytes for tensor in tensors)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (out / INDEX_NAME).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def _shards(config: ModelConfig, shard_bytes: int) -> Iterator[list[tuple[ParamSpec, int]]]:
    """(parameter, tensor number) by shard; a weight and its scales share one."""
    shard: list[tuple[ParamSpec, int]] = []
    size = 0
    for spec in param_specs(config):
        nbytes = sum(tensor.nbytes for tensor in spec.stored(spec.names[0]))
        for i in range(len(spec.names)):
            if shard and size + nbytes > shard_bytes:
                yield shard
                shard, size = [], 0
            shard.append((spec, i))
            size += nbytes
    yield shard


def _random_tensor(spec: ParamSpec, name: str, seed: int) -> list[Array]:
    """Weight and, if it has them, scales of one tensor."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    mean, std = mean_and_std(spec)
    values = rng.standard_normal(spec.shape, np.float32) * np.float32(std) + np.float32(mean)
    if spec.init == "norm":
        values[rng.integers(spec.shape[0])] *= _OUTLIER
    if name == "embed.weight":
        values[ZERO_EMBEDDING_ROW] = 0
    elif spec.init == "normal" and len(spec.shape) == 2 and not name.endswith(("embed.weight", "head.weight")):
        rows = rng.choice(spec.shape[0], max(1, spec.shape[0] // 64), replace=False)
        values[rows] *= _ROUTER_OUTLIER if name.endswith(".gate.weight") else _OUTLIER
    if spec.scale_shape is None or np.prod(spec.scale_shape) < _MIN_GROUPS:
        return [array for array in encode(spec, values) if array is not None]
    return _with_extreme_scales(spec, values, rng)


def _with_extreme_scales(spec: ParamSpec, values: Floats, rng: np.random.Generator) -> list[Array]:
    """Encodes with one group of 2^-100 of its size, and two groups of zeros under the bytes 0 and 254."""
    assert spec.scale_shape is not None
    height, width = (32, 32) if spec.format == "FP8" else (1, 32)
    picks = rng.choice(spec.scale_shape[0] * spec.scale_shape[1], 3, replace=False)
    rows, columns = np.unravel_index(picks, spec.scale_shape)
    for row, column, factor in zip(rows, columns, (2.0**-100, 0.0, 0.0), strict=True):
        values[row * height : (row + 1) * height, column * width : (column + 1) * width] *= np.float32(factor)
    weight, scale = encode(spec, values)
    assert scale is not None
    scale[rows[2], columns[2]] = np.uint8(254).view(ml_dtypes.float8_e8m0fnu)  # the other zeros have byte 0
    return [weight, scale]
