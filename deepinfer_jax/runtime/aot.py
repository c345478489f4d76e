"""Compiles whole step programs for a GPU on a machine without one: `make gpu-compile`.

    python -m deepinfer_jax.runtime.aot CONFIG.json [--gpu NAME]

It proves, from shapes alone, that XLA lowers the decode and prefill programs of a model with the kernels that this GPU
would run, and that they write their pools in place: a pool takes most of a device's memory, so that there is no room
for a second one; and, of a model with a vision tower, the program of the largest images. It says nothing about results
or speed.
"""

import argparse
import dataclasses
import functools
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import jax

from deepinfer_jax.cache.pools import CacheShape
from deepinfer_jax.checkpoint.init import init_params
from deepinfer_jax.config.model_config import ModelConfig, parse_config
from deepinfer_jax.config.precision import precision_policy
from deepinfer_jax.kernels.aot import (
    GPUS,
    TRITON_CALL,
    Gpu,
    compile_for,
    has_cuda_plugin,
    print_result,
    run_child,
    topology_of,
)
from deepinfer_jax.kernels.choice import KernelChoice
from deepinfer_jax.runtime.paged_model import PagedModel
from deepinfer_jax.runtime.step_program import Kind, step_program
from deepinfer_jax.runtime.vision_encoder import patch_buckets, vision_encode, vision_inputs
from deepinfer_jax.scheduler import Bucket

# Primes, so that no other array has a pool's number of elements; sequences of 64 blocks of 128 tokens.
SHAPE = CacheShape(data=1, slots=67, blocks=4099, tokens_per_block=128)
BUCKETS: dict[Kind, Bucket] = {
    "decode": Bucket(rows=64, time=1, width=64),
    "prefill": Bucket(rows=4, time=512, width=64),
}
# Of a model with a vision tower; a prime, too.
FEATURE_ROWS = 2053
VISION = "vision"

_HLO_TYPES = {"uint8": "u8", "bfloat16": "bf16", "float32": "f32", "int32": "s32", "uint32": "u32"}
_COPIES = re.compile(r" = (\w+)\[([\d,]*)\]\S* (copy|copy-start|transpose)\(")


def copied_pools(compiled: str, pools: Any) -> list[str]:
    """The instructions of a compiled program that copy or transpose whole arrays of a pytree of pools or rings.

    An array counts as a pool if it has a pool's type and number of elements.
    """
    sizes = {(_HLO_TYPES[pool.dtype.name], pool.size) for pool in jax.tree.leaves(pools)}
    found = []
    for line in compiled.splitlines():
        if match := _COPIES.search(line):
            size = math.prod(int(axis) for axis in match[2].split(",") if axis)
            if (match[1], size) in sizes:
                found.append(line.strip())
    return found


def bucket_of(kind: Kind, config: ModelConfig) -> Bucket:
    """The shape of the step that is compiled, with as many drafts as the model can."""
    bucket = BUCKETS[kind]
    return dataclasses.replace(bucket, time=1 + config.text.draft_block) if kind == "decode" else bucket


def compile_step_for(gpu: Gpu, config_file: str, kind: Kind) -> dict[str, float]:
    """Compile one program in this process: {"seconds", "temp_bytes"}.

    Raises:
        RuntimeError: XLA, Triton or ptxas refuses, the decode program holds no kernel, or a pool would be copied.
    """
    topology = topology_of(gpu)
    config = parse_config(json.loads(Path(config_file).read_text()))
    model = PagedModel(config, "reference", KernelChoice.for_devices(topology.devices))
    shape, bucket = dataclasses.replace(SHAPE, num_drafts=config.text.draft_block), bucket_of(kind, config)
    feature_rows = FEATURE_ROWS if config.vision.num_hidden_layers else 0
    program, arguments = step_program(model, kind, shape, bucket, "gpu", feature_rows=feature_rows)
    compiled, seconds = compile_for(topology, program, arguments, donated=(1,))
    text, memory, cache = compiled.as_text(), compiled.memory_analysis(), arguments[1].cache
    if kind == "decode" and TRITON_CALL not in text:
        raise RuntimeError(f"the decode program for {gpu.kind} holds no Pallas kernel")
    if copies := copied_pools(text, cache):
        raise RuntimeError(f"the {kind} program for {gpu.kind} copies {len(copies)} pools: {copies[0]}")
    state_bytes = sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(cache))
    if memory.alias_size_in_bytes < state_bytes:
        raise RuntimeError(f"only {memory.alias_size_in_bytes} of the cache's {state_bytes} bytes are written in place")
    return {"seconds": seconds, "temp_bytes": memory.temp_size_in_bytes}


def compile_vision_for(gpu: Gpu, config_file: str) -> dict[str, float]:
    """Compile the program that encodes the largest images in this process: {"seconds", "temp_bytes"}.

    Raises:
        RuntimeError: XLA or ptxas refuses, or the features would not be written in place.
    """
    config = parse_config(json.loads(Path(config_file).read_text()))
    draw = functools.partial(init_params, config, precision="reference", platform="gpu")
    vision = jax.eval_shape(draw, jax.random.key(0)).vision
    dtype = precision_policy(config, "reference").dtype
    features = jax.ShapeDtypeStruct((FEATURE_ROWS, config.text.hidden_size), dtype)
    inputs = vision_inputs(patch_buckets(config.vision)[-1], config.vision)
    program = functools.partial(vision_encode, config, "reference")
    compiled, seconds = compile_for(topology_of(gpu), program, (vision, features, *inputs), donated=(1,))
    memory = compiled.memory_analysis()
    if memory.alias_size_in_bytes < features.size * features.dtype.itemsize:
        raise RuntimeError(f"the vision program for {gpu.kind} makes a second array of features")
    return {"seconds": seconds, "temp_bytes": memory.temp_size_in_bytes}


def main(arguments: list[str]) -> int:
    """Print the table; 0 when everything compiled, else 1."""
    parser = argparse.ArgumentParser(prog="deepinfer_jax.runtime.aot", description=__doc__.split("\n")[0])
    parser.add_argument("config", help="a model's config.json")
    parser.add_argument("--gpu", choices=[gpu.name for gpu in GPUS], help="only this GPU")
    parser.add_argument("--child", choices=[*BUCKETS, VISION], help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    gpus = [gpu for gpu in GPUS if options.gpu in (None, gpu.name)]
    if options.child:
        if options.child == VISION:
            print(json.dumps(compile_vision_for(gpus[0], options.config)))
        else:
            print(json.dumps(compile_step_for(gpus[0], options.config, options.child)))
        return 0
    if not has_cuda_plugin():
        return 1
    failures = 0
    config = parse_config(json.loads(Path(options.config).read_text()))
    for gpu in gpus:
        for kind in BUCKETS:
            bucket = bucket_of(kind, config)
            result = run_child(__spec__.name, options.config, "--gpu", gpu.name, "--child", kind)
            failures += not print_result(f"{kind} step", f"{bucket.rows} x {bucket.time}", gpu, result)
        if config.vision.num_hidden_layers:
            result = run_child(__spec__.name, options.config, "--gpu", gpu.name, "--child", VISION)
            failures += not print_result("vision", f"{patch_buckets(config.vision)[-1]} patches", gpu, result)
    print(f"{failures} failed" if failures else "all compiled", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
