"""The golden data (tests/golden/README.md) as the tests of the forward pass use them."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from deepinfer_jax import ModelConfig, Params, load_config, load_params
from tests.support.paths import GOLDEN

Array = npt.NDArray[Any]

# Logits have a standard deviation of about 1. Two independent implementations differ by 7.3e-6 (float32_exact) and
# 1.4e-5 (float32) because fp32 sums have no agreed order; 1e-4 is the line that issue 2 draws above that.
LOGIT_TOLERANCE = 1e-4
# Streams and what is computed from them are larger than logits: two implementations differ by 2.7e-5 (streams) and
# 3.6e-5 (confidence) where logits differ by 7.3e-6. The same factor above that as for the logits.
STREAM_TOLERANCE = 4e-4

MODES = {"float32_exact": "f32nq", "float32": "f32", "bf16": "bf16", "reference": "fp8"}
"""Our precision -> the mode of the golden files that computes the same thing."""

LAYER_KEYS = {
    "engram_out": "engram.streams",
    "attn_in": "attention.input",
    "index_scores": "attention.index_scores",
    "candidates": "attention.candidates",
    "index_picks": "attention.index_picks",
    "attn_out": "attention.output",
    "router_idx": "moe.expert_ids",
    "router_w": "moe.expert_weights",
    "ffn_out": "moe.output",
    "out": "streams",
    "pre_mix": "pre",
}
"""Key under L{i}/ in a golden file -> our capture name under layers.{i}."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One golden file. Arrays are given as [batch, time, ...], whatever the file's layout."""

    folder: str
    name: str
    mode: str

    def __str__(self) -> str:
        return f"{self.folder[0]}-{self.name}-{self.mode}"

    @property
    def arrays(self) -> Mapping[str, Array]:
        return _read(GOLDEN / self.folder / f"{self.name}.{self.mode}.npz")

    @property
    def tokens(self) -> Array:
        """Prompt and teacher-forced tokens, int32 [batch, time]."""
        return self.arrays["input_ids"]

    @property
    def prefill_length(self) -> int:
        return int(self.arrays["prefill_len"])

    @property
    def steps(self) -> int:
        """Teacher-forced decode steps."""
        return self.tokens.shape[1] - self.prefill_length

    @property
    def token_types(self) -> Array | None:
        """Roles of the prompt's tokens; None when all are text."""
        if "token_types" not in self.arrays:
            return None
        return self.arrays["token_types"][:, : self.prefill_length]

    @property
    def image_embeds(self) -> jax.Array | None:
        """Aligner rows of all images in reading order, float32 [features, hidden]."""
        if self.token_types is None:
            return None
        images = sum(key.endswith("/embeds") for key in self.arrays)
        return jnp.concatenate([self.arrays[f"image{j}/embeds"] for j in range(images)])

    def has(self, key: str, step: int | None = None) -> bool:
        """Whether `get` finds the array: lite files lack most of L*/ (README)."""
        return _key(key, step) in self.arrays

    def get(self, key: str, step: int | None = None) -> Array:
        """`prefill/key`, or `decode/key` of one step."""
        array = self.arrays[_key(key, step)]
        if step is not None:
            array = array[step]
        if key.endswith(("router_idx", "router_w")):  # stored without the split into batch and time
            array = array.reshape(len(self.tokens), -1, array.shape[-1])
        return array

    def layer_arrays(self, step: int | None = None) -> Iterator[tuple[int, str, Array]]:
        """(layer, golden key, array) of everything under L*/ that has a capture name."""
        config, _ = model(self.folder, "float32_exact")
        for layer in range(config.text.num_hidden_layers):
            for key in LAYER_KEYS:
                if self.has(f"L{layer}/{key}", step):
                    yield layer, key, self.get(f"L{layer}/{key}", step)


def _key(key: str, step: int | None) -> str:
    return f"prefill/{key}" if step is None else f"decode/{key}"


@functools.cache
def _read(path: Path) -> Mapping[str, Array]:
    with np.load(path) as file:
        return dict(file)


@functools.cache
def model(folder: str, precision: str) -> tuple[ModelConfig, Params]:
    """Configuration and parameters of a golden folder, loaded once."""
    config = load_config(GOLDEN / folder)
    return config, load_params(GOLDEN / folder, config, precision=precision, tokenizer=GOLDEN / folder.split("/")[0])


def same_picks(found: Array, wanted: Array) -> bool:
    """Whether two lists of picks name the same entries in the same order; padding at the end means nothing."""
    width = max(found.shape[-1], wanted.shape[-1])

    def padded(picks: Array) -> Array:
        picks = np.where(picks < 0, -1, picks)  # the golden files pad with −1 and −2
        return np.pad(picks, [(0, 0)] * (picks.ndim - 1) + [(0, width - picks.shape[-1])], constant_values=-1)

    return np.array_equal(padded(found), padded(wanted))


def visible_entries(config: ModelConfig, layer: int, positions: Array) -> Array:
    """How many compressed entries of a layer each position sees (model.md §5.5)."""
    return (positions + 1) // config.text.compress_ratios[layer]


def worst(found: Any, wanted: Any) -> float:
    """Largest absolute difference, in float32; NaN counts as infinite."""
    difference = np.abs(np.asarray(found, np.float32) - np.asarray(wanted, np.float32))
    return float(np.where(np.isnan(difference), np.inf, difference).max(initial=0))


def as_float32(array: Any) -> Array:
    return np.asarray(jnp.asarray(array).astype(jnp.float32))


def log_softmax(logits: Array) -> Array:
    """Of the last axis, in float64."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
