"""What an engine keeps on each device, and what fits (design.md §6): from shapes alone, nothing is allocated.

A mesh is data x expert. Weights lie as `sharding.py` says; each dp rank has its own blocks and slots, which every
device of that rank holds; temporaries are those of one dp rank's rows.
"""

import dataclasses
from collections.abc import Mapping

from deepinfer_jax.memory.demand import MemoryDemand
from deepinfer_jax.memory.parts import checkpoint_bytes
from deepinfer_jax.scheduler import blocks_for

_CONTEXTS = (1 << 10, 1 << 12, 1 << 15, 1 << 17, 1 << 20)


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes per device, and what fits.

    Attributes:
        data_parallel_size, expert_parallel_size: the mesh.
        checkpoint_bytes: of all released tensors together.
        parts: bytes per device of each part.
        memory: bytes of one device; None: not limited.
        budget: how much of it the parts may take; None: not limited.
        bytes_per_block, bytes_per_slot: of one block and of one running sequence, besides the tables.
        tokens_per_block: tokens of one block.
        num_slots, num_blocks: of each dp rank.
        max_model_len: most tokens of one sequence.
        image_rows: rows of image features; 0 without a vision tower.
        problem: a sentence that says why no engine of this plan can run; empty if one can.
    """

    data_parallel_size: int
    expert_parallel_size: int
    checkpoint_bytes: int
    parts: Mapping[str, int]
    memory: int | None
    budget: int | None
    bytes_per_block: int
    bytes_per_slot: int
    tokens_per_block: int
    num_slots: int
    num_blocks: int
    max_model_len: int
    image_rows: int
    problem: str

    @property
    def total(self) -> int:
        """Bytes per device of all parts."""
        return sum(self.parts.values())

    @property
    def bytes_per_token(self) -> float:
        """Bytes of a token in the block pools (released: 890)."""
        return self.bytes_per_block / self.tokens_per_block

    def concurrency(self, context: int) -> int:
        """How many sequences of `context` tokens can run at once, over all dp ranks."""
        blocks = blocks_for(context, self.tokens_per_block)
        return self.data_parallel_size * min(self.num_slots, self.num_blocks // blocks)

    def table(self) -> list[tuple[int, int]]:
        """(context, concurrency) for some contexts up to `max_model_len`."""
        contexts = [context for context in _CONTEXTS if context < self.max_model_len]
        return [(context, self.concurrency(context)) for context in (*contexts, self.max_model_len)]


def plan_memory(demand: MemoryDemand) -> MemoryPlan:
    """Plans the memory of an engine.

    Raises:
        ValueError: a weight that the mesh cannot share; as `cache.paged.state_specs`. What does not fit is no error
            here: see `MemoryPlan.problem`.
    """
    length = demand.longest()
    num_blocks = demand.fitting_blocks(length) if demand.num_blocks is None else demand.num_blocks
    block, slot = demand.state
    return MemoryPlan(
        data_parallel_size=demand.data_parallel_size,
        expert_parallel_size=demand.expert_parallel_size,
        checkpoint_bytes=checkpoint_bytes(demand.model),
        parts=demand.parts(length, num_blocks),
        memory=demand.memory,
        budget=demand.budget,
        bytes_per_block=sum(block.values()),
        bytes_per_slot=sum(slot.values()),
        tokens_per_block=demand.tokens_per_block,
        num_slots=demand.num_slots,
        num_blocks=num_blocks,
        max_model_len=length,
        image_rows=demand.image_rows,
        problem=demand.problem(length, num_blocks),
    )
