"""A runner of the model with a dummy kind, driven without scheduler and engine."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from deepinfer_jax.cache.pools import CacheShape
from deepinfer_jax.runtime.duties import RunnerDuties
from deepinfer_jax.runtime.runner import Runner
from deepinfer_jax.runtime.slot_sampling import SAMPLING_FIELDS
from deepinfer_jax.scheduler import Bucket, BucketTable, DecodeStep, PrefillStep
from tests.support.dummy_kind import DummyKindModel
from tests.support.toy import make_table

TOKENS_PER_BLOCK, CHUNK = 4, 8
PREFILL, DECODE = Bucket(rows=6, time=CHUNK, width=10), Bucket(rows=6, time=1, width=10)


@dataclasses.dataclass
class Row:
    """A sequence and where it is; of an even seed it is greedy. `tokens` grows with what is computed."""

    tokens: list[int]
    blocks: list[int]
    slot: int
    seed: int = 0
    dp_rank: int = 0


def int32(values: Any) -> np.ndarray:
    return np.asarray(list(values), np.int32)


def sampling(rows: list[Row]) -> dict[str, np.ndarray]:
    """All columns, of a temperature, a top_p and a seed of each row's own."""
    zeros, seeds = np.zeros(len(rows), np.int32), int32(row.seed for row in rows)
    off = {name: np.full(len(rows), field.off, field.dtype) for name, field in SAMPLING_FIELDS.items()}
    none = dict.fromkeys(("wants_top", "wants_prompt_logprobs", "next_token", "kept_from", "masked"), zeros)
    return {
        **off,
        **none,
        "forced": zeros - 1,
        "temperature": (0.6 + 0.1 * seeds).astype(np.float32),
        "top_p": (0.99 - 0.01 * seeds).astype(np.float32),
        "top_k": 50 - seeds,
        "greedy": 1 - seeds % 2,
        "limit": np.full(len(rows), 1 << 20, np.int32),
        "seed_low": seeds.astype(np.uint32),
        "seed_high": (seeds + 7).astype(np.uint32),
    }


class Driven:
    """At most six rows in a step."""

    def __init__(self, data: int = 1, mesh: Mesh | None = None, params: Any = None) -> None:
        self.shape = CacheShape(data, slots=7, blocks=70, tokens_per_block=TOKENS_PER_BLOCK)
        self.runner = Runner(
            DummyKindModel(),
            jnp.asarray(make_table()) if params is None else params,
            buckets=BucketTable(decode=(DECODE,), prefill=(PREFILL,)),
            shape=self.shape,
            table_width=PREFILL.width,
            mesh=mesh,
            duties=RunnerDuties(moves_slots=True, moves_blocks=True, poisons=True),
        )
        self.runner.warm_up()

    def prefill(self, rows: list[Row], computed: int = 0) -> None:
        """Computes tokens of equal number from `computed` on, in chunks; appends one more token to each row."""
        end = len(rows[0].tokens)
        for start in range(computed, end, CHUNK):
            stop = min(start + CHUNK, end)
            tokens = np.zeros((len(rows), CHUNK), np.int32)
            for own, row in zip(tokens, rows, strict=True):
                own[: stop - start] = row.tokens[start:stop]
            step = PrefillStep(
                bucket=PREFILL,
                starts=np.full(len(rows), start, np.int32),
                num_new_tokens=np.full(len(rows), stop - start, np.int32),
                tokens=tokens,
                completes=np.full(len(rows), stop == end),
                samples=np.full(len(rows), stop == end),
                **self._common(rows, start, stop, CHUNK // TOKENS_PER_BLOCK),
            )
            found = self.runner.prefill(step, sampling(rows)).result()
        self._append(rows, found)

    def decode(self, rows: list[Row], count: int = 1) -> None:
        """Appends `count` more tokens to rows of equal length."""
        for _ in range(count):
            start = len(rows[0].tokens) - 1
            step = DecodeStep(bucket=DECODE, **self._common(rows, start, start + 1, 1))
            self._append(rows, self.runner.decode(step, None, None, False).result())

    def restore(self, rows: list[Row], length: int, states: np.ndarray) -> None:
        """`length` tokens of each row into its slot; its tokens may be more by one."""
        self.runner.restore(
            int32(row.dp_rank for row in rows),
            int32(row.slot for row in rows),
            np.full(len(rows), length, np.int32),
            int32(row.tokens[-1] for row in rows),
            [row.blocks[: -(-length // TOKENS_PER_BLOCK)] for row in rows],
            sampling(rows),
            states,
        )

    def states(self, rows: list[Row]) -> np.ndarray:
        dp_rank = int32(row.dp_rank for row in rows)
        lengths = int32(len(row.tokens) - 1 for row in rows)
        return self.runner.read_slots(dp_rank, int32(row.slot for row in rows), lengths).result()

    def _common(self, rows: list[Row], start: int, stop: int, most: int) -> dict[str, Any]:
        first, last = -(-start // TOKENS_PER_BLOCK), -(-stop // TOKENS_PER_BLOCK)
        new_blocks = np.full((len(rows), most), -1, np.int32)
        for own, row in zip(new_blocks, rows, strict=True):
            own[: last - first] = row.blocks[first:last]
        return {
            "sequences": [None] * len(rows),
            "dp_rank": int32(row.dp_rank for row in rows),
            "row": np.arange(len(rows), dtype=np.int32),
            "slots": int32(row.slot for row in rows),
            "first_new_block": np.full(len(rows), first, np.int32),
            "new_blocks": new_blocks,
        }

    def _append(self, rows: list[Row], found: Any) -> None:
        assert found.finite.all()
        for row, token in zip(rows, found.tokens[:, 0], strict=True):
            row.tokens.append(int(token))
