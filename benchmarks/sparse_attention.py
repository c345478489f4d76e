"""Sparse attention: time of every implementation that this machine runs, at the shapes of the tests and kernels.

    python benchmarks/sparse_attention.py

On a GPU: the released decode shapes, Triton against plain XLA. On CPU: plain XLA at the small models' shapes (a
Pallas kernel would only be interpreted there). Implementations take turns within one run, and the best of many calls
counts, so that their ratio means something on a machine that is not quiet.
"""

import argparse
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from deepinfer_jax.kernels.choice import KernelChoice
from deepinfer_jax.kernels.sparse_attention import sparse_attention
from deepinfer_jax.kernels.sparse_attention.shapes import RELEASED_DECODE, SMALL

SECONDS = 1.0  # per shape


def best_times(programs: Sequence[Callable[..., jax.Array]], arguments: tuple[Any, ...], limit: float) -> list[float]:
    """Shortest seconds of each program within `limit` seconds; compilation and a first call are not counted."""
    for program in programs:
        jax.block_until_ready(program(*arguments))
    best = [float("inf")] * len(programs)
    end = time.perf_counter() + limit
    while time.perf_counter() < end:
        for i, program in enumerate(programs):
            started = time.perf_counter()
            jax.block_until_ready(program(*arguments))
            best[i] = min(best[i], time.perf_counter() - started)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="a few seconds, to see that it runs")
    limit = 0.01 if parser.parse_args().smoke else SECONDS
    device = jax.devices()[0]
    choice = KernelChoice.for_devices([device])
    choices = [KernelChoice()] if choice == KernelChoice() else [KernelChoice(), choice]
    shapes = SMALL if device.platform == "cpu" else RELEASED_DECODE
    print(f"{device.device_kind}, jax {jax.__version__}; microseconds per call, best of {limit} s")
    print(f"{'shape':22}{'rows/s':>12}" + "".join(f"{one.sparse_attention:>12}" for one in choices) + "  XLA / kernel")
    for shape in shapes:
        programs = [jax.jit(functools.partial(sparse_attention, **shape.options, choice=one)) for one in choices]
        times = best_times(programs, shape.random_arguments(), limit)
        ratio = f"{times[0] / times[1]:10.2f}" if len(times) > 1 else f"{'-':>10}"
        rows = f"{shape.batch * shape.time / min(times):12,.0f}"
        print(f"{shape.name:22}{rows}" + "".join(f"{1e6 * t:12.0f}" for t in times) + ratio, flush=True)


if __name__ == "__main__":
    main()
