"""Sampler: time per row at the released vocabulary of 129,280, against a plain argmax.

    python benchmarks/sampler.py [--batch 1 32 256]

One compiled program, as in the engine: what a line names is asked for by the rows, and everything else is in the
program too, unused. "greedy" is thus what a step pays of which no request wants anything. Only "drafts" (every row
judges one) is a program of its own. All take turns within one run with `jnp.argmax` of the same logits, and the best of
several calls counts, so that the ratios mean something on a machine that is not quiet.
"""

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from deepinfer_jax.sampling import (
    GREEDY_TEMPERATURE,
    MAX_EDITS,
    Adjustments,
    DraftRows,
    SamplingRows,
    draw_draft,
    plain_rows,
    sample,
)

VOCAB, NUM_TOP, ROUNDS = 129_280, 1000, 7


def requests(batch: int) -> dict[str, SamplingRows]:
    """Rows that all want the same."""
    number = jnp.arange(batch, dtype=jnp.int32)
    plain = plain_rows(batch).replace(position=number)
    wide = plain.replace(temperature=jnp.full(batch, 0.8, jnp.float32))
    return {
        "greedy": plain.replace(
            greedy=jnp.ones(batch, jnp.bool_), temperature=jnp.full(batch, GREEDY_TEMPERATURE, jnp.float32)
        ),
        "temperature": wide,
        "top-k 50": wide.replace(top_k=jnp.full(batch, 50, jnp.int32)),
        "top-p 0.95": wide.replace(top_p=jnp.full(batch, 0.95, jnp.float32)),
        "min-p 0.05": wide.replace(min_p=jnp.full(batch, 0.05, jnp.float32)),
        "top-k and top-p": wide.replace(top_k=jnp.full(batch, 50, jnp.int32), top_p=jnp.full(batch, 0.95, jnp.float32)),
        "biases": wide.replace(edits=number),
        "penalties": wide.replace(counts=number, presence=jnp.full(batch, 0.5, jnp.float32)),
        "mask": wide.replace(mask=number),
        "raw log-probs": wide.replace(raw_logprobs=jnp.ones(batch, jnp.bool_)),
        "top lists": wide,
    }


def adjustments(batch: int) -> Adjustments:
    """Tables of one row per sequence."""
    edits = jnp.zeros((batch, MAX_EDITS), jnp.int32)
    return Adjustments(
        edit_ids=edits + jnp.arange(MAX_EDITS),
        edit_values=edits + 0.5,
        edit_until=edits + 2**30,
        counts=jnp.zeros((batch, VOCAB), jnp.int32).at[:, ::7].set(2),
        masks=jnp.full((batch, VOCAB // 32), 0x0F0F0F0F, jnp.uint32),
    )


def best_times(programs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Shortest seconds of each; a first call is not counted."""
    for program in programs.values():
        jax.block_until_ready(program())
    best = dict.fromkeys(programs, float("inf"))
    for _ in range(rounds):
        for name, program in programs.items():
            started = time.perf_counter()
            jax.block_until_ready(program())
            best[name] = min(best[name], time.perf_counter() - started)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--smoke", action="store_true", help="a few seconds, to see that it runs")
    arguments = parser.parse_args()
    batches: list[int] = [1] if arguments.smoke else arguments.batch
    rounds = 1 if arguments.smoke else ROUNDS
    chosen = jax.jit(functools.partial(sample, num_top=NUM_TOP))
    argmax = jax.jit(functools.partial(jnp.argmax, axis=-1))
    results: list[dict[str, float]] = []
    for batch in batches:
        logits = jax.random.normal(jax.random.key(0), (batch, VOCAB)) * 3
        tables, wanted = adjustments(batch), requests(batch)
        programs: dict[str, Callable[[], Any]] = {"argmax": functools.partial(argmax, logits)}
        for name, rows in wanted.items():
            programs[name] = functools.partial(
                chosen, logits, rows, tables=tables, wants_top=jnp.asarray(name == "top lists")
            )
        drafts = DraftRows(*jax.jit(functools.partial(draw_draft, place=0))(logits[:, ::-1], wanted["temperature"]))
        programs["drafts"] = functools.partial(
            chosen, logits, wanted["temperature"], tables=tables, drafts=drafts, wants_top=jnp.asarray(False)
        )
        results.append(best_times(programs, rounds))
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, vocabulary {VOCAB}; microseconds per row (x argmax)")
    print(f"{'rows want':18}" + "".join(f"{f'batch {batch}':>20}" for batch in batches))
    for name in results[0]:
        cells = [
            f"{1e6 * own[name] / batch:12.1f} ({own[name] / own['argmax']:4.1f})"
            for own, batch in zip(results, batches, strict=True)
        ]
        print(f"{name:18}" + "".join(f"{cell:>20}" for cell in cells))


if __name__ == "__main__":
    main()
