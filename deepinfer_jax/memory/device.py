"""What a device has for an engine."""

import os
from pathlib import Path

import jax

# What a container may use, and uses: cgroup version 2, then 1.
_CGROUP = Path("/sys/fs/cgroup")
_CGROUP_FILES = (
    (_CGROUP / "memory.max", _CGROUP / "memory.current"),
    (_CGROUP / "memory/memory.limit_in_bytes", _CGROUP / "memory/memory.usage_in_bytes"),
)


def prefill_tokens(platform: str) -> int:
    """Most new tokens of a prefill step where prompts may be cut: enough to fill the experts' tiles.

    A CPU gains little by more (benchmarks/throughput.py), and pays for the padding of short prompts.
    """
    return 128 if platform == "cpu" else 2048


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
