"""`KernelChoice`: the implementation of each kernel, decided once from the devices that will run the program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import jax

# GPUs for which `make gpu-compile` compiles every Triton kernel. A device kind that contains one of these words
# is taken for that GPU (so "GH200" and "GB200" are covered by "H200" and "B200"); any other GPU runs plain XLA.
TRITON_GPUS = ("A100", "H100", "H200", "B200")

type Implementation = Literal["reference", "triton"]


@dataclass(frozen=True)
class KernelChoice:
    """The implementation of every kernel, static under jit (frozen and hashable).

    The default is the plain XLA definition everywhere, which runs on any backend. It is chosen from the
    *target* devices, never from the ones present, so that a program compiled for an absent GPU holds the
    kernels that GPU would run (design.md §7).

    Attributes:
        sparse_attention, experts: `"reference"` (plain XLA) or `"triton"` (Pallas, NVIDIA GPUs); another name is a
            ValueError. Sizes and types that a kernel does not take run the reference.
        interpret: run Pallas kernels in the Pallas interpreter, on any backend and about 100 times slower;
            for tests only, no constructor below sets it.
        batch_invariant: a row's result has the same bits for any neighbours, place in the batch, chunks and cache
            size (`rowwise.py`). Slower, and plain XLA everywhere; no constructor below sets it.
    """

    sparse_attention: Implementation = "reference"
    experts: Implementation = "reference"
    interpret: bool = False
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        known = get_args(Implementation.__value__)
        for operation in ("sparse_attention", "experts"):
            name = getattr(self, operation)
            if name not in known:
                raise ValueError(f"{operation} has no implementation {name!r}: choose one of {', '.join(known)}")

    @classmethod
    def for_platform(cls, platform: str, device_kind: str) -> KernelChoice:
        """The choice for one kind of device, e.g. `("cuda", "NVIDIA H100 80GB HBM3")` or `("cpu", "cpu")`.

        `platform` is what `jax.Device.platform` or a lowering platform calls it: "gpu" and "cuda" mean the same.
        """
        if platform in ("cuda", "gpu") and any(word in device_kind for word in TRITON_GPUS):
            return cls(sparse_attention="triton", experts="triton")
        return cls()

    @classmethod
    def for_devices(cls, devices: Sequence[jax.Device]) -> KernelChoice:
        """The choice for the devices of one program (real ones, or those of a compile-only topology).

        Raises:
            ValueError: there is no device, or they would not all run the same kernels.
        """
        choices = {cls.for_platform(device.platform, device.device_kind) for device in devices}
        if len(choices) != 1:
            kinds = sorted({f"{device.platform} {device.device_kind}" for device in devices})
            raise ValueError(
                f"one program runs one set of kernels, but the devices are {kinds or 'none'}: "
                "pass at least one device, all of the same kind"
            )
        return choices.pop()
