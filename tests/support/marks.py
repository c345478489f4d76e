"""Marks of single cases of a parametrised test."""

from typing import Any

import pytest


def slow(*values: Any, **options: Any) -> Any:
    """`pytest.param` for a case that `make test` leaves to `make test-slow`."""
    return pytest.param(*values, marks=pytest.mark.slow, **options)
