"""The engine on several devices gives the tokens of `forward` on one."""

import math
import re

import pytest

from tests.support.children import run_child

pytestmark = pytest.mark.real


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["2x1", "1x4", "2x2"])
def test_tokens_do_not_depend_on_the_mesh(mesh: str) -> None:
    data, expert = map(int, mesh.split("x"))
    result = run_child("sharded_engine", mesh)
    assert result["wrong"] == []
    assert result["repeated_from_cache"] == [True, True] and result["split"]
    assert result["preemptions"] > 0 and result["idle"] and result["compiled"] == 0
    assert result["devices"] == data * expert
    assert result["indices_per_device"] == [1]  # every dp rank has its pools on devices of its own
    # No pool travels: the smallest, index keys of 11 blocks of 8 entries of 32 numbers, would be this large.
    sizes = {
        shape: math.prod(map(int, filter(None, re.sub(r"^\w+\[|\]$", "", shape).split(","))))
        for shape in result["gathered"]
    }
    pools = {shape: size for shape, size in sizes.items() if re.search(r"\[2,11,", shape)}
    assert pools == {}, f"gathered: {sizes}"
