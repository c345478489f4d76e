"""Counting what a compiled GPU program launches."""

import pytest

from deepinfer_jax.kernels.launches import Launches, count_launches

pytestmark = pytest.mark.toy

MODULE = """HloModule jit_f, is_scheduled=true

%fused (p.0: f32[4]) -> f32[4] {
  %p.0 = f32[4]{0} parameter(0)
  ROOT %n = f32[4]{0} negate(%p.0)
}

%small (p.1: f32[4]) -> f32[4] {
  ROOT %p.1 = f32[4]{0} parameter(0)
}

%large (p.2: f32[4]) -> f32[4] {
  %p.2 = f32[4]{0} parameter(0)
  %a = f32[4]{0} fusion(%p.2), kind=kLoop, calls=%fused
  ROOT %b = f32[4]{0} custom-call(%a), custom_call_target="__gpu$xla.gpu.triton"
}

%body (s: (s32[], f32[4])) -> (s32[], f32[4]) {
  %s = (s32[], f32[4]{0}) parameter(0)
  %x = f32[4]{0} get-tuple-element(%s), index=1
  %i = s32[] get-tuple-element(%s), index=0
  %c = f32[4]{0} conditional(%i, %x, %x), branch_computations={%small, %large}, metadata={op_name="f/cond"}
  %j = s32[] fusion(%i), kind=kLoop, calls=%fused
  ROOT %t = (s32[], f32[4]{0}) tuple(%j, %c)
}

%condition (s.1: (s32[], f32[4])) -> pred[] {
  %s.1 = (s32[], f32[4]{0}) parameter(0)
  ROOT %l = pred[] constant(true)
}

ENTRY %main (q: f32[4]) -> f32[4] {
  %q = f32[4]{0} parameter(0)
  %zero = s32[] constant(0)
  %two = (f32[4]{0}, f32[4]{0}) fusion(%q), kind=kLoop, calls=%fused
  %g = f32[4]{0} get-tuple-element(%two), index=0
  %start = (s32[], f32[4]{0}) tuple(%zero, %g)
  %w = (s32[], f32[4]{0}) while(%start), condition=%condition, body=%body{KNOWN}
  %v = f32[4]{0} get-tuple-element(%w), index=1
  ROOT %r = f32[4]{0} copy(%v)
}
"""


def test_loops_count_their_trips_and_conditions_their_larger_branch() -> None:
    known = MODULE.replace("{KNOWN}", ', backend_config={"known_trip_count":{"n":"5"},"known_init_step":{"init":"0"}}')
    assert count_launches(known) == Launches(kernels=2 + 5 * 3, syncs=5)


def test_a_loop_of_unknown_trips_counts_once() -> None:
    assert count_launches(MODULE.replace("{KNOWN}", "")) == Launches(kernels=2 + 3, syncs=1)


def test_another_text_is_refused() -> None:
    with pytest.raises(ValueError, match="no HLO module"):
        count_launches("module @jit_f {}")
