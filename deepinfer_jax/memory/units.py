"""Bytes as people write them."""


def format_bytes(size: int) -> str:
    """Three figures and a decimal unit, as device sizes are given: 141000000000 -> "141 GB"."""
    for unit, name in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size >= unit:
            value = size / unit
            return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {name}"
    return f"{size} B"
