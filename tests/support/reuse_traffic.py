"""Texts that share beginnings, block by block, and the account of what became of each request."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from deepinfer_jax.engine.requests.outputs import RequestOutput
from deepinfer_jax.engine.requests.sampling_params import SamplingParams
from deepinfer_jax.sampling import plain_rows, sample
from tests.support.toy import MAX_POSITIONS, VOCAB, make_table, next_state

BLOCK, MOST_TOKENS = 4, 20
_BLOCKS = [[5, 6, 7, 8], [9, 10, 11, 12]]


def text(blocks: Iterable[int], tail: int) -> list[int]:
    """Whole blocks of two kinds, and up to a block of the tokens of the first."""
    return [token for block in blocks for token in _BLOCKS[block]] + _BLOCKS[0][:tail]


texts = st.builds(text, st.lists(st.sampled_from([0, 0, 1]), max_size=7), st.integers(1, BLOCK))
wanted = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, MOST_TOKENS),
    temperature=st.sampled_from([0.0, 0.9]),
    seq_seed=st.integers(0, 2),
    ignore_eos=st.just(True),
    prompt_logprobs=st.sampled_from([False, False, False, True]),
)


def alone(prompt: list[int], params: SamplingParams, output: list[int]) -> list[int]:
    """The token that the toy and the sampler give after each prefix of prompt + output.

    If it equals `output`, then by induction the request would have generated the same on its own.
    """
    state, rows = fold_text(prompt), np.zeros((MOST_TOKENS, VOCAB), np.float32)
    for row, token in zip(rows, output, strict=False):
        row[:] = _TABLE[state]
        state = next_state(state, token)

    def each(value: Any, dtype: Any) -> jax.Array:
        return jnp.full(MOST_TOKENS, value, dtype)

    sampling = plain_rows(MOST_TOKENS).replace(
        temperature=each(params.temperature, jnp.float32),
        greedy=each(params.greedy, bool),
        top_p=each(params.top_p, jnp.float32),
        top_k=each(params.top_k, jnp.int32),
        seed=jnp.tile(np.asarray([params.seq_seed, 0], np.uint32), (MOST_TOKENS, 1)),
        position=len(prompt) + jnp.arange(MOST_TOKENS, dtype=jnp.int32),
    )
    return np.asarray(_sample(rows, sampling).tokens)[: len(output)].tolist()


_TABLE = make_table()
_sample = jax.jit(sample)


def fold_text(prompt: list[int]) -> int:
    state = 0
    for token in prompt:
        state = next_state(state, token)
    return state


def check(outputs: list[RequestOutput], prompt: list[int], params: SamplingParams) -> str:
    """The outputs of one request are a prefix of what it has alone, whatever was restored, and then one end.

    Returns the reason of the end.
    """
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    given = [output for output in outputs if not output.message]
    found = [output.token_id for output in given]
    assert found == alone(prompt, params, found)
    assert [output.num_output_tokens for output in given] == list(range(1, len(given) + 1))
    for output in given[:1]:
        cached = output.num_cached_tokens
        assert cached % BLOCK == 0 and 0 <= cached < len(prompt)
        if params.prompt_logprobs:
            assert cached == 0 and len(output.prompt_logprobs) == len(prompt) - 1
    if outputs[-1].finish_reason == "length":
        assert len(given) == min(params.max_tokens, MAX_POSITIONS + 1 - len(prompt))
    return outputs[-1].finish_reason


def outputs_by_request(*parts: Iterable[RequestOutput]) -> dict[str, list[RequestOutput]]:
    found: dict[str, list[RequestOutput]] = {}
    for part in parts:
        for output in part:
            found.setdefault(output.request_id, []).append(output)
    return found
