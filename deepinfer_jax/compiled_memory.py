"""The temporaries of step programs as the compiler counts them, in place of the formula of `memory_parts`."""

import functools
from typing import Any

import jax
import numpy as np

from deepinfer_jax.checkpoint.init import init_params
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.engine.args import EngineArgs
from deepinfer_jax.engine.loading import step_buckets
from deepinfer_jax.kernels.choice import KernelChoice
from deepinfer_jax.memory import MemoryPlan, prefill_tokens
from deepinfer_jax.paged_cache import CacheShape
from deepinfer_jax.runtime.slot_table import init_slot_table
from deepinfer_jax.runtime.step_input import decode_width, prefill_width
from deepinfer_jax.runtime.steps import StepState, decode_step, prefill_step
from deepinfer_jax.runtime.text_model import TextModel
from deepinfer_jax.scheduler import Bucket, BucketTable, blocks_for


def compiled_temporaries(config: ModelConfig, plan: MemoryPlan, args: EngineArgs) -> int:
    """Bytes of temporaries of the step program that needs most of them, compiled for one device of this machine.

    The largest decode program and the widest prefill programs are compiled, from shapes: nothing is allocated or run.

    Args:
        plan: of one device; its pools and its length are those of the programs.
        args: of the engine that was planned.
    """
    buckets = _buckets(config, plan, args)
    shape = CacheShape(1, plan.num_slots, plan.num_blocks, plan.tokens_per_block)
    kernels = KernelChoice.for_devices(jax.local_devices()[:1])
    model = TextModel(config, args.precision, kernels, packed=args.kv_cache_format == "packed")
    params = jax.eval_shape(functools.partial(init_params, config, precision=args.precision), jax.random.key(0))
    table_width = blocks_for(plan.max_model_len, plan.tokens_per_block)
    state = jax.eval_shape(lambda: StepState(model.init_cache(shape, None), init_slot_table(shape, table_width)))

    def temporaries(program: Any, bucket: Bucket, width: int) -> int:
        step = jax.jit(functools.partial(program, model, shape, bucket), donate_argnums=1)
        host_input = jax.ShapeDtypeStruct((1, bucket.rows, width), np.int32)
        analysis: Any = step.lower(params, state, host_input).compile().memory_analysis()
        return int(analysis.temp_size_in_bytes)

    widest = max(bucket.width for bucket in buckets.prefill)
    decode = max(buckets.decode, key=lambda bucket: (bucket.width, bucket.rows))
    sizes = [temporaries(decode_step, decode, decode_width(decode, plan.tokens_per_block))]
    for bucket in buckets.prefill:
        if bucket.width == widest:
            sizes.append(temporaries(prefill_step, bucket, prefill_width(bucket, plan.tokens_per_block)))
    return max(sizes)


def _buckets(config: ModelConfig, plan: MemoryPlan, args: EngineArgs) -> BucketTable:
    # A small model's engine has fewer programs, but none that takes more tokens.
    limits = args.limits(config.text.max_position_embeddings, max_len_in_memory=plan.max_model_len)
    return step_buckets(limits, most_prefill_tokens=prefill_tokens(jax.default_backend()), max_programs=12)
