"""Which program runs a step of either kind, and what it takes, from shapes alone."""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import numpy as np

from deepinfer_jax.cache.pools import CacheShape, init_pools
from deepinfer_jax.checkpoint.init import init_params
from deepinfer_jax.config.precision import precision_policy
from deepinfer_jax.runtime.paged_model import PagedModel, StepModel
from deepinfer_jax.runtime.slot_table import init_slot_table
from deepinfer_jax.runtime.step_input import decode_width, prefill_width
from deepinfer_jax.runtime.steps import StepState, decode_step, prefill_step
from deepinfer_jax.sampling import NO_OPTIONS, SamplerOptions
from deepinfer_jax.scheduler import Bucket

Kind = Literal["prefill", "decode"]


def program_of(
    model: StepModel, kind: Kind, shape: CacheShape, bucket: Bucket, options: SamplerOptions = NO_OPTIONS
) -> Callable[..., Any]:
    """The function (parameters, state, host input) of a bucket; the state is to be donated.

    A prefill program may take the features of images behind them; then its host input holds their places.
    """
    step = prefill_step if kind == "prefill" else decode_step
    return functools.partial(step, model, shape, bucket, options)


def host_input_shape(kind: Kind, shape: CacheShape, bucket: Bucket, *, images: bool = False) -> tuple[int, int, int]:
    """Shape of the packed int32 array that the host hands over; images: whether prefill programs take features."""
    if kind == "decode":
        return shape.data, bucket.rows, decode_width(bucket, shape.tokens_per_block)
    return shape.data, bucket.rows, prefill_width(bucket, shape.tokens_per_block, images=images)


def step_program(
    model: PagedModel, kind: Kind, shape: CacheShape, bucket: Bucket, platform: str, *, feature_rows: int = 0
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A step program and its abstract arguments (parameters, state, host input), of which it donates the second.

    The block tables are as wide as the bucket.

    Args:
        platform: of the devices that hold the parameters.
        feature_rows: rows of image features, the fourth argument of a prefill program; 0: it takes none.
    """
    draw = functools.partial(init_params, model.config, precision=model.precision, platform=platform)
    params = jax.eval_shape(draw, jax.random.key(0))
    declared = model.state(shape.tokens_per_block)
    state = jax.eval_shape(
        lambda: StepState(init_pools(declared, shape), init_slot_table(shape, bucket.width, model.vocab_size))
    )
    images = kind == "prefill" and feature_rows > 0
    host_input = jax.ShapeDtypeStruct(host_input_shape(kind, shape, bucket, images=images), np.int32)
    arguments: tuple[Any, ...] = (params, state, host_input)
    if images:
        dtype = precision_policy(model.config, model.precision).dtype
        arguments += (jax.ShapeDtypeStruct((feature_rows, model.config.text.hidden_size), dtype),)
    return program_of(model, kind, shape, bucket), arguments
