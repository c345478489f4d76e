"""Kernels and exact arithmetic: functions of arrays that know jax and nothing of the model.

- experts, quantized_linear, sparse_attention: one folder per kernel, each with its definition in plain XLA.
- choice: which implementation runs. _backend: the Pallas dialect. aot: compiles all for GPUs without one;
  launches counts what they start.
- formats: quantisers. weights: quantised weights. rounding, dot, rowwise, tiling: what keeps arithmetic exact.
- pools: reads and writes of pooled arrays.
"""
