"""What an engine keeps on each device, and what fits (design.md §6): from shapes alone, nothing is allocated.

A mesh is data x expert. Weights lie as `sharding.py` says; each dp rank has its own blocks and slots, which every
device of that index holds; temporaries are those of one dp rank's rows.
"""

import bisect
import contextlib
import dataclasses
import functools
import math
import os
from collections.abc import Mapping
from pathlib import Path

import jax

from deepinfer_jax.config.model_config import ModelConfig
from deepinfer_jax.memory.parts import (
    checkpoint_bytes,
    feature_bytes,
    image_rows,
    slot_table_bytes,
    state_bytes,
    temporary_bytes,
    vision_temporary_bytes,
    weight_bytes,
)
from deepinfer_jax.scheduler.buckets import MAX_PREFILL_ROWS

_CONTEXTS = (1 << 10, 1 << 12, 1 << 15, 1 << 17, 1 << 20)
# What a container may use, and uses: cgroup version 2, then 1.
_CGROUP = Path("/sys/fs/cgroup")
_CGROUP_FILES = (
    (_CGROUP / "memory.max", _CGROUP / "memory.current"),
    (_CGROUP / "memory/memory.limit_in_bytes", _CGROUP / "memory/memory.usage_in_bytes"),
)


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
        blocks = math.ceil(context / self.tokens_per_block)
        return self.data_parallel_size * min(self.num_slots, self.num_blocks // blocks)

    def table(self) -> list[tuple[int, int]]:
        """(context, concurrency) for some contexts up to `max_model_len`."""
        contexts = [context for context in _CONTEXTS if context < self.max_model_len]
        return [(context, self.concurrency(context)) for context in (*contexts, self.max_model_len)]


def plan_memory(
    config: ModelConfig,
    *,
    precision: str = "reference",
    platform: str = "gpu",
    data_parallel_size: int = 1,
    expert_parallel_size: int = 1,
    memory: int | None = None,
    utilization: float = 0.9,
    max_num_seqs: int = 256,
    max_model_len: int | None = None,
    max_prefill_tokens: int | None = None,
    tokens_per_block: int = 128,
    packed: bool = True,
    num_drafts: int = 0,
    num_blocks: int | None = None,
    image_cache_bytes: int = 0,
    temporaries: int | None = None,
) -> MemoryPlan:
    """Plans the memory of an engine.

    Args:
        config: the model.
        precision: of weights and caches.
        platform: of the devices; a CPU keeps dense weights decoded (`checkpoint.leaves.leaf_form`).
        data_parallel_size, expert_parallel_size: the mesh; their product is the number of devices.
        memory: bytes of each device; None: not limited.
        utilization: share of `memory` that may be used, in (0, 1].
        max_num_seqs: most running sequences, over all dp ranks; each index has an equal share, rounded up.
        max_model_len: most tokens of one sequence; None: as many as the model was trained for, if memory allows.
        max_prefill_tokens: most new tokens of a prefill step, of each dp rank; None: `prefill_tokens(platform)`.
        tokens_per_block: tokens of one block.
        packed: caches in the storage formats.
        num_drafts: drafted tokens of a step.
        num_blocks: of each dp rank; None: what memory allows, at most what all sequences at their longest need.
        image_cache_bytes: for image features; they take more if one prefill step needs more (`image_rows`).
        temporaries: bytes of step programs, measured; None: by the formula of `memory.parts.temporary_bytes`.

    Raises:
        ValueError: a number that is not positive; a weight that the mesh cannot share; as `cache.paged.state_specs`.
            What does not fit is no error here: see `MemoryPlan.problem`.
    """
    _check_positive(
        data_parallel_size=data_parallel_size,
        expert_parallel_size=expert_parallel_size,
        memory=memory,
        utilization=utilization,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        max_prefill_tokens=max_prefill_tokens,
        num_blocks=num_blocks,
    )
    if max_prefill_tokens is None:
        max_prefill_tokens = prefill_tokens(platform)
    sizes = _Sizes(
        config=config,
        precision=precision,
        platform=platform,
        data=data_parallel_size,
        expert=expert_parallel_size,
        memory=memory,
        utilization=utilization,
        slots=math.ceil(max_num_seqs / data_parallel_size),
        max_prefill_tokens=max_prefill_tokens,
        tokens_per_block=tokens_per_block,
        packed=packed,
        num_drafts=num_drafts,
        image_cache_bytes=image_cache_bytes,
        temporaries=temporaries,
    )
    length = max_model_len
    if length is None:
        longest = config.text.max_position_embeddings
        length = sizes.longest(longest) if num_blocks is None else min(longest, num_blocks * tokens_per_block)
    pool = sizes.fitting_blocks(length) if num_blocks is None else num_blocks
    block, slot = sizes.state
    return MemoryPlan(
        data_parallel_size=data_parallel_size,
        expert_parallel_size=expert_parallel_size,
        checkpoint_bytes=checkpoint_bytes(config),
        parts=sizes.parts(length, pool),
        memory=memory,
        budget=sizes.budget,
        bytes_per_block=sum(block.values()),
        bytes_per_slot=sum(slot.values()),
        tokens_per_block=tokens_per_block,
        num_slots=sizes.slots,
        num_blocks=pool,
        max_model_len=length,
        image_rows=sizes.image_rows,
        problem=sizes.problem(length, pool),
    )


def _check_positive(**numbers: float | None) -> None:
    for name, number in numbers.items():
        if number is not None and number <= 0:
            raise ValueError(f"{name} is {number}; it must be positive")
    if (utilization := numbers["utilization"]) is not None and utilization > 1:
        raise ValueError(f"utilization is {utilization}; it must be in (0, 1]")


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """What is asked for but the lengths, and how bytes follow from a length."""

    config: ModelConfig
    precision: str
    platform: str
    data: int
    expert: int
    memory: int | None
    utilization: float
    slots: int
    max_prefill_tokens: int
    tokens_per_block: int
    packed: bool
    num_drafts: int
    image_cache_bytes: int
    temporaries: int | None

    @property
    def budget(self) -> int | None:
        return None if self.memory is None else int(self.memory * self.utilization)

    @functools.cached_property
    def weights(self) -> dict[str, int]:
        return weight_bytes(self.config, self.precision, self.platform, self.data, self.expert)

    @functools.cached_property
    def state(self) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes of one block and of one slot, by kind."""
        return state_bytes(self.config, self.precision, self.tokens_per_block, self.packed, self.num_drafts)

    @functools.cached_property
    def image_rows(self) -> int:
        """Rows of image features; every device holds all."""
        return image_rows(
            self.config,
            self.precision,
            cache_bytes=self.image_cache_bytes,
            data=self.data,
            prefill_tokens=self.max_prefill_tokens,
            prefill_rows=min(self.max_prefill_tokens, self.slots, MAX_PREFILL_ROWS),
        )

    def blocks(self, length: int) -> int:
        """Blocks of one sequence."""
        return math.ceil(length / self.tokens_per_block)

    def parts(self, length: int, num_blocks: int) -> dict[str, int]:
        """Bytes per device of each part, for sequences up to `length` and a pool of `num_blocks`."""
        block, slot = self.state
        temporaries = self.temporaries
        if temporaries is None:
            temporaries = temporary_bytes(
                self.config,
                self.precision,
                decode_rows=self.slots,
                decode_time=1 + self.num_drafts,
                prefill_tokens=self.max_prefill_tokens,
                context=length,
            )
        return {
            **self.weights,
            **{name: num_blocks * size for name, size in block.items()},
            **{name: self.slots * size for name, size in slot.items()},
            "slot table": self.slots * slot_table_bytes(self.config.text.vocab_size, self.num_drafts),
            "block tables": self.slots * self.blocks(length) * 4,
            "snapshots": 0,  # they lie in host memory (`EngineArgs.snapshot_memory_bytes`)
            "draft log-probabilities": self.slots * self.num_drafts * (self.config.text.vocab_size + 2) * 4,
            "image features": self.image_rows * feature_bytes(self.config, self.precision),
            # Of one program at a time, and the vision tower has its own.
            "temporaries": max(temporaries, vision_temporary_bytes(self.config, self.precision)),
        }

    def fitting_blocks(self, length: int) -> int:
        """Blocks that fit beside the other parts; no more than what all slots need at this length."""
        most = self.slots * self.blocks(length)
        block = sum(self.state[0].values())
        if self.budget is None or block == 0:
            return most
        return max(0, min(most, (self.budget - sum(self.parts(length, 0).values())) // block))

    def holds_one(self, length: int) -> bool:
        """Whether a sequence of this length fits, with everything else."""
        needed = sum(self.parts(length, self.blocks(length)).values())
        return self.budget is None or needed <= self.budget

    def longest(self, limit: int) -> int:
        """The longest sequence that fits, `limit` or whole blocks below it; one block if nothing fits."""
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

    def _too_little_memory(self, length: int, total: int) -> str:
        assert self.memory is not None and self.budget is not None
        devices = self.data * self.expert
        has = f"each has {format_bytes(self.budget)} ({self.utilization:g} of {format_bytes(self.memory)})"
        least = self._least_expert_size(length)
        remedy = (
            f"{self.data * least} devices can (data {self.data} x expert {least})"
            if least
            else "no number of devices can, since each holds all weights but experts and tables"
        )
        if (weights := sum(self.weights.values())) > self.budget:
            return f"the weights take {format_bytes(weights)} on each of {devices} device(s), but {has}; {remedy}"
        return (
            f"weights, {self.slots} running sequences, temporaries and one sequence of {length} tokens take "
            f"{format_bytes(total)} on each of {devices} device(s), but {has}; lower max_model_len, max_num_seqs or "
            f"max_num_batched_tokens, or use more devices: {remedy}"
        )

    def _least_expert_size(self, length: int) -> int | None:
        """The least expert axis with which a sequence of this length fits."""
        for expert in range(self.expert + 1, self.config.text.n_routed_experts + 1):
            with contextlib.suppress(ValueError):  # so many devices cannot share some weight
                if dataclasses.replace(self, expert=expert).holds_one(length):
                    return expert
        return None


def prefill_tokens(platform: str) -> int:
    """Most new tokens of a prefill step where prompts may be cut: enough to fill the experts' tiles.

    A CPU gains little by more (benchmarks/throughput.py), and pays for the padding of short prompts.
    """
    return 128 if platform == "cpu" else 2048


def format_bytes(size: int) -> str:
    """Three figures and a decimal unit, as device sizes are given: 141000000000 -> "141 GB"."""
    for unit, name in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size >= unit:
            value = size / unit
            return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {name}"
    return f"{size} B"


def device_memory(device: jax.Device) -> int:
    """Bytes that are free for an engine on a device.

    Of an accelerator, what its allocator may still hand out. Of a CPU, its share of the host's available memory:
    virtual devices share one host.
    """
    statistics = device.memory_stats()
    if statistics and "bytes_limit" in statistics:
        return statistics["bytes_limit"] - statistics.get("bytes_in_use", 0)
    return _available_host_memory() // len(jax.local_devices(backend=device.platform))


def _available_host_memory() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux: all of it
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit, usage in _CGROUP_FILES:
        try:
            available = min(available, int(limit.read_text()) - int(usage.read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return max(0, available)
