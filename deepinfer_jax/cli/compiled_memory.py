"""The temporaries of step programs as the compiler counts them, in place of the formula of `memory.parts`."""

from typing import Any

import jax

from deepinfer_jax.config.model_config import ModelConfig
from deepinfer_jax.engine.args import EngineArgs
from deepinfer_jax.engine.config import MOST_PROGRAMS
from deepinfer_jax.engine.resolution import planned_engine
from deepinfer_jax.kernels.choice import KernelChoice
from deepinfer_jax.memory.plan import MemoryPlan
from deepinfer_jax.runtime.paged_model import PagedModel
from deepinfer_jax.runtime.step_program import Kind, step_program
from deepinfer_jax.scheduler import Bucket


def compiled_temporaries(config: ModelConfig, plan: MemoryPlan, args: EngineArgs) -> int:
    """Bytes of temporaries of the step program that needs most of them, compiled for one device of this machine.

    The largest decode program and the widest prefill programs are compiled, from shapes: nothing is allocated or run.

    Args:
        plan: of one device; its pools and its length are those of the programs.
        args: of the engine that was planned.
    """
    platform = jax.default_backend()
    planned = planned_engine(args, config, plan, platform=platform)
    # A small model's engine has fewer programs, but none that takes more tokens.
    buckets = planned.buckets(MOST_PROGRAMS)
    kernels = KernelChoice.for_devices(jax.local_devices()[:1])
    model = PagedModel(config, args.precision, kernels, packed=args.kv_cache_format == "packed")

    def temporaries(kind: Kind, bucket: Bucket) -> int:
        program, arguments = step_program(
            model, kind, planned.cache_shape, bucket, platform, feature_rows=plan.image_rows
        )
        analysis: Any = jax.jit(program, donate_argnums=1).lower(*arguments).compile().memory_analysis()
        return int(analysis.temp_size_in_bytes)

    widest = max(bucket.width for bucket in buckets.prefill)
    decode = max(buckets.decode, key=lambda bucket: (bucket.width, bucket.rows))
    prefill = (bucket for bucket in buckets.prefill if bucket.width == widest)
    return max(temporaries("decode", decode), *(temporaries("prefill", bucket) for bucket in prefill))
