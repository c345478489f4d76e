"""A toy language model whose every distribution depends on the whole history, exactly, and its plain twin.

A step writes its tokens into blocks and reads the whole history back through the block tables. An integer hash of that
history picks a row of a random table as logits, if the slot remembers the same hash. So a token that comes out right
proves that blocks, slots, positions, chunks, padding and the dp rank are right.
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from deepinfer_jax.cache.pools import StateSpec
from deepinfer_jax.engine.args import EngineArgs
from deepinfer_jax.engine.environ import rearm
from deepinfer_jax.engine.handover.sequence_state import StateIdentity, state_layout
from deepinfer_jax.engine.llm_engine import LLMEngine
from deepinfer_jax.engine.loading import EngineParts, ModelParts, TokenParts, engine_devices, engine_mesh, engine_runner
from deepinfer_jax.engine.requests.outputs import RequestOutput
from deepinfer_jax.engine.requests.sampling_params import SamplingParams
from deepinfer_jax.engine.resolution import resolve_config
from deepinfer_jax.runtime.paged_model import Advanced, Drafted, Pick, StepBatch, StepModel
from deepinfer_jax.sampling import plain_rows, sample
from tests.support.engine_runs import drain

VOCAB = 64
EOS = 1
IMAGE = 3
MAX_POSITIONS = 40
DRAFT_BLOCK = 5
NUM_STATES = 1009
# The one-token prompt POISON leads to a state of its own, whose logits are NaN: no sampled text gets there by chance.
POISON = 60


def next_state(state: Any, token: Any) -> Any:
    poisoned = (state == 0) * (token == POISON)
    return poisoned * NUM_STATES + (1 - poisoned) * ((state * 31 + token + 7) % NUM_STATES)


def drafted_state(state: Any) -> Any:
    """The state whose row of the table the draft model takes for that of `state`: another one in a quarter of all."""
    return state + (state % 4 == 3) * (7 - 14 * (state > NUM_STATES // 2))


def draft_confidence(state: Any) -> Any:
    return (state % 7 - 3).astype(jnp.float32)


def make_table(seed: int = 0) -> np.ndarray:
    table = np.random.default_rng(seed).normal(size=(NUM_STATES + 1, VOCAB)).astype(np.float32) * 2
    table[:, EOS] = -4  # ends are rare unless asked for
    table[NUM_STATES] = np.nan
    return table


@dataclass(frozen=True)
class ToyModel:
    """A `StepModel`. A block holds tokens; a slot holds the hash of the whole history, and where it is not that of the
    tokens in the blocks, the logits are those of another history, or NaN if it is `strict`."""

    strict: bool = False
    batch_invariant = False
    vocab_size = VOCAB

    def state(self, tokens_per_block: int) -> dict[str, StateSpec]:
        integer = jnp.dtype(jnp.int32)
        return {
            "tokens": StateSpec("tokens", "block", (tokens_per_block,), integer),
            "hashes": StateSpec("hashes", "slot", (), integer, reach=1),
        }

    def advance(self, params: Array, cache: dict[str, Array], batch: StepBatch) -> Advanced:
        tokens, history = extend_history(cache["tokens"], batch, batch.tokens)
        read = at_new_tokens(fold(next_state, jnp.zeros(len(history), jnp.int32), history), batch)
        new = batch.tokens.reshape(read.shape)
        kept = fold_rows(next_state, rows_before(cache["hashes"], batch.slots, batch.starts, 1)[:, 0], new, batch)
        hidden = jnp.where(read == kept, read, NUM_STATES if self.strict else (read + kept + 1) % NUM_STATES)
        cache = {"tokens": tokens, "hashes": write_rows(cache["hashes"], batch, kept)}
        return Advanced(hidden[..., None].astype(jnp.float32), batch.lengths.reshape(-1), cache)

    def logits(self, params: Array, hidden: Array) -> Array:
        return params[hidden[..., 0].astype(jnp.int32)]

    def draft(
        self,
        params: Array,
        cache: dict[str, Array],
        slots: Array,
        lengths: Array,
        tokens: Array,
        count: int,
        pick: Pick,
    ) -> Drafted:
        state = next_state(rows_before(cache["hashes"], slots, lengths, 1)[:, 0], tokens.reshape(-1))
        drafts, logprobs, confidences = [], [], []
        for i in range(count):
            draft, own = pick(i, params[drafted_state(state)])
            drafts.append(draft)
            logprobs.append(own)
            confidences.append(draft_confidence(state))
            state = next_state(state, draft)
        return Drafted(jnp.stack(drafts, 1), jnp.stack(logprobs, 1), jnp.stack(confidences, 1))


TOY = ToyModel()


def extend_history(pool: Array, batch: StepBatch, new: Array) -> tuple[Array, Array]:
    """A pool [data, blocks, tokens_per_block] with new [data, rows, time], and what then lies in the blocks of each
    row, [data · rows, tokens]."""
    data, blocks, tokens_per_block = pool.shape
    offsets = jnp.arange(new.shape[2])
    positions = batch.starts[..., None] + offsets
    residents = jnp.take_along_axis(batch.tables, positions // tokens_per_block, axis=2, mode="clip")
    residents = jnp.where(offsets < batch.lengths[..., None], residents, blocks)  # dropped
    index = jnp.arange(data)[:, None, None]
    pool = pool.at[index, residents, positions % tokens_per_block].set(new, mode="drop")
    return pool, pool.at[index, batch.tables].get(mode="clip").reshape(batch.slots.size, -1)


def at_new_tokens(states: Array, batch: StepBatch) -> Array:
    """Of states [data · rows, tokens] those of the new tokens, [data · rows, time]."""
    positions = batch.starts.reshape(-1, 1) + jnp.arange(batch.tokens.shape[2])
    return jnp.take_along_axis(states, positions, axis=1, mode="clip")


def fold(step: Callable[[Array, Array], Array], first: Array, tokens: Array) -> Array:
    """The states after each of tokens [rows, time]: first [rows, ...] -> [rows, time, ...]."""
    _, states = jax.lax.scan(lambda state, token: (step(state, token),) * 2, first, tokens.T)
    return jnp.moveaxis(states, 0, 1)


def fold_rows(step: Callable[[Array, Array], Array], first: Array, tokens: Array, batch: StepBatch) -> Array:
    """`fold`, where a row may go on with what the row before it came to (`StepBatch.offsets`)."""
    if batch.offsets is None:
        return fold(step, first, tokens)

    def next_row(before: Array, row: tuple[Array, ...]) -> tuple[Array, Array]:
        offset, own, token = row
        state = step(jnp.where(offset > 0, before, own)[None], token)[0]
        return state, state

    _, states = jax.lax.scan(next_row, first[0], (batch.offsets.reshape(-1), first, tokens))
    return states[:, None]


def rows_before(ring: Array, slots: Array, starts: Array, reach: int) -> Array:
    """What a ring [data, slots, length, ...] holds of the last positions, [data · rows, reach, ...]; 0 before any.

    slots, starts: int32 [data, rows]."""
    positions = starts[..., None] + jnp.arange(-reach, 0)
    index = jnp.arange(len(ring))[:, None, None]
    rows = ring.at[index, slots[..., None], positions % ring.shape[2]].get(mode="clip")
    exist = (positions >= 0).reshape(*positions.shape, *[1] * (ring.ndim - 3))
    return jnp.where(exist, rows, 0).reshape(-1, *rows.shape[2:])


def write_rows(ring: Array, batch: StepBatch, new: Array) -> Array:
    """The ring with the last of the new rows [data · rows, time, ...]."""
    new = new.reshape(*batch.tokens.shape, *new.shape[2:])
    offsets, length = jnp.arange(new.shape[2]), ring.shape[2]
    last = (offsets < batch.lengths[..., None]) & (offsets >= batch.lengths[..., None] - length)
    slots = jnp.where(last, batch.slots[..., None], ring.shape[1])  # dropped
    places = (batch.starts[..., None] + offsets) % length
    return ring.at[jnp.arange(len(ring))[:, None, None], slots, places].set(new, mode="drop")


class ToyTokenizer:
    """One letter per id, from chr(ord("0")) on; the text of EOS is "1"."""

    eos_token_id = EOS

    def encode(self, text: str) -> list[int]:
        if "!" in text:
            raise ValueError("'!' is not in this alphabet")
        return [ord(letter) - 48 for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(48 + token) for token in ids)


def history_logits(table: np.ndarray, history: list[int]) -> np.ndarray:
    state = 0
    for token in history:
        state = next_state(state, token)
    return table[state]


def greedy_twin(table: np.ndarray, prompt: list[int], count: int) -> list[int]:
    history = list(prompt)
    for _ in range(count):
        history.append(int(np.argmax(history_logits(table, history))))
    return history[len(prompt) :]


def sampled_twin(table: np.ndarray, prompt: list[int], params: SamplingParams, count: int) -> list[int]:
    """The tokens of a request on its own, without engine, cache or batch."""
    assert params.seq_seed is not None
    history = list(prompt)
    for _ in range(count):
        rows = plain_rows(1).replace(
            temperature=jnp.asarray([params.temperature], jnp.float32),
            greedy=jnp.asarray([params.greedy]),
            top_p=jnp.asarray([params.top_p], jnp.float32),
            top_k=jnp.asarray([params.top_k], jnp.int32),
            min_p=jnp.asarray([params.min_p], jnp.float32),
            seed=jnp.asarray([[params.seq_seed & 0xFFFFFFFF, params.seq_seed >> 32]], jnp.uint32),
            position=jnp.asarray([len(history)], jnp.int32),
        )
        history.append(int(_sample(jnp.asarray(history_logits(table, history))[None], rows).tokens[0]))
    return history[len(prompt) :]


_sample = jax.jit(sample)


def toy_parts(args: EngineArgs, *, chunk: int = 8, model: StepModel = TOY, max_programs: int = 2) -> EngineParts:
    """Stands in for `load_parts`; with four sequences or more, a step takes at most `chunk` tokens of each prompt.

    Of three programs two are for decode steps, of up to half as many rows and of all.
    """
    config = resolve_config(
        args,
        vocab_size=VOCAB,
        max_position_embeddings=MAX_POSITIONS,
        draft_block=DRAFT_BLOCK,
        most_prefill_tokens=4 * chunk,
        num_blocks=args.num_kv_blocks,
    )
    buckets = config.buckets(max_programs)
    mesh = engine_mesh(args, engine_devices(args))
    everywhere = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    runner = engine_runner(config, model, jax.device_put(make_table(), everywhere), buckets, mesh)
    declared = model.state(config.tokens_per_block)
    identity = StateIdentity("toy", "toy", "exact", config.tokens_per_block, state_layout(declared))
    return EngineParts(config, TokenParts(ToyTokenizer(), IMAGE), ModelParts(buckets, runner, identity, key="toy"))


def use_toy(**options: Any) -> AbstractContextManager[Any]:
    """While it lasts, every engine that is made runs the toy model."""
    return mock.patch("deepinfer_jax.engine.llm_engine.load_parts", partial(toy_parts, **options))


def toy_engine(
    *, chunk: int = 8, overlap: bool = True, model: StepModel = TOY, max_programs: int = 2, **kwargs: Any
) -> LLMEngine:
    """An engine with a toy model, small blocks and, unless `overlap`, no zero-overhead scheduling."""
    variable = "DEEPINFER_ZERO_OVERHEAD_SCHEDULING"
    defaults = {"model": "toy", "disable_log_stats": True, "max_num_seqs": 6, "tokens_per_block": 4}
    with (
        mock.patch.dict(os.environ, {} if overlap else {variable: "0"}),
        use_toy(chunk=chunk, model=model, max_programs=max_programs),
    ):
        rearm(variable)
        engine = LLMEngine(EngineArgs(**(defaults | kwargs)))
    rearm(variable)
    return engine


def run(engine: LLMEngine) -> dict[str, list[RequestOutput]]:
    """Steps until nothing is left; outputs by request id. Afterwards every block and slot is free."""
    results = drain(engine)
    assert engine.flush_inflight_reqs() == []  # at most rows whose sequence ended a step earlier
    engine.core.scheduler.check_idle()
    return results


def tokens(outputs: list[RequestOutput]) -> list[int]:
    return [output.token_id for output in outputs]


def random_prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(4, 50, length).tolist()
