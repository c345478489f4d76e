"""A model of four layers in which every mechanism is alive, so that each program compiles in about two seconds."""

import functools
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax

from deepinfer_jax import ModelConfig, Params, init_params, load_config
from deepinfer_jax.checkpoint.tiny import make_tiny
from tests.support.paths import GOLDEN_A


def small_document() -> dict[str, Any]:
    """config.json of golden A cut to: window only; full at ratio 2 with Engram; full at ratio 1, candidate source;
    reindex."""
    document: dict[str, Any] = json.loads((GOLDEN_A / "config.json").read_text())
    document["text_config"] |= {
        "num_hidden_layers": 4,
        "compress_ratios": [0, 2, 1, 1, 0],
        "kv_source_layer_ids": [1, 2],
        "index_source_layer_ids": [1, 2, 3],
        "candidate_source_layer_id": 2,
        "engram_layer_ids": [1],
        "engram_num_embeddings": document["text_config"]["engram_num_embeddings"][:1],
        "num_nextn_predict_layers": 1,
        "dspark_target_layer_ids": [2, 3],
    }
    return document


@functools.cache
def small_config() -> ModelConfig:
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(small_document()))
        return load_config(folder)


def write_small_model(folder: Path, max_positions: int) -> Path:
    """The small model as a checkpoint with random weights that says it knows so many positions, for engines."""
    document = small_document()
    document["text_config"]["max_position_embeddings"] = max_positions
    with TemporaryDirectory() as config:
        (Path(config) / "config.json").write_text(json.dumps(document))
        make_tiny(folder, Path(config) / "config.json")
    return folder


@functools.cache
def small_params(precision: str) -> Params:
    """Random parameters of `small_config`."""
    with jax.ensure_compile_time_eval():  # what is kept must not be a tracer of whoever asks first
        return init_params(small_config(), jax.random.key(0), precision=precision)
