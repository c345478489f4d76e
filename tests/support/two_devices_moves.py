"""Run in a process of its own with two virtual CPU devices; prints one JSON object for `test_moves.py`."""

import json
import os
import re

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tests.support.driven import TOKENS_PER_BLOCK, Driven, Row
from tests.support.toy import make_table, random_prompt

LENGTH = 11


def rows(shift: int) -> list[Row]:
    """Three of each dp rank, in the same slots and blocks there; shifted, each at the other index."""
    return [
        Row(
            random_prompt(LENGTH, seed=i),
            list(range(20 * (i // 2) + 3 * shift, 20 * (i // 2) + 10)),
            slot=i // 2 + shift,
            seed=i,
            dp_rank=(i + shift) % 2,
        )
        for i in range(6)
    ]


if __name__ == "__main__":
    mesh = jax.make_mesh((2, 1), ("data", "expert"), axis_types=(AxisType.Auto, AxisType.Auto))
    params = jax.device_put(make_table(), NamedSharding(mesh, PartitionSpec()))
    on, other = (Driven(data=2, mesh=mesh, params=params) for _ in range(2))
    stayed, moved = rows(0), rows(1)
    on.prefill(stayed)
    other.runner.poison([list(range(70))] * 2, [list(range(7)), list(range(7))])
    used = -(-LENGTH // TOKENS_PER_BLOCK)
    for row, new in zip(stayed, moved, strict=True):
        new.tokens = list(row.tokens)
        contents = on.runner.read_blocks(row.dp_rank, row.blocks[:used]).result()
        other.runner.write_blocks(new.dp_rank, new.blocks[:used], contents)
    other.restore(moved, LENGTH, on.states(stayed))
    on.decode(stayed, 9)
    other.decode(moved, 9)
    texts = [program.as_text() for program in other.runner._programs.state_ops.values()]
    print(
        json.dumps(
            {
                "stayed": [row.tokens for row in stayed],
                "moved": [row.tokens for row in moved],
                "devices": len(jax.tree.leaves(other.runner._state.cache)[0].devices()),  # type: ignore[union-attr]
                "gathered": [shape for text in texts for shape in re.findall(r"= (\S+) all-gather\(", text)],
            }
        )
    )
