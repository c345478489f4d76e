"""`deepinfer-jax plan`: the memory plan of an engine, as text and as JSON."""

import dataclasses
import re
from typing import Any

import jax

from deepinfer_jax.cli.compiled_memory import compiled_temporaries
from deepinfer_jax.cli.environment_report import aligned
from deepinfer_jax.config.model_config import load_config
from deepinfer_jax.engine.args import EngineArgs
from deepinfer_jax.engine.resolution import memory_demand
from deepinfer_jax.memory.device import device_memory
from deepinfer_jax.memory.plan import MemoryPlan, plan_memory
from deepinfer_jax.memory.units import format_bytes

_PLATFORMS = ("gpu", "tpu", "cpu")
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


def parse_bytes(text: str) -> int:
    """Bytes of a size such as "141GB" (decimal), "80 GiB" (binary), "1.5tb", or a plain number.

    Raises:
        ValueError: it is none of these, or less than a byte.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([A-Za-z]*)\s*", text)
    if (
        match is None
        or match[2].upper() not in _UNITS
        or not (size := round(float(match[1]) * _UNITS[match[2].upper()]))
    ):
        raise ValueError(f"{text!r} is not a size; write a number of bytes, or one with a unit such as 141GB or 80GiB")
    return size


def plan_engine(args: EngineArgs, memory: int | None, platform: str | None, compile_programs: bool) -> MemoryPlan:
    """The memory plan of an engine, of which only `config.json` need exist.

    Args:
        memory: bytes of a device; None: of this machine's first.
        platform: of the devices; None: this machine's if `memory` is None, else "gpu".
        compile_programs: temporaries are those of compiled programs instead of a formula's.

    Raises:
        ValueError: an unknown platform; as `load_config` and `plan_memory`; programs that cannot be
            compiled here.
    """
    if platform not in (None, *_PLATFORMS):
        raise ValueError(f"platform must be one of {', '.join(_PLATFORMS)}, got {platform!r}")
    config = load_config(args.model)
    here = jax.default_backend()
    platform = platform or (here if memory is None else "gpu")
    memory = device_memory(jax.local_devices()[0]) if memory is None else memory
    plan = plan_memory(memory_demand(args, config, platform=platform, memory=memory))
    if not compile_programs or plan.problem:
        return plan
    if platform != here or args.num_devices > 1:
        raise ValueError(
            f"--compile measures the programs of one {here} device, which is what this machine has; the plan is of "
            f"{args.num_devices} {platform} device(s): leave --compile out, or give --devices 1 and --platform {here}"
        )
    planned = dataclasses.replace(args, max_model_len=plan.max_model_len)
    temporaries = compiled_temporaries(config, plan, args)
    return plan_memory(memory_demand(planned, config, platform=platform, memory=memory, temporaries=temporaries))


def plan_json(plan: MemoryPlan) -> dict[str, Any]:
    """The plan with what follows from it."""
    return {
        **dataclasses.asdict(plan),
        "total": plan.total,
        "bytes_per_token": plan.bytes_per_token,
        "concurrency": dict(plan.table()),
    }


def plan_text(plan: MemoryPlan) -> str:
    """The plan as tables."""
    devices = plan.data_parallel_size * plan.expert_parallel_size
    mesh = f"data {plan.data_parallel_size} x expert {plan.expert_parallel_size}"
    limit = (
        ""
        if plan.memory is None or plan.budget is None
        else (f", {format_bytes(plan.memory)} each, of which {format_bytes(plan.budget)} may be used")
    )
    rows = [(name, f"{size:,}", format_bytes(size)) for name, size in (*plan.parts.items(), ("total", plan.total))]
    contexts = [(f"{context:,}", f"{sequences:,}") for context, sequences in plan.table()]
    return "\n".join(
        (
            f"checkpoint: {plan.checkpoint_bytes:,} bytes of tensors",
            f"devices: {devices} ({mesh}){limit}",
            "",
            *aligned([("part", "bytes per device", ""), *rows]),
            "",
            f"{plan.bytes_per_token:,g} bytes per token, {plan.bytes_per_block:,} per block of {plan.tokens_per_block} "
            f"tokens, {plan.bytes_per_slot:,} per running sequence",
            f"each dp rank: {plan.num_blocks:,} blocks, {plan.num_slots:,} running sequences of at most "
            f"{plan.max_model_len:,} tokens",
            "",
            *aligned([("context", "sequences at once"), *contexts]),
        )
    )
