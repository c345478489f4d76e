"""What `deepinfer-jax plan` and `deepinfer-jax env` print, as text and as JSON."""

import dataclasses
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

from deepinfer_jax.engine.environ import TABLE
from deepinfer_jax.memory import MemoryPlan, format_bytes

_UNITS = {
    "": 1,
    **{
        f"{letter}{suffix}": base**power
        for power, letter in enumerate("KMGT", 1)
        for suffix, base in (("B", 1000), ("IB", 1024))
    },
}


def parse_bytes(text: str) -> int:
    """ "141GB", "80 GiB", "1.5TB" or a plain number -> bytes.

    Raises:
        ValueError: it is none of these, or not positive.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(match[2].upper().removeprefix("B") if match else "?")
    if match is None or unit is None or not (size := int(float(match[1]) * unit)):
        raise ValueError(f"{text!r} is not a size; write a number of bytes, or one with a unit such as 141GB or 80GiB")
    return size


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
            *_aligned([("part", "bytes per device", ""), *rows]),
            "",
            f"{plan.bytes_per_token:,g} bytes per token, {plan.bytes_per_block:,} per block of {plan.tokens_per_block} "
            f"tokens, {plan.bytes_per_slot:,} per running sequence",
            f"each data index: {plan.num_blocks:,} blocks, {plan.num_slots:,} running sequences of at most "
            f"{plan.max_model_len:,} tokens",
            "",
            *_aligned([("context", "sequences at once"), *contexts]),
        )
    )


def environment_json() -> list[dict[str, Any]]:
    """The rows of the environment table; `value` is the text that is set, or null."""
    return [
        {
            "name": row.name,
            "kind": row.kind.name,
            "default": row.default,
            "value": os.environ.get(row.name),
            "applies": row.applies,
            "meaning": row.meaning,
            "instead": row.instead,
        }
        for row in TABLE
    ]


def environment_text() -> str:
    """One line per variable; a `*` marks those that are set."""
    rows = [("", "name", "default", "value", "meaning")]
    for row in TABLE:
        text = os.environ.get(row.name)
        default = "unset" if row.default is None else repr(row.default)
        notes = "" if row.has_effect else f" ({': '.join(filter(None, (row.applies, row.instead)))})"
        value = ("*", row.name, default, text) if text is not None else ("", row.name, default, "")
        rows.append((*value, row.meaning + notes))
    return "\n".join(_aligned(rows, left=5))


def environment_errors() -> list[str]:
    """A sentence for each variable that has an effect and a value that it cannot have."""
    errors = []
    for row in TABLE:
        try:
            if row.has_effect:
                row.read()
        except ValueError as error:
            errors.append(str(error))
    return errors


def _aligned(rows: Sequence[tuple[str, ...]], left: int = 1) -> Iterable[str]:
    """Columns padded to equal width: the first `left` of them to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            cell.ljust(width) if number < left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()
