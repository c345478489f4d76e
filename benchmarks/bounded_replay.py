"""Prefill cost per token with bounded replay, as a part of the exact prefill's.

    python benchmarks/bounded_replay.py            # about fifteen minutes on 2 cores, most of them at 32k tokens
    python benchmarks/bounded_replay.py --lengths 1024 8192 --chunk 128      # the engine's chunks on a CPU

One prompt goes through the model's prefill program in chunks, on caches of its length. The modes take turns, and the
fastest round of each counts. Every mode computes the producers and the entries of the first consumer. `compact` runs
the consumers on the chunks that reach the kept tokens, on no more rows than are kept; as they score up to twice as many
entries as producers do, it can save more than their part of the layers.
"""

import argparse
import functools
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax import ModelConfig, Params, init_params
from deepinfer_jax.cache.pools import CacheShape, init_pools
from deepinfer_jax.config.model_config import Precision, parse_config
from deepinfer_jax.kernels.choice import KernelChoice
from deepinfer_jax.model.bounded_replay import Replay, first_consumer
from deepinfer_jax.runtime.paged_model import PagedModel, StepBatch
from deepinfer_jax.scheduler import blocks_for

REPOSITORY = Path(__file__).parents[1]
PRECISION: Precision = "float32"
TOKENS_PER_BLOCK = 128
SPARE = 12  # kept beside the window, as in DeepInfer's README: 140 of 128


class Prefill:
    """A whole prompt through one compiled program."""

    def __init__(self, config: ModelConfig, replay: Replay | None, length: int, chunk: int) -> None:
        self._model = PagedModel(config, PRECISION, KernelChoice.for_devices(jax.local_devices()[:1]), replay=replay)
        self._length, self._chunk = length, chunk
        self._keep = length if replay is None else replay.keep
        self._shape = CacheShape(1, 1, blocks_for(length, TOKENS_PER_BLOCK), TOKENS_PER_BLOCK)
        self._tokens = np.random.default_rng(0).integers(3, 180, length).astype(np.int32)

        @functools.partial(jax.jit, donate_argnums=1)
        def advance(params: Params, cache: Any, batch: StepBatch) -> tuple[jax.Array, Any]:
            hidden, lengths, cache = self._model.advance(params, cache, batch)
            return self._model.logits(params, hidden[:, jnp.maximum(lengths[0] - 1, 0)]), cache

        self._advance = advance

    def seconds(self, params: Params, chunks: int | None = None) -> float:
        """Of all chunks, or of the first ones."""
        cache = init_pools(self._model.state(TOKENS_PER_BLOCK), self._shape)
        batches = [self._batch(start) for start in range(0, self._length, self._chunk)[:chunks]]
        jax.block_until_ready((cache, batches))
        start = time.perf_counter()
        for batch in batches:
            logits, cache = self._advance(params, cache, batch)
        jax.block_until_ready(logits)
        return time.perf_counter() - start

    def _batch(self, start: int) -> StepBatch:
        tokens = self._tokens[start : start + self._chunk]

        def one(value: int) -> jax.Array:
            return jnp.full((1, 1), value, jnp.int32)

        return StepBatch(
            tokens=jnp.asarray(np.pad(tokens, (0, self._chunk - len(tokens))))[None, None],
            lengths=one(len(tokens)),
            starts=one(start),
            slots=one(0),
            tables=jnp.arange(self._shape.blocks, dtype=jnp.int32)[None, None],
            kept_from=one(max(self._length - self._keep, 0)),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=REPOSITORY / "benchmarks" / "mid.json")
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 8192, 32768])
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--smoke", action="store_true", help="a few seconds, to see that it runs")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.config = REPOSITORY / "tests" / "golden" / "A_s28" / "config.json"
        arguments.lengths, arguments.chunk, arguments.rounds = [96], 32, 1
    config = parse_config(json.loads(arguments.config.read_text()))
    params = init_params(config, jax.random.key(0), precision=PRECISION)
    keep = config.text.sliding_window + SPARE
    replays = {"off": None, "mask": Replay("mask", keep), "compact": Replay("compact", keep)}
    print(f"{keep} tokens kept, {first_consumer(config.text)} of {config.text.num_hidden_layers} layers are producers")
    print(f"{'tokens':>7}{'off ms/token':>14}{'mask':>8}{'compact':>9}  × off", flush=True)
    for length in arguments.lengths:
        runs = {name: Prefill(config, replay, length, arguments.chunk) for name, replay in replays.items()}
        for run in runs.values():
            run.seconds(params, chunks=2)  # compiles, and touches fresh memory
        rounds = [{name: run.seconds(params) for name, run in runs.items()} for _ in range(arguments.rounds)]
        off, mask, compact = (min(taken[name] for taken in rounds) for name in runs)
        print(f"{length:7}{off / length * 1e3:14.3f}{mask / off:8.3f}{compact / off:9.3f}", flush=True)


if __name__ == "__main__":
    main()
