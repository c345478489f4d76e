"""Compiles every kernel for A100, H100 and B200 on a machine without a GPU: `make gpu-compile` (JX §1.4 level B).

    python -m deepinfer_jax.kernels.aot [--gpu NAME]

It proves that XLA, Triton and ptxas accept each kernel at released sizes on each architecture (data types, shared
memory, instructions). It says nothing about results or speed. Every case compiles in a child process of its own,
because a fatal error inside LLVM ends the process. It needs the CUDA plugin of the installed jax version, without
the CUDA libraries: kernels_pallas/gpu.mk makes such an environment.

The target descriptions and compiler options below are unstable surfaces of jax and XLA; nothing else uses them.
"""

import argparse
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from deepinfer_jax.kernels.choice import KernelChoice
from deepinfer_jax.kernels.experts import routed_experts
from deepinfer_jax.kernels.experts.shapes import RELEASED as RELEASED_EXPERTS
from deepinfer_jax.kernels.launches import count_launches
from deepinfer_jax.kernels.sparse_attention import sparse_attention
from deepinfer_jax.kernels.sparse_attention.shapes import RELEASED_DECODE

TRITON_CALL = "__gpu$xla.gpu.triton"  # the custom call that holds a Pallas-Triton kernel
PALLAS_KERNELS = ("sparse_attention", "expert_gate_up", "expert_down")
CHILD_SECONDS = 600  # a step program takes about one minute of a quiet machine


@dataclass(frozen=True)
class Gpu:
    """What the compiler needs to know of a GPU that is not present.

    Attributes:
        name: short name for the command line.
        kind: the name the driver gives, `jax.Device.device_kind`.
        capability: compute capability; `accelerated` adds the architecture-specific instructions (sm_90a, sm_100a).
        cores, fpus_per_core, clock_ghz, shared_optin, shared_per_core, bandwidth, l2, memory: counts, bytes, bytes/s.
    """

    name: str
    kind: str
    capability: tuple[int, int]
    accelerated: bool
    cores: int
    fpus_per_core: int
    clock_ghz: float
    shared_optin: int
    shared_per_core: int
    bandwidth: int
    l2: int
    memory: int

    @property
    def target_config(self) -> str:
        """XLA's GpuTargetConfig in text form."""
        extension = " feature_extension: ACCELERATED_FEATURES" if self.accelerated else ""
        major, minor = self.capability
        return (
            "gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32 "
            f"shared_memory_per_block: 49152 shared_memory_per_core: {self.shared_per_core} "
            f"threads_per_core_limit: 2048 core_count: {self.cores} fpus_per_core: {self.fpus_per_core} "
            "block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 "
            f"memory_bandwidth: {self.bandwidth} l2_cache_size: {self.l2} clock_rate_ghz: {self.clock_ghz} "
            f"device_memory_size: {self.memory} shared_memory_per_block_optin: {self.shared_optin} "
            f"cuda_compute_capability {{ major: {major} minor: {minor}{extension} }} "
            "registers_per_core_limit: 65536 registers_per_block_limit: 65536 } "
            'platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 } '
            f'device_description_str: "{self.kind}"'
        )


GPUS = (
    Gpu(
        "A100", "NVIDIA A100-SXM4-80GB", (8, 0), False, 108, 64, 1.41,
        166_912, 167_936, 2_039_000_000_000, 41_943_040, 85_000_000_000,
    ),
    Gpu(
        "H100", "NVIDIA H100 80GB HBM3", (9, 0), True, 132, 128, 1.98,
        232_448, 233_472, 3_352_320_000_000, 52_428_800, 84_978_434_048,
    ),
    Gpu(
        "B200", "NVIDIA B200", (10, 0), True, 148, 128, 1.965,
        232_448, 233_472, 8_000_000_000_000, 132_644_864, 190_000_000_000,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One program to compile.

    Attributes:
        kernel, shape: what the table calls it.
        program: takes `arguments`, which are `jax.ShapeDtypeStruct`s.
        pallas: whether it must hold a Pallas kernel, which then must not spill registers.
    """

    kernel: str
    shape: str
    program: Callable[..., Any]
    arguments: tuple[Any, ...]
    pallas: bool


def all_cases(choice: KernelChoice) -> list[Case]:
    """Every kernel at every released shape as `choice` runs it, each with its plain XLA twin for comparison."""
    operations: tuple[tuple[Callable[..., Any], str, tuple[Any, ...]], ...] = (
        (sparse_attention, choice.sparse_attention, RELEASED_DECODE),
        (routed_experts, choice.experts, RELEASED_EXPERTS),
    )
    cases = []
    for operation, implementation, shapes in operations:
        name = operation.__name__
        for shape in shapes:
            program, arguments = functools.partial(operation, **shape.options), shape.abstract_arguments()
            chosen, twin = (functools.partial(program, choice=one) for one in (choice, KernelChoice()))
            cases.append(Case(name, shape.name, chosen, arguments, implementation == "triton"))
            cases.append(Case(f"{name}, XLA", shape.name, twin, arguments, False))
    return cases


def topology_of(gpu: Gpu) -> topologies.TopologyDescription:
    """One device of this kind, to compile for and not to run on."""
    return topologies.get_topology_desc(platform="cuda", target_config=gpu.target_config, topology="1x1x1")


def compile_for(
    topology: topologies.TopologyDescription,
    program: Callable[..., Any],
    arguments: tuple[Any, ...],
    *,
    donated: tuple[int, ...] = (),
    refuse_spills: bool = False,
) -> tuple[Any, float]:
    """The compiled program, and the seconds that this took.

    Args:
        topology: of `topology_of`.
        program: takes `arguments`, trees of `jax.ShapeDtypeStruct`s.
        donated: arguments whose memory the results take.
        refuse_spills: whether a kernel that spills registers is an error.
    """
    mesh = topologies.make_mesh(topology, (1,), ("x",))
    placed = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, PartitionSpec())),
        arguments,
    )
    options = {
        "xla_gpu_enable_cub_radix_sort": False,  # it would ask a device that is not there
        "xla_gpu_fail_ptx_compilation_on_register_spilling": refuse_spills,
    }
    started = time.perf_counter()
    with jax.set_mesh(mesh):
        lowered = jax.jit(program, donate_argnums=donated).lower(*placed)
        compiled = lowered.compile(compiler_options=options)
    return compiled, time.perf_counter() - started


def compile_case(gpu: Gpu, number: int) -> dict[str, float]:
    """Compile case `number` of `all_cases` for `gpu` in this process: {"seconds", "temp_bytes", "launches", "syncs"}.

    Raises:
        RuntimeError: XLA, Triton or ptxas refuses, a kernel spills registers, or the choice for this GPU's
            devices holds no kernel where there should be one, or it waits for the device beside one.
    """
    topology = topology_of(gpu)
    case = all_cases(KernelChoice.for_devices(topology.devices))[number]
    compiled, seconds = compile_for(topology, case.program, case.arguments, refuse_spills=case.pallas)
    text = compiled.as_text()
    if case.pallas != (TRITON_CALL in text):
        raise RuntimeError(f"the program for {gpu.kind} holds {'no' if case.pallas else 'a'} Pallas kernel")
    launches = count_launches(text)
    if case.pallas and launches.syncs:
        raise RuntimeError(f"the program for {gpu.kind} waits {launches.syncs} times for the device")
    temporary = compiled.memory_analysis().temp_size_in_bytes
    return {"seconds": seconds, "temp_bytes": temporary, "launches": launches.kernels, "syncs": launches.syncs}


def kernel_registers(log: str) -> dict[str, int]:
    """Registers of each thread of the Pallas kernels that ptxas reports in `log`."""
    entries = re.findall(r"Compiling entry function '(\w+)'.*?Used (\d+) registers", log, re.DOTALL)
    return {name: int(registers) for name, registers in entries if name.startswith(PALLAS_KERNELS)}


def run_child(module: str, *arguments: str) -> dict[str, Any] | str:
    """Runs `python -m module` in a process of its own: the JSON object that it prints last, or why there is none.

    `kernel_registers` of what it compiled stand in it as "registers".
    """
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",  # skips the check for a CUDA driver
        "TF_CPP_MIN_LOG_LEVEL": "0",
        "TF_CPP_VMODULE": "subprocess_compilation=3",  # logs what ptxas says
    }
    command = [sys.executable, "-m", module, *arguments]
    try:
        child = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=CHILD_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no result after {CHILD_SECONDS} s"
    if child.returncode == 0:
        return json.loads(child.stdout.splitlines()[-1]) | {"registers": kernel_registers(child.stderr)}
    if child.returncode < 0:
        return f"the compiler died of signal {-child.returncode}"
    reasons = [line for line in child.stderr.splitlines() if "Error: " in line]
    return (reasons or child.stderr.splitlines() or ["no message"])[-1]


def compile_in_child(gpu: Gpu, number: int) -> dict[str, Any] | str:
    """`compile_case` in a process of its own, as a fatal error of the compiler ends the process: result or reason."""
    return run_child(__spec__.name, "--child", gpu.name, str(number))


def print_result(what: str, shape: str, gpu: Gpu, result: dict[str, Any] | str) -> bool:
    """Prints one row of the table for a result of `run_child`; returns whether it compiled."""
    row = f"{what:24}{shape:22}{gpu.name:6}"
    if isinstance(result, str):
        print(f"{row}{'':38}  FAILED: {result}", flush=True)
        return False
    counts = f"{result.get('launches', ''):>10}{result.get('syncs', ''):>6}"
    registers = "".join(f", {name} {count} registers" for name, count in result.get("registers", {}).items())
    print(f"{row}{result['seconds']:8.2f}{result['temp_bytes']:14,}{counts}  ok{registers}", flush=True)
    return True


def has_cuda_plugin() -> bool:
    """Whether GPU programs can be compiled here; prints what to do if not."""
    if importlib.util.find_spec("jax_cuda12_plugin") is not None:
        return True
    print("the CUDA plugin of jax is not installed here: run `make gpu-compile`", file=sys.stderr)
    return False


def main(arguments: list[str]) -> int:
    """Print the table; 0 when everything compiled, else 1."""
    parser = argparse.ArgumentParser(prog="deepinfer_jax.kernels.aot", description=__doc__.split("\n")[0])
    parser.add_argument("--gpu", choices=[gpu.name for gpu in GPUS], help="only this GPU")
    parser.add_argument("--child", nargs=2, metavar=("GPU", "NUMBER"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    by_name = {gpu.name: gpu for gpu in GPUS}
    if options.child:
        name, number = options.child
        print(json.dumps(compile_case(by_name[name], int(number))))
        return 0
    if not has_cuda_plugin():
        return 1
    print(
        f"{'kernel':24}{'shape':22}{'GPU':6}{'seconds':>8}{'temp bytes':>14}{'launches':>10}{'syncs':>6}  result",
        flush=True,
    )
    failures = 0
    for gpu in [by_name[options.gpu]] if options.gpu else GPUS:
        for number, case in enumerate(all_cases(KernelChoice.for_platform("cuda", gpu.kind))):
            failures += not print_result(case.kernel, case.shape, gpu, compile_in_child(gpu, number))
    print(f"{failures} failed" if failures else "all compiled", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
