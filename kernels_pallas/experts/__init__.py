"""Routed experts: every token through its k experts, summed (model.md §6)."""

from deepinfer_jax.kernels.experts.reference import ascending, expert_outputs, ordered_sum, routed_experts, swiglu

__all__ = ["ascending", "expert_outputs", "ordered_sum", "routed_experts", "swiglu"]
