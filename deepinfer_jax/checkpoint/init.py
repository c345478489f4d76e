"""`init_params`: random parameters on the device, in the tree that `load_params` gives."""

import dataclasses
import math
import zlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.checkpoint.leaves import Leaf, leaf_form
from deepinfer_jax.config.model_config import ModelConfig, check_precision
from deepinfer_jax.kernels.formats import encode_e4m3
from deepinfer_jax.weights.layout import Init, ParamSpec, layout
from deepinfer_jax.weights.params import Fp4Weight, Fp8Rows, Fp8Weight, Params

# Mean square of a uniformly drawn e2m1 nibble: 2 (0.5² + 1² + 1.5² + 2² + 3² + 4² + 6²) / 16.
_E2M1_STD = math.sqrt(2 * 68.5 / 16)
_E4M3_STD = 64.0  # seven standard deviations below the largest code


def init_params(
    config: ModelConfig, key: jax.Array, *, precision: str = "reference", platform: str | None = None
) -> Params:
    """Random parameters that keep activations near unit size: matrices of variance 1 / inputs, norms near 1.

    Pure, so `jax.eval_shape` gives the abstract tree and `jax.jit` makes it in one program. The Engram token map
    is i·C // V for C compressed ids of a vocabulary of V.

    Args:
        key: of `jax.random.key`; every parameter folds its own tensor name in.
        precision: as in `load_params`; quantised formats are drawn as codes and scales.
        platform: of the devices that will hold them ("cpu", "gpu", …); None: of this process's.

    Raises:
        ValueError: there is no such precision.
    """
    check_precision(precision)
    platform = platform or jax.devices()[0].platform

    def draw(spec: ParamSpec) -> Leaf:
        # crc32: a name's own number, the same in every process (hash() is not)
        own = jax.random.fold_in(key, zlib.crc32(spec.names[0].encode()))
        leaf: Leaf
        if leaf_form(spec, precision, platform) == "float32":
            leaf = _normal(own, *mean_and_std(spec), spec.full_shape, "float32")
        elif spec.format == "FP4":
            leaf = _fp4(own, _scale_byte(spec, _E2M1_STD), len(spec.names), spec.stored_shape, spec.scale_shape)
        elif spec.scale_shape is not None:
            codes, scales = _fp8(own, _scale_byte(spec, _E4M3_STD), spec.shape, spec.scale_shape)
            leaf = (Fp8Weight if spec.format == "FP8" else Fp8Rows)(codes=codes, scales=scales)
        else:
            dtype = "bfloat16" if spec.format == "BF16" else "float32"
            leaf = _normal(own, *mean_and_std(spec), spec.full_shape, dtype)
        return leaf

    text = config.text
    token_map = None
    if text.engram_layer_ids:
        ids = np.arange(text.vocab_size, dtype=np.int64)
        token_map = jnp.asarray((ids * text.engram_compressed_vocab_size // text.vocab_size).astype(np.int32))
    params: Params = jax.tree.map(draw, layout(config))
    return dataclasses.replace(params, token_map=token_map, precision=precision)


def weight_std(spec: ParamSpec) -> float:
    """Standard deviation of a random matrix: rows that are looked up have unit size, products keep unit size."""
    looked_up = spec.names[0].endswith("embed.weight")
    return 1.0 if looked_up or len(spec.shape) == 1 else spec.shape[-1] ** -0.5


def mean_and_std(spec: ParamSpec) -> tuple[float, float]:
    """Of a random parameter's normal distribution (model.md §14)."""
    of: dict[Init, tuple[float, float]] = {
        "normal": (0.0, weight_std(spec)),
        "norm": (1.0, 0.1),
        "sink": (0.0, 1.0),
        "hc_base": (0.0, 1.0),
        "hc_scale": (1.0, 0.1),
    }
    return of[spec.init]


# Jitted so that each shape is one small program: eagerly, every operation of every shape would be compiled.


@partial(jax.jit, static_argnames=("shape", "dtype"))
def _normal(key: jax.Array, mean: float, std: float, shape: tuple[int, ...], dtype: str) -> jax.Array:
    return (mean + std * jax.random.normal(key, shape, jnp.float32)).astype(dtype)


@partial(jax.jit, static_argnames=("shape", "scale_shape"))
def _fp8(
    key: jax.Array, scale_byte: int, shape: tuple[int, ...], scale_shape: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """Normal codes under one constant scale."""
    codes = encode_e4m3(_E4M3_STD * jax.random.normal(key, shape, jnp.float32))
    codes = jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
    return codes, jnp.full(scale_shape, scale_byte, jnp.uint8)


@partial(jax.jit, static_argnames=("experts", "stored_shape", "scale_shape"))
def _fp4(
    key: jax.Array, scale_byte: int, experts: int, stored_shape: tuple[int, ...], scale_shape: tuple[int, ...]
) -> Fp4Weight:
    """Uniform codes under one constant scale."""
    codes = jax.random.bits(key, (experts, *stored_shape), jnp.uint8)
    return Fp4Weight(codes=codes, scales=jnp.full((experts, *scale_shape), scale_byte, jnp.uint8))


def _scale_byte(spec: ParamSpec, code_std: float) -> int:
    """The e8m0 byte that brings codes of `code_std` nearest to the wanted standard deviation."""
    return round(math.log2(weight_std(spec) / code_std)) + 127
