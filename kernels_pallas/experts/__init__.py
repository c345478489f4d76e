"""Routed experts: every token through its k experts, summed (model.md §6), one dispatcher."""

import functools
from collections.abc import Callable

import jax

from deepinfer_jax.kernels.choice import KernelChoice
from deepinfer_jax.kernels.weights import Weight

from . import triton
from .reference import LARGEST_TILE, ascending, expert_outputs, ordered_sum, routed_experts_reference, swiglu

__all__ = ["LARGEST_TILE", "ascending", "expert_outputs", "ordered_sum", "routed_experts", "swiglu"]


def routed_experts(
    x: jax.Array,
    w1: Weight,
    w3: Weight,
    w2: Weight,
    expert_ids: jax.Array,
    weights: jax.Array,
    *,
    limit: float,
    quantize_input: bool,
    choice: KernelChoice = KernelChoice(),  # noqa: B008 (frozen, so one shared default is safe)
) -> jax.Array:
    """Σ over a token's experts of w2 · swiglu(w1 x, w3 x; weight).

    Args:
        x: [tokens, hidden], bfloat16 or float32.
        w1, w3: [experts, intermediate, hidden].
        w2: [experts, hidden, intermediate].
        expert_ids: int32 [tokens, k], distinct in a row; an id equal to the number of experts contributes nothing.
        weights: float32 [tokens, k].
        limit: clamp of both branches (`swiglu_limit`).
        quantize_input: FP8 activation quantiser in front of each product (model.md §2.3).
        choice: the implementation. What the Triton kernels do not take (`triton.refusal`), and batch invariance, run
            the reference.

    Returns:
        float32 [tokens, hidden]; each expert's output is rounded to the dtype of `x` before the sum, which runs in
        ascending expert id.
    """
    method: Callable[..., jax.Array] = routed_experts_reference
    if choice.experts == "triton" and not choice.batch_invariant and not triton.refusal(x, w1, w3, w2):
        method = functools.partial(triton.routed_experts_triton, interpret=choice.interpret)
    with jax.named_scope("routed_experts"):
        return method(x, w1, w3, w2, expert_ids, weights, limit=limit, quantize_input=quantize_input)
