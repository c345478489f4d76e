"""Checkpoints whose draft model is known to agree with the target always, or never.

The layers keep their cost and lose their effect: their output projections are zero, so the streams stay the embedding
of the token and the head, permuted embeddings, makes the next token a function of this one. The drafts' own logits are
zero (their last norm is), so the Markov head decides, a function of the token before as well: the same one, or another.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import ml_dtypes
import numpy as np

from deepinfer_jax.checkpoint.safetensors import read_header
from deepinfer_jax.checkpoint.tiny import make_tiny

REPOSITORY = Path(__file__).parents[1]
CONFIGS = {
    "A": REPOSITORY / "tests" / "golden" / "A_s28" / "config.json",
    "mid": REPOSITORY / "benchmarks" / "mid.json",
}
# A draft model for the mid-size configuration, which has none.
MID_DRAFTS = {
    "num_nextn_predict_layers": 3,
    "dspark_block_size": 5,
    "dspark_target_layer_ids": [5, 6, 7],
    "compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 0, 0, 0],
}
_SILENT = re.compile(r"(attn\.wo_b|w2|engram\.wkv|mtp\.\d+\.norm)\.weight")


@contextmanager
def drafted_model(name: str, *, agrees: bool) -> Iterator[Path]:
    """The folder of a random model of `CONFIGS` in which every draft is the target's greedy token, or none is."""
    with TemporaryDirectory() as directory:
        config = json.loads(CONFIGS[name].read_text())
        if name == "mid":
            config["text_config"] |= MID_DRAFTS
        (source := Path(directory) / "config.json").write_text(json.dumps(config))
        folder = Path(directory) / name
        make_tiny(folder, source)
        for path in folder.glob("*.safetensors"):
            _rewrite(path, config["text_config"]["vocab_size"], agrees=agrees)
        yield folder


def _rewrite(path: Path, vocab: int, *, agrees: bool) -> None:
    rng = np.random.default_rng(0)
    turn = rng.permutation(vocab)  # token turn[i] goes before token turn[i + 1]
    before, other = np.empty_like(turn), np.empty_like(turn)
    before[np.roll(turn, -1)], other[np.roll(turn, -2)] = turn, turn
    for name, entry in read_header(path).items():
        data = np.memmap(path, np.uint8, "r+", offset=entry.begin, shape=(entry.end - entry.begin,))
        if _SILENT.search(name):
            data[:] = 0
        elif name in ("embed.weight", "head.weight") or ".markov_head." in name:
            # Rows of length 1: a row's product with itself is larger than with any other.
            rows = np.random.default_rng(entry.shape[1]).standard_normal(entry.shape)
            rows /= np.linalg.norm(rows, axis=1, keepdims=True)
            if name == "head.weight":
                rows = 8 * rows[before]
            elif name.endswith("markov_head.head.weight"):
                rows = 8 * rows[before if agrees else other]
            data[:] = rows.astype(ml_dtypes.bfloat16).reshape(-1).view(np.uint8)
        data.flush()
