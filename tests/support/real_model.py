"""Engines of golden A with room for long texts, and what `forward` alone says about their tokens."""

import functools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax import LLM, Params, RequestOutput, SamplingParams, forward, load_config, load_params
from deepinfer_jax.sampling import plain_rows, sample
from tests.support.paths import GOLDEN_A

MAX_POSITIONS = 4096


def long_golden_a(folder: Path) -> Path:
    """A copy of golden A that says it knows `MAX_POSITIONS` positions."""
    folder.mkdir(parents=True)
    for file in GOLDEN_A.iterdir():
        if file.suffix in (".json", ".safetensors"):
            shutil.copy(file, folder)
    document = json.loads((GOLDEN_A / "config.json").read_text())
    document["text_config"]["max_position_embeddings"] = MAX_POSITIONS
    (folder / "config.json").write_text(json.dumps(document))
    return folder


def requests(lengths: Sequence[int], *, greedy: bool, max_tokens: int = 40) -> tuple[list[list[int]], list[Any]]:
    """Random prompts of these lengths, and parameters with filters and seeds; outputs of differing lengths."""
    rng = np.random.default_rng(len(lengths))
    prompts = [rng.integers(3, 192, length).tolist() for length in lengths]
    how = {"temperature": 0.0} if greedy else {"temperature": 0.9, "top_p": 0.95, "top_k": 40}
    return prompts, [
        SamplingParams(max_tokens=max_tokens + i % 3, ignore_eos=True, seq_seed=i, **how) for i in range(len(prompts))
    ]


def tokens_of(results: list[list[RequestOutput]]) -> list[list[int]]:
    assert not any(outputs[-1].message for outputs in results)
    return [[output.token_id for output in outputs] for outputs in results]


def generate(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    """The tokens of every request, all submitted at once."""
    return tokens_of(llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False))  # type: ignore[arg-type]


@functools.cache
def _params(folder: Path, precision: str) -> Params:
    return load_params(folder, load_config(folder), precision=precision)


def what_forward_says(
    folder: Path, precision: str, prompt: list[int], params: SamplingParams, output: list[int], **options: Any
) -> list[int]:
    """The token that `forward` and the sampler give after each prefix of prompt + output, one pass over the text.

    If it equals `output`, then by induction `forward` alone would have generated the same.
    """
    config = load_config(folder)
    text = np.asarray(prompt + output, np.int32)
    padded = np.zeros((1, -(-len(text) // 256) * 256), np.int32)  # few shapes, so few programs
    padded[0, : len(text)] = text
    run = forward(
        _params(folder, precision), config, padded, lengths=np.asarray([len(text)]), precision=precision, **options
    )
    assert run.logits is not None
    rows, count = run.logits[0, len(prompt) - 1 : len(text) - 1], len(output)
    seed = np.asarray([params.seq_seed & 0xFFFFFFFF, params.seq_seed >> 32], np.uint32)  # type: ignore[operator]

    def each(value: Any, dtype: Any) -> jax.Array:
        return jnp.full(count, value, dtype)

    sampling = plain_rows(count).replace(
        temperature=each(params.temperature, jnp.float32),
        greedy=each(params.greedy, bool),
        top_p=each(params.top_p, jnp.float32),
        top_k=each(params.top_k, jnp.int32),
        seed=jnp.tile(seed, (count, 1)),
        position=len(prompt) + jnp.arange(count, dtype=jnp.int32),
    )
    return np.asarray(sample(rows, sampling).tokens).tolist()
