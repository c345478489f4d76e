"""y = x Wᵀ with an FP8 weight and dynamically quantised activations (model.md §2.3)."""

from deepinfer_jax.kernels.quantized_linear.reference import dequantize, linear, product

__all__ = ["dequantize", "linear", "product"]
