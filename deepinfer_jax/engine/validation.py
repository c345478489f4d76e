"""What a caller gave, as the plain Python value that it must be. Each failure is a sentence with the name."""

import operator
from typing import Any

import numpy as np


def boolean(name: str, value: Any) -> bool:
    """True and False, also as NumPy's or as 1 and 0. TypeError for anything else: "no" would count as true."""
    if isinstance(value, bool | np.bool_ | int) and value in (0, 1):
        return bool(value)
    raise TypeError(f"{name} must be True or False, got {value!r} of type {type(value).__name__}")


def integer(name: str, value: Any) -> int:
    """Any kind of integer. TypeError for what is none."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r} of type {type(value).__name__}") from None


def number(name: str, value: Any) -> float:
    """Any kind of real number, NaN and infinities included. TypeError for what is none, ValueError if too large."""
    if isinstance(value, str | bytes):  # float("0.5") would pass
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} is too large for a float") from None
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}") from None
