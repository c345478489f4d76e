"""A model folder to the parts of an engine."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from deepinfer_jax.checkpoint.hf import load_params
from deepinfer_jax.checkpoint.init import init_params
from deepinfer_jax.config.model_config import ModelConfig, load_config
from deepinfer_jax.engine.args import EngineArgs, EngineType
from deepinfer_jax.engine.config import MOST_PROGRAMS, EngineConfig
from deepinfer_jax.engine.diagnosis import Diagnose, make_diagnosis
from deepinfer_jax.engine.environ import enable_compilation_cache, warn_inapplicable
from deepinfer_jax.engine.handover.sequence_state import StateIdentity, state_identity
from deepinfer_jax.engine.images.features import FeatureCache
from deepinfer_jax.engine.resolution import resolve_engine
from deepinfer_jax.kernels.choice import KernelChoice
from deepinfer_jax.memory.device import device_memory
from deepinfer_jax.memory.parts import tree_bytes
from deepinfer_jax.runtime.paged_model import PagedModel, StepModel
from deepinfer_jax.runtime.runner import Runner
from deepinfer_jax.runtime.vision_encoder import VisionEncoder
from deepinfer_jax.scheduler import BucketTable
from deepinfer_jax.tokenization import MultimodalProcessor, get_hf_tokenizer
from deepinfer_jax.weights.params import Params
from deepinfer_jax.weights.sharding import DATA, EXPERT

# Compiling many step programs takes longer than a model below this size saves by them.
_SMALL_MODEL_BYTES = 64 << 20
_SMALL_MODEL_PROGRAMS = 3


@dataclass(frozen=True)
class TokenParts:
    """What stands between texts and images, and ids.

    Attributes:
        tokenizer: text to ids and back, and `eos_token_id`.
        image_token_id: the id that stands for an image in a chat; a plain id without one.
        processor: puts images into prompts; None: the model has no vision tower, or the engine computes no prompts.
    """

    tokenizer: Any
    image_token_id: int
    processor: MultimodalProcessor | None = None


@dataclass(frozen=True)
class ModelParts:
    """What computes.

    Attributes:
        buckets: the step programs.
        runner: the compiled programs.
        identity: what another engine must have in common to take a sequence over; None for a NORMAL engine.
        diagnose: why a row's logits are no distribution; None: nobody can say.
        key: names all that step times depend on beside the programs' shapes.
        features: what the vision tower makes of images; None without one.
    """

    buckets: BucketTable
    runner: Runner
    identity: StateIdentity | None = None
    diagnose: Diagnose | None = None
    key: str = ""
    features: FeatureCache | None = None


@dataclass(frozen=True)
class EngineParts:
    """What an engine works with; each side knows nothing of the other."""

    config: EngineConfig
    tokens: TokenParts
    model: ModelParts


def load_parts(args: EngineArgs) -> EngineParts:
    """Resolves the configuration, then reads the tokenizer, then the parameters: what fails, fails before weights are
    read."""
    warn_inapplicable()
    model = load_config(args.model)
    devices = engine_devices(args)
    config = resolve_engine(args, model, platform=devices[0].platform, memory=device_memory(devices[0]))
    enable_compilation_cache(config.compilation_cache_dir)
    return EngineParts(config, token_parts(args, model), model_parts(args, model, config, devices))


def token_parts(args: EngineArgs, model: ModelConfig) -> TokenParts:
    """Reads the tokenizer; ValueError if it and config.json do not belong together."""
    tokenizer = get_hf_tokenizer(
        args.tokenizer or args.model,
        args.trust_remote_code,
        revision=args.revision,
        tokenizer_revision=args.tokenizer_revision,
    )
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"{args.tokenizer or args.model}: tokenizer_config.json names no eos_token, so no answer could end; "
            f"config.json has eos_token_id {model.eos_token_id}"
        )
    return TokenParts(tokenizer, model.image_token_id, image_prompts(model, tokenizer, args))


def image_prompts(model: ModelConfig, tokenizer: Any, args: EngineArgs) -> MultimodalProcessor | None:
    """What puts images into prompts; None without a vision tower, and in a COMPLETION engine (DB §1.8).

    Raises ValueError if tokenizer and config.json disagree on the image token.
    """
    if not model.vision.num_hidden_layers or args.engine_type is EngineType.COMPLETION:
        return None
    return MultimodalProcessor(
        model.vision,
        tokenizer,
        image_token_id=model.image_token_id,
        vocab_size=model.text.vocab_size,
        on_image_mismatch=args.on_image_mismatch,
    )


def model_parts(args: EngineArgs, model: ModelConfig, config: EngineConfig, devices: list[jax.Device]) -> ModelParts:
    """Reads the parameters and makes what computes with them; nothing is compiled yet."""
    mesh = engine_mesh(args, devices)
    params = _params(args, model, mesh)
    buckets = config.buckets(_SMALL_MODEL_PROGRAMS if tree_bytes(params) < _SMALL_MODEL_BYTES else MOST_PROGRAMS)
    # XLA cannot spread a Pallas kernel over a mesh by itself; plain XLA it can.
    kernels = KernelChoice.for_devices(devices) if mesh is None else KernelChoice()
    kernels = dataclasses.replace(kernels, batch_invariant=config.batch_invariant)
    paged = PagedModel(
        model, config.precision, kernels, packed=config.kv_cache_format == "packed", replay=config.replay
    )
    identity = None
    if config.engine_type is not EngineType.NORMAL:
        identity = state_identity(model, params, config.tokens_per_block, paged.state(config.tokens_per_block))
    encoder = None
    if params.vision is not None:
        encoder = VisionEncoder(params.vision, model, precision=config.precision, num_rows=config.image_rows, mesh=mesh)
    features = None if encoder is None else encoder.features
    return ModelParts(
        buckets,
        engine_runner(config, paged, params, buckets, mesh, features),
        identity=identity,
        diagnose=make_diagnosis(params, model, config.precision, kernels),
        key=repr((paged, config.cache_shape, [device.device_kind for device in devices])),
        features=None if encoder is None else FeatureCache(encoder),
    )


def engine_runner(
    config: EngineConfig,
    model: StepModel,
    params: Any,
    buckets: BucketTable,
    mesh: Mesh | None,
    features: jax.Array | None = None,
) -> Runner:
    """A runner of the engine's sizes and duties; features: of images, as `Runner` says."""
    return Runner(
        model,
        params,
        buckets=buckets,
        shape=config.cache_shape,
        table_width=config.blocks_per_sequence,
        mesh=mesh,
        duties=config.runner_duties,
        options=config.sampler,
        features=features,
    )


def engine_devices(args: EngineArgs) -> list[jax.Device]:
    """The devices that the engine runs on; ValueError if there are too few."""
    devices = jax.local_devices()
    if len(devices) < args.num_devices:
        raise ValueError(
            f"data_parallel_size × expert_parallel_size = {args.data_parallel_size} × {args.expert_parallel_size} = "
            f"{args.num_devices} devices are needed, there are {len(devices)} ({devices[0].platform}); on CPU, "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={args.num_devices} makes as many"
        )
    return devices[: args.num_devices]


def engine_mesh(args: EngineArgs, devices: list[jax.Device]) -> Mesh | None:
    """The mesh of the engine's devices; None for a single one."""
    if len(devices) == 1:
        return None
    return jax.make_mesh(
        (args.data_parallel_size, args.expert_parallel_size),
        (DATA, EXPERT),
        axis_types=(AxisType.Auto, AxisType.Auto),
        devices=devices,
    )


def _params(args: EngineArgs, model: ModelConfig, mesh: Mesh | None) -> Params:
    if args.load_format == "dummy":
        return init_params(model, jax.random.key(args.seed), precision=args.precision)
    return load_params(args.model, model, precision=args.precision, mesh=mesh)
