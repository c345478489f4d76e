"""Run by `test_fields.py` on a copy of the package with one scalar more, `least_id`; prints one JSON object.

No id below `least_id` is sampled. Its path: request, column, slot table, rows, filter; and its bytes.
"""

import json

import jax
import jax.numpy as jnp

from deepinfer_jax.cache.pools import CacheShape
from deepinfer_jax.engine.requests.sampling_params import SamplingParams
from deepinfer_jax.memory.parts import slot_table_bytes
from deepinfer_jax.runtime.slot_table import init_slot_table
from deepinfer_jax.runtime.step_input import PREFILL_COLUMNS, RESTORE_COLUMNS
from deepinfer_jax.sampling import SamplerState, plain_rows, sample_fn
from tests.support.toy import VOCAB, random_prompt, run, tokens, toy_engine

LEAST = 30


def refused() -> str:
    try:
        SamplingParams(least_id=-1)
    except ValueError as error:
        return str(error)
    return ""


def sampled() -> dict[str, list[int]]:
    """Tokens of requests with and without it, side by side in the same steps."""
    engine, given = toy_engine(), {"free": {}, "bound": {"least_id": LEAST}}
    for name, scalars in given.items():
        for i in range(3):
            params = SamplingParams(max_tokens=12, ignore_eos=True, seq_seed=i, **scalars)
            engine.add_request("u", f"{name} {i}", params, random_prompt(5, seed=i))
    results = run(engine)
    return {name: [token for i in range(3) for token in tokens(results[f"{name} {i}"])] for name in given}


def researched() -> dict[str, list[int]]:
    """Tokens of the research sampler."""

    def draw(state: SamplerState) -> list[int]:
        keys, logits = jax.random.split(jax.random.key(0), 50), jnp.sin(jnp.arange(VOCAB, dtype=jnp.float32))
        drawn = jax.vmap(lambda key: sample_fn(logits, state, key, jnp.zeros(1, jnp.int32))[0])(keys)
        return [int(token) for token in drawn]

    return {"free": draw(SamplerState()), "bound": draw(SamplerState(least_id=LEAST))}


def main() -> None:
    table = init_slot_table(CacheShape(data=1, slots=3, blocks=1, tokens_per_block=4), 1, VOCAB)
    kept, row = table.sampling.least_id, plain_rows(2).least_id
    found = {
        "refused": refused(),
        "greedy": SamplingParams(temperature=0, least_id=LEAST).least_id,
        "columns": [names.count("least_id") for names in (PREFILL_COLUMNS, RESTORE_COLUMNS)],
        "slots": [kept.tolist(), str(kept.dtype)],
        "rows": [row.tolist(), str(row.dtype)],
        "bytes": slot_table_bytes(VOCAB, 0).slot,
        "sampled": sampled(),
        "researched": researched(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
