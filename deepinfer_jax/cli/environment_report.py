"""`deepinfer-jax env`: the environment table, as text and as JSON."""

import os
from collections.abc import Iterable, Sequence
from typing import Any

from deepinfer_jax.engine.environ import TABLE


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
    rows = [("", "name", "type", "default", "value", "meaning")]
    for row in TABLE:
        text = os.environ.get(row.name)
        default = "unset" if row.default is None else repr(row.default)
        mark = "" if text is None else "*"
        meaning = f"{row.meaning}; {row.note}" if row.note else row.meaning
        rows.append((mark, row.name, row.kind.name, default, text or "", meaning))
    return "\n".join(aligned(rows, left=6))


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


def aligned(rows: Sequence[tuple[str, ...]], left: int = 1) -> Iterable[str]:
    """Columns padded to equal width: the first `left` of them to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            cell.ljust(width) if number < left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()
