"""Named shapes that the tests and `make gpu-compile` share."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.kernels.weights import Fp4Weight


@dataclass(frozen=True)
class Shape:
    """Sizes of one call of `routed_experts` with packed weights and bfloat16 activations.

    Attributes:
        name: what tables call it.
        tokens, k, experts, hidden, inner: rows of activations, experts of each, all experts, and the widths.
    """

    name: str
    tokens: int
    k: int
    experts: int
    hidden: int
    inner: int

    @property
    def options(self) -> dict[str, Any]:
        """The static arguments of `routed_experts` as the released model sets them (model.md §6)."""
        return {"limit": 10.0, "quantize_input": True}

    def abstract_arguments(self) -> tuple[Any, ...]:
        """The positional arguments of `routed_experts` as `jax.ShapeDtypeStruct`s; nothing is allocated."""

        def packed(rows: int, columns: int) -> Any:
            codes: Any = jax.ShapeDtypeStruct((self.experts, rows, columns // 2), jnp.uint8)
            scales: Any = jax.ShapeDtypeStruct((self.experts, rows, columns // 32), jnp.uint8)
            return Fp4Weight(codes, scales)

        return (
            jax.ShapeDtypeStruct((self.tokens, self.hidden), jnp.bfloat16),
            packed(self.inner, self.hidden),
            packed(self.inner, self.hidden),
            packed(self.hidden, self.inner),
            jax.ShapeDtypeStruct((self.tokens, self.k), jnp.int32),
            jax.ShapeDtypeStruct((self.tokens, self.k), jnp.float32),
        )

    def random_arguments(self, seed: int = 0) -> tuple[Any, ...]:
        """Concrete arguments: normal activations, weights of any codes, distinct experts in each row."""
        rng = np.random.default_rng(seed)

        def packed(abstract: Fp4Weight) -> Fp4Weight:
            codes = rng.integers(0, 256, abstract.codes.shape, np.uint8)
            scales = rng.integers(118, 124, abstract.scales.shape, np.uint8)  # 2^-9 … 2^-4
            return Fp4Weight(jnp.asarray(codes), jnp.asarray(scales))

        x, w1, w3, w2, _, _ = self.abstract_arguments()
        ids = [rng.choice(self.experts, self.k, replace=False) for _ in range(self.tokens)]
        return (
            jnp.asarray(rng.standard_normal(x.shape, np.float32), x.dtype),
            packed(w1),
            packed(w3),
            packed(w2),
            jnp.asarray(np.stack(ids), jnp.int32),
            jnp.asarray(rng.uniform(0.05, 0.6, (self.tokens, self.k)), jnp.float32),
        )


# Decode with and without five drafts, a prefill, and a block of drafts of 64 sequences, at released sizes.
RELEASED = (
    Shape("decode 1", 1, 6, 384, 5120, 2304),
    Shape("verify 1x6", 6, 6, 384, 5120, 2304),
    Shape("decode 64", 64, 6, 384, 5120, 2304),
    Shape("verify 256x6", 1536, 6, 384, 5120, 2304),
    Shape("prefill 2048", 2048, 6, 384, 5120, 2304),
    Shape("draft 64x5", 320, 3, 128, 5120, 2304),
)
