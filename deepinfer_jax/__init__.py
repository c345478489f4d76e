"""DeepInfer-JAX: DeepSeek-V4.1-Flash on any XLA device.

The names below are the public interface. They are loaded on first use (PEP 562), so that importing
`deepinfer_jax.tokenization` or `deepinfer_jax.scheduler` never imports jax.

- model: the forward pass, by config, weights (declared), checkpoint (loaded), cache, kernels.
- engine: requests to tokens, by tokenization, scheduler, runtime (step programs), sampling, structured, memory.
- cli: the command line. embedded: the default model, made once per user.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepinfer_jax.cache.dense import Cache, init_cache
    from deepinfer_jax.checkpoint.hf import load_params
    from deepinfer_jax.checkpoint.init import init_params
    from deepinfer_jax.config.model_config import ModelConfig, load_config
    from deepinfer_jax.engine.args import EngineArgs, EngineType
    from deepinfer_jax.engine.async_engine import AsyncLLMEngine
    from deepinfer_jax.engine.handover.sequence_state import SequenceState
    from deepinfer_jax.engine.llm import LLM
    from deepinfer_jax.engine.llm_engine import LLMEngine
    from deepinfer_jax.engine.requests.outputs import RequestOutput
    from deepinfer_jax.engine.requests.sampling_params import SamplingParams
    from deepinfer_jax.model.dspark import draft
    from deepinfer_jax.model.forward import ForwardOutput, forward
    from deepinfer_jax.model.generation import generate_tokens
    from deepinfer_jax.model.vision import encode_image
    from deepinfer_jax.sampling.research import SampleFn, SamplerState, sample_fn
    from deepinfer_jax.weights.params import Params

__version__ = "0.1.0"

# Where each public name lives. `__all__` repeats the names because type checkers read it literally.
_HOME = {
    "LLM": "engine.llm",
    "LLMEngine": "engine.llm_engine",
    "AsyncLLMEngine": "engine.async_engine",
    "SequenceState": "engine.handover.sequence_state",
    "EngineArgs": "engine.args",
    "EngineType": "engine.args",
    "SamplingParams": "engine.requests.sampling_params",
    "RequestOutput": "engine.requests.outputs",
    "load_config": "config.model_config",
    "load_params": "checkpoint.hf",
    "init_params": "checkpoint.init",
    "init_cache": "cache.dense",
    "forward": "model.forward",
    "draft": "model.dspark",
    "encode_image": "model.vision",
    "generate_tokens": "model.generation",
    "sample_fn": "sampling.research",
    "SampleFn": "sampling.research",
    "SamplerState": "sampling.research",
    "ModelConfig": "config.model_config",
    "Params": "weights.params",
    "ForwardOutput": "model.forward",
    "Cache": "cache.dense",
}

__all__ = [
    "LLM",
    "AsyncLLMEngine",
    "Cache",
    "EngineArgs",
    "EngineType",
    "ForwardOutput",
    "LLMEngine",
    "ModelConfig",
    "Params",
    "RequestOutput",
    "SampleFn",
    "SamplerState",
    "SamplingParams",
    "SequenceState",
    "draft",
    "encode_image",
    "forward",
    "generate_tokens",
    "init_cache",
    "init_params",
    "load_config",
    "load_params",
    "sample_fn",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'deepinfer_jax' has no attribute {name!r}")
    return getattr(import_module(f"deepinfer_jax.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
