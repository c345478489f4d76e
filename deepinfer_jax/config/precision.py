"""What each precision means for the forward pass (design.md §4; the modes of the golden README)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from deepinfer_jax.config.model_config import ModelConfig, check_precision
from deepinfer_jax.kernels.rounding import round_to


@dataclasses.dataclass(frozen=True)
class PrecisionPolicy:
    """What a precision rounds and quantises, static under jit.

    | precision       | streams, activations | in front of FP8 and FP4 weights | what a cache holds          |
    |-----------------|----------------------|---------------------------------|-----------------------------|
    | "reference"     | bfloat16             | FP8, as released                | FP8 windows, the rest FP4   |
    | "bf16"          | bfloat16             | as they are                     | FP8 windows, the rest FP4   |
    | "float32"       | float32              | as they are                     | these numbers, in float32   |
    | "float32_exact" | float32              | as they are                     | as computed                 |

    Weights have the values of the checkpoint and sums are accumulated in float32, whatever the precision.

    Attributes:
        dtype: of streams, activations and caches; every bf16(·) of model.md rounds to it.
        quantize_activations: FP8 quantiser in front of every quantised linear (model.md §2.3).
        quantize_cache: quantisers of window KV, entries, index queries and keys (model.md §2.4).
    """

    dtype: DTypeLike
    quantize_activations: bool
    quantize_cache: bool

    @property
    def is_low(self) -> bool:
        """Whether activations are rounded to bfloat16."""
        return self.dtype == jnp.bfloat16

    def round(self, x: jax.Array) -> jax.Array:
        """bf16(x) of model.md; the identity in the float32 precisions."""
        return round_to(x, self.dtype)


@functools.cache
def precision_policy(config: ModelConfig, precision: str) -> PrecisionPolicy:
    """The policy of a precision; in "reference" an unquantised checkpoint has no activation quantisers.

    Raises:
        ValueError: there is no such precision.
    """
    check_precision(precision)
    if precision in ("float32", "float32_exact"):
        return PrecisionPolicy(jnp.float32, False, precision == "float32")
    return PrecisionPolicy(jnp.bfloat16, precision == "reference" and config.quantized, True)
