"""Which kernels a device gets, and that compiling for an absent GPU gives what that GPU would run."""

import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from deepinfer_jax.kernels import aot
from deepinfer_jax.kernels.choice import KernelChoice
from deepinfer_jax.kernels.experts import routed_experts
from deepinfer_jax.kernels.experts.shapes import RELEASED as RELEASED_EXPERTS
from deepinfer_jax.kernels.sparse_attention import sparse_attention
from deepinfer_jax.kernels.sparse_attention.shapes import RELEASED_DECODE

pytestmark = pytest.mark.toy


@dataclass(frozen=True)
class Device:
    platform: str
    device_kind: str


@pytest.mark.parametrize(
    ("platform", "kind", "implementation"),
    [
        ("cuda", "NVIDIA A100-SXM4-80GB", "triton"),
        ("gpu", "NVIDIA H100 80GB HBM3", "triton"),
        ("cuda", "NVIDIA H200", "triton"),
        ("cuda", "NVIDIA GB200", "triton"),
        ("cuda", "Tesla V100-SXM2-16GB", "reference"),
        ("rocm", "AMD H100-lookalike", "reference"),
        ("tpu", "TPU v6e", "reference"),
        ("cpu", "cpu", "reference"),
    ],
)
def test_the_kind_of_device_decides(platform: str, kind: str, implementation: str) -> None:
    choice = KernelChoice.for_platform(platform, kind)
    assert choice == KernelChoice(sparse_attention=implementation, experts=implementation, interpret=False)
    assert choice == KernelChoice.for_devices([Device(platform, kind)] * 2)
    assert hash(choice) == hash(KernelChoice(sparse_attention=implementation, experts=implementation))


def test_the_devices_of_this_machine_have_a_choice() -> None:
    assert KernelChoice.for_devices(jax.devices("cpu")) == KernelChoice()


@pytest.mark.parametrize("operation", ["sparse_attention", "experts"])
def test_an_unknown_implementation_is_refused_with_the_names_that_are_known(operation: str) -> None:
    with pytest.raises(ValueError, match=f"{operation} has no implementation 'cuda': choose one of reference, triton"):
        KernelChoice(**{operation: "cuda"})


@pytest.mark.parametrize("devices", [[], [Device("cuda", "NVIDIA H100"), Device("cpu", "cpu")]], ids=["none", "mixed"])
def test_devices_without_one_common_choice_are_refused(devices: list[Device]) -> None:
    with pytest.raises(ValueError, match="one program runs one set of kernels, but the devices are"):
        KernelChoice.for_devices(devices)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize("gpu", aot.GPUS, ids=lambda gpu: gpu.name)
def test_every_gpu_that_is_compiled_for_runs_the_kernel(gpu: aot.Gpu) -> None:
    choice = KernelChoice.for_platform("cuda", gpu.kind)
    kernels = [case for case in aot.all_cases(choice) if case.pallas]
    assert len(kernels) == len(RELEASED_DECODE) + len(RELEASED_EXPERTS)
    device = AbstractDevice(device_kind=gpu.kind, num_cores=gpu.cores, platform="gpu")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
    for operation, shape, calls in (
        (sparse_attention, RELEASED_DECODE[0], 1),
        (routed_experts, RELEASED_EXPERTS[0], 2),
    ):
        program = jax.jit(functools.partial(operation, **shape.options, choice=choice))
        with jax.sharding.use_abstract_mesh(mesh):
            lowered = program.trace(*shape.abstract_arguments()).lower(lowering_platforms=("cuda",))
        assert lowered.as_text().count(aot.TRITON_CALL) == calls


def test_gpu_compilation_without_the_cuda_plugin_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(aot.importlib.util, "find_spec", lambda name: None)
    assert aot.main([]) == 1
    assert "make gpu-compile" in capsys.readouterr().err


def test_one_failing_case_fails_the_whole_compilation_and_shows_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def compile_in_child(gpu: aot.Gpu, number: int) -> dict[str, Any] | str:
        counts = {"launches": 7, "syncs": 2, "registers": {"expert_down": 178}}
        return "RESOURCE_EXHAUSTED" if number == 3 else {"seconds": 1.0, "temp_bytes": 4096} | counts

    monkeypatch.setattr(aot.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(aot, "compile_in_child", compile_in_child)
    assert aot.main(["--gpu", "B200"]) == 1
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 2 * len(RELEASED_DECODE) + 2 * len(RELEASED_EXPERTS) + 2
    assert table[4].endswith("FAILED: RESOURCE_EXHAUSTED") and table[-1] == "1 failed"
    assert table[1].endswith("4,096         7     2  ok, expert_down 178 registers")


def test_the_registers_of_kernels_are_read_from_what_ptxas_says() -> None:
    said = "ptxas info : Compiling entry function '{}' for 'sm_90a'\n 0 bytes stack\nptxas info : Used {} registers"
    log = "\n".join(said.format(*entry) for entry in (("expert_down", 178), ("loop_add_fusion", 20)))
    assert aot.kernel_registers(log) == {"expert_down": 178}


def test_a_child_that_cannot_compile_gives_its_reason() -> None:
    unknown = aot.Gpu("H999", "NVIDIA H999", (9, 9), False, 1, 1, 1.0, 1, 1, 1, 1, 1)
    reason = aot.compile_in_child(unknown, 0)
    assert isinstance(reason, str) and "H999" in reason


def test_one_file_names_the_pallas_dialect() -> None:
    files = Path(aot.__file__).parent.rglob("*.py")
    assert [file.name for file in files if re.search(r"^\s*(from|import) .*pallas", file.read_text(), re.M)] == [
        "_backend.py"
    ]
