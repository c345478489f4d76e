"""Routed experts: every token through its k experts, summed (model.md §6)."""

from deepinfer_jax.kernels.experts.reference import routed_experts, swiglu

__all__ = ["routed_experts", "swiglu"]
