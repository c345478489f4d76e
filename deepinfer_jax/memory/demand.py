"""What an engine needs of each device before its lengths are known, and how bytes follow from a length."""

import bisect
import contextlib
import dataclasses
import functools

from deepinfer_jax.config.model_config import ModelConfig
from deepinfer_jax.memory.device import prefill_tokens
from deepinfer_jax.memory.parts import (
    feature_bytes,
    image_rows,
    slot_table_bytes,
    state_bytes,
    temporary_bytes,
    vision_temporary_bytes,
    weight_bytes,
)
from deepinfer_jax.memory.units import format_bytes
from deepinfer_jax.scheduler import blocks_for, slots_for
from deepinfer_jax.scheduler.buckets import MAX_PREFILL_ROWS


@dataclasses.dataclass(frozen=True)
class MemoryDemand:
    """All that the memory plan of an engine depends on.

    Attributes:
        model: its configuration.
        precision: of weights and caches.
        platform: of the devices; a CPU keeps dense weights decoded (`checkpoint.leaves.leaf_form`).
        data_parallel_size, expert_parallel_size: the mesh; their product is the number of devices.
        memory: bytes of each device; None: not limited.
        utilization: share of `memory` that may be used, in (0, 1].
        max_num_seqs: most running sequences, over all dp ranks; each has an equal share, rounded up.
        max_model_len: most tokens of one sequence; None: as many as the model was trained for, if memory allows.
        max_prefill_tokens: most new tokens of a prefill step, of each dp rank; None: `prefill_tokens(platform)`.
        tokens_per_block: tokens of one block.
        packed: caches in the storage formats.
        num_drafts: drafted tokens of a step.
        num_blocks: of each dp rank; None: what memory allows, at most what all sequences at their longest need.
        image_cache_bytes: for image features; they take more if one prefill step needs more (`image_rows`).
        temporaries: bytes of step programs, measured; None: by the formula of `memory.parts.temporary_bytes`.

    Raises ValueError for a number that is not positive.
    """

    model: ModelConfig
    _: dataclasses.KW_ONLY
    precision: str = "reference"
    platform: str = "gpu"
    data_parallel_size: int = 1
    expert_parallel_size: int = 1
    memory: int | None = None
    utilization: float = 0.9
    max_num_seqs: int = 256
    max_model_len: int | None = None
    max_prefill_tokens: int | None = None
    tokens_per_block: int = 128
    packed: bool = True
    num_drafts: int = 0
    num_blocks: int | None = None
    image_cache_bytes: int = 0
    temporaries: int | None = None

    def __post_init__(self) -> None:
        for name in (
            *("data_parallel_size", "expert_parallel_size", "memory", "utilization", "max_num_seqs", "max_model_len"),
            *("max_prefill_tokens", "num_blocks"),
        ):
            number = getattr(self, name)
            if number is not None and number <= 0:
                raise ValueError(f"{name} is {number}; it must be positive")
        if self.utilization > 1:
            raise ValueError(f"utilization is {self.utilization}; it must be in (0, 1]")

    @property
    def budget(self) -> int | None:
        """Bytes of each device that may be used; None: not limited."""
        return None if self.memory is None else int(self.memory * self.utilization)

    @property
    def num_slots(self) -> int:
        """Running sequences of each dp rank."""
        return slots_for(self.max_num_seqs, self.data_parallel_size)

    @functools.cached_property
    def weights(self) -> dict[str, int]:
        """Bytes per device, by kind. Raises ValueError for a weight that the mesh cannot share."""
        return weight_bytes(
            self.model, self.precision, self.platform, self.data_parallel_size, self.expert_parallel_size
        )

    @functools.cached_property
    def state(self) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes of one block and of one slot, by kind."""
        return state_bytes(self.model, self.precision, self.tokens_per_block, self.packed, self.num_drafts)

    @functools.cached_property
    def image_rows(self) -> int:
        """Rows of image features; every device holds all."""
        return image_rows(
            self.model,
            self.precision,
            cache_bytes=self.image_cache_bytes,
            data=self.data_parallel_size,
            prefill_tokens=self._prefill_tokens,
            prefill_rows=min(self._prefill_tokens, self.num_slots, MAX_PREFILL_ROWS),
        )

    def parts(self, length: int, num_blocks: int) -> dict[str, int]:
        """Bytes per device of each part, for sequences up to `length` and a pool of `num_blocks`."""
        block, slot = self.state
        table = slot_table_bytes(self.model.text.vocab_size, self.num_drafts)
        temporaries = self.temporaries
        if temporaries is None:
            temporaries = temporary_bytes(
                self.model,
                self.precision,
                decode_rows=self.num_slots,
                decode_time=1 + self.num_drafts,
                prefill_tokens=self._prefill_tokens,
                context=length,
            )
        return {
            **self.weights,
            **{name: num_blocks * size for name, size in block.items()},
            **{name: self.num_slots * size for name, size in slot.items()},
            "slot table": self.num_slots * table.slot,
            "block tables": self.num_slots * self.blocks(length) * table.block_number,
            "snapshots": 0,  # they lie in host memory (`EngineArgs.snapshot_memory_bytes`)
            "draft log-probabilities": self.num_slots * table.drafts,
            "image features": self.image_rows * feature_bytes(self.model, self.precision),
            # Of one program at a time, and the vision tower has its own.
            "temporaries": max(temporaries, vision_temporary_bytes(self.model, self.precision)),
        }

    def blocks(self, length: int) -> int:
        """Blocks of one sequence."""
        return blocks_for(length, self.tokens_per_block)

    def fitting_blocks(self, length: int) -> int:
        """Blocks that fit beside the other parts; no more than what all slots need at this length."""
        most = self.num_slots * self.blocks(length)
        block = sum(self.state[0].values())
        if self.budget is None or block == 0:
            return most
        return max(0, min(most, (self.budget - sum(self.parts(length, 0).values())) // block))

    def holds_one(self, length: int) -> bool:
        """Whether a sequence of this length fits, with everything else."""
        needed = sum(self.parts(length, self.blocks(length)).values())
        return self.budget is None or needed <= self.budget

    def longest(self) -> int:
        """The longest sequence: what was asked for, or as long as the model, or the pool asked for, or memory allows.

        Where memory decides, whole blocks; one block if nothing fits.
        """
        if self.max_model_len is not None:
            return self.max_model_len
        limit = self.model.text.max_position_embeddings
        if self.num_blocks is not None:
            return min(limit, self.num_blocks * self.tokens_per_block)
        if self.holds_one(limit):
            return limit
        # No part shrinks when the length grows, so the lengths that fit come first.
        whole = range(self.tokens_per_block, limit, self.tokens_per_block)
        fit = bisect.bisect_left(whole, True, key=lambda length: not self.holds_one(length))
        return min(limit, max(1, fit) * self.tokens_per_block)

    def problem(self, length: int, num_blocks: int) -> str:
        """Why this does not run, or nothing."""
        needed = self.blocks(length)
        total = sum(self.parts(length, max(num_blocks, needed)).values())
        if self.budget is not None and total > self.budget:
            if self.holds_one(length):
                return (
                    f"with a pool of {num_blocks} blocks of {self.tokens_per_block} tokens each device holds "
                    f"{format_bytes(total)}, but has {format_bytes(self.budget)} for it; lower num_kv_blocks to "
                    f"{self.fitting_blocks(length)} or less, or leave it out"
                )
            return self._too_little_memory(length, total)
        if num_blocks < needed:
            return (
                f"a sequence of {length} tokens needs {needed} blocks of {self.tokens_per_block} tokens, but the pool "
                f"has {num_blocks}: at most {num_blocks * self.tokens_per_block} tokens; lower max_model_len or raise "
                "num_kv_blocks"
            )
        return ""

    @property
    def _prefill_tokens(self) -> int:
        return prefill_tokens(self.platform) if self.max_prefill_tokens is None else self.max_prefill_tokens

    def _too_little_memory(self, length: int, total: int) -> str:
        assert self.memory is not None and self.budget is not None
        data = self.data_parallel_size
        devices = data * self.expert_parallel_size
        has = f"each has {format_bytes(self.budget)} ({self.utilization:g} of {format_bytes(self.memory)})"
        least = self._least_expert_size(length)
        remedy = (
            f"{data * least} devices can (data {data} x expert {least})"
            if least
            else "no number of devices can, since each holds all weights but experts and tables"
        )
        if (weights := sum(self.weights.values())) > self.budget:
            return f"the weights take {format_bytes(weights)} on each of {devices} device(s), but {has}; {remedy}"
        return (
            f"weights, {self.num_slots} running sequences, temporaries and one sequence of {length} tokens take "
            f"{format_bytes(total)} on each of {devices} device(s), but {has}; lower max_model_len, max_num_seqs or "
            f"max_num_batched_tokens, or use more devices: {remedy}"
        )

    def _least_expert_size(self, length: int) -> int | None:
        """The least expert axis with which a sequence of this length fits."""
        for expert in range(self.expert_parallel_size + 1, self.model.text.n_routed_experts + 1):
            with contextlib.suppress(ValueError):  # so many devices cannot share some weight
                if dataclasses.replace(self, expert_parallel_size=expert).holds_one(length):
                    return expert
        return None
