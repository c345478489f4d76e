"""A model folder to the parts of an engine."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from deepinfer_jax.cache.pools import CacheShape
from deepinfer_jax.checkpoint.hf import load_params
from deepinfer_jax.checkpoint.init import init_params
from deepinfer_jax.config.model_config import ModelConfig, load_config
from deepinfer_jax.engine.args import EngineArgs, EngineLimits, EngineType
from deepinfer_jax.engine.diagnosis import Diagnose, make_diagnosis
from deepinfer_jax.engine.drafts.scheduled_verification import confidence_temperatures
from deepinfer_jax.engine.environ import enable_compilation_cache, env, warn_inapplicable
from deepinfer_jax.engine.handover.sequence_state import StateIdentity, state_identity
from deepinfer_jax.engine.images.features import FeatureCache
from deepinfer_jax.engine.sampler_options import sampler_options
from deepinfer_jax.kernels.choice import KernelChoice
from deepinfer_jax.memory.plan import MemoryPlan, device_memory, plan_memory, prefill_tokens
from deepinfer_jax.model.bounded_replay import MODES, Replay, replay_problem
from deepinfer_jax.runtime.paged_model import PagedModel
from deepinfer_jax.runtime.runner import Runner
from deepinfer_jax.runtime.vision_encoder import VisionEncoder
from deepinfer_jax.scheduler import BucketTable, bucket_table
from deepinfer_jax.tokenization import MultimodalProcessor, get_hf_tokenizer
from deepinfer_jax.weights.sharding import DATA, EXPERT

# Compiling many step programs takes longer than a model below this size saves by them.
_SMALL_MODEL_BYTES = 64 << 20
_SMALL_MODEL_PROGRAMS, _PROGRAMS = 3, 12
_DRAFTS = 5
"""Tokens drafted per step unless asked for otherwise (DB §6.1)."""


@dataclass(frozen=True)
class EngineParts:
    """What an engine works with.

    Attributes:
        tokenizer: text to ids and back, and `eos_token_id`.
        vocab_size: ids a prompt may hold.
        image_token_id: the id that stands for an image in a chat; a plain id without one.
        limits: sizes.
        buckets: the step programs.
        num_blocks: blocks of each dp rank.
        runner: the compiled programs.
        prefix_caching: whether beginnings of earlier requests are reused.
        identity: what another engine must have in common to take a sequence over; None for a NORMAL engine.
        diagnose: why a row's logits are no distribution; None: nobody can say.
        temperatures: of the confidence head, one per draft.
        key: names all that step times depend on beside the programs' shapes.
        features: what the vision tower makes of images; None without one.
        processor: puts images into prompts; None: the model has no vision tower, or the engine computes no prompts.
    """

    tokenizer: Any
    vocab_size: int
    image_token_id: int
    limits: EngineLimits
    buckets: BucketTable
    num_blocks: int
    runner: Runner
    prefix_caching: bool = False
    identity: StateIdentity | None = None
    diagnose: Diagnose | None = None
    temperatures: tuple[float, ...] = ()
    key: str = ""
    features: FeatureCache | None = None
    processor: MultimodalProcessor | None = None


def load_parts(args: EngineArgs) -> EngineParts:
    """Reads configuration, tokenizer and parameters, in this order: what fails, fails before weights are read."""
    warn_inapplicable()
    enable_compilation_cache()
    config = load_config(args.model)
    tokenizer = get_hf_tokenizer(
        args.tokenizer or args.model,
        args.trust_remote_code,
        revision=args.revision,
        tokenizer_revision=args.tokenizer_revision,
    )
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"{args.tokenizer or args.model}: tokenizer_config.json names no eos_token, so no answer could end; "
            f"config.json has eos_token_id {config.eos_token_id}"
        )
    processor = image_prompts(config, tokenizer, args)
    drafts = num_drafts(config.text.draft_block, args.engine_type)
    replay = bounded_replay(config, drafts)
    temperatures = confidence_temperatures(drafts)
    options = sampler_options(config.text.vocab_size, temperatures)
    devices = engine_devices(args)
    platform = devices[0].platform
    plan = engine_plan(config, args, platform=platform, memory=device_memory(devices[0]))
    if plan.problem:
        raise ValueError(f"{args.model}: {plan.problem}")
    limits = args.limits(
        config.text.max_position_embeddings,
        max_len_in_memory=plan.max_model_len,
        num_drafts=drafts,
        zero_overhead_scheduling=zero_overhead_scheduling(args.engine_type),
        keep_tokens=None if replay is None else replay.keep,
    )
    num_blocks = pool_blocks(limits, plan.num_blocks)
    mesh = engine_mesh(args, devices)
    if args.load_format == "dummy":
        params = init_params(config, jax.random.key(args.seed), precision=args.precision)
    else:
        params = load_params(args.model, config, precision=args.precision, mesh=mesh)
    buckets = step_buckets(
        limits,
        most_prefill_tokens=prefill_tokens(platform),
        max_programs=_SMALL_MODEL_PROGRAMS if _num_bytes(params) < _SMALL_MODEL_BYTES else _PROGRAMS,
    )
    # XLA cannot spread a Pallas kernel over a mesh by itself; plain XLA it can.
    kernels = KernelChoice.for_devices(devices) if mesh is None else KernelChoice()
    kernels = dataclasses.replace(kernels, batch_invariant=env.BATCH_INVARIANT)
    shape = CacheShape(
        data=limits.data_parallel_size,
        slots=limits.seqs_per_index,
        blocks=num_blocks,
        tokens_per_block=limits.tokens_per_block,
        rollback=limits.num_drafts,
    )
    model = PagedModel(config, args.precision, kernels, packed=args.kv_cache_format == "packed", replay=replay)
    identity = None
    if args.engine_type is not EngineType.NORMAL:
        identity = state_identity(config, params, limits.tokens_per_block, model.state(limits.tokens_per_block))
    encoder = None
    if params.vision is not None:
        encoder = VisionEncoder(params.vision, config, precision=args.precision, num_rows=plan.image_rows, mesh=mesh)
    return EngineParts(
        tokenizer=tokenizer,
        vocab_size=config.text.vocab_size,
        image_token_id=config.image_token_id,
        limits=limits,
        buckets=buckets,
        num_blocks=num_blocks,
        runner=Runner(
            model,
            params,
            buckets=buckets,
            shape=shape,
            table_width=limits.blocks_per_sequence,
            mesh=mesh,
            options=options,
            features=None if encoder is None else encoder.features,
            **runner_duties(args, limits),
        ),
        prefix_caching=prefix_caching(args, limits),
        identity=identity,
        diagnose=make_diagnosis(params, config, args.precision, kernels),
        temperatures=temperatures,
        key=repr((model, shape, [device.device_kind for device in devices])),
        features=None if encoder is None else FeatureCache(encoder),
        processor=processor,
    )


def image_prompts(config: ModelConfig, tokenizer: Any, args: EngineArgs) -> MultimodalProcessor | None:
    """What puts images into prompts; None without a vision tower, and in a COMPLETION engine (DB §1.8).

    Raises ValueError if tokenizer and config.json disagree on the image token.
    """
    if not config.vision.num_hidden_layers or args.engine_type is EngineType.COMPLETION:
        return None
    return MultimodalProcessor(
        config.vision,
        tokenizer,
        image_token_id=config.image_token_id,
        vocab_size=config.text.vocab_size,
        on_image_mismatch=args.on_image_mismatch,
    )


def prefix_caching(args: EngineArgs, limits: EngineLimits) -> bool:
    """Whether beginnings of earlier requests are reused: some text must be longer than a block, and states kept."""
    return (
        args.enable_prefix_caching and args.snapshot_memory_bytes > 0 and limits.max_model_len > limits.tokens_per_block
    )


def runner_duties(args: EngineArgs, limits: EngineLimits) -> dict[str, Any]:
    """What a runner must be able to do, as arguments of `Runner`."""
    hands_over = args.engine_type is not EngineType.NORMAL
    return {
        "kinds": ("prefill",) if args.engine_type is EngineType.PROMPT else ("prefill", "decode"),
        "moves_slots": hands_over or prefix_caching(args, limits),
        "moves_blocks": hands_over,
        "drafts": limits.num_drafts > 0 and args.engine_type is EngineType.COMPLETION,
        "poisons": env.POISON_FREED_STATE,
    }


def num_drafts(block_size: int, engine_type: EngineType) -> int:
    """Tokens drafted per step: DEEPINFER_USE_NEXTN_DECODE, if it is not set the block of drafts, at most 5.

    A PROMPT engine decodes nothing, so it drafts nothing.

    Args:
        block_size: of the model.

    Raises ValueError for a number that the model cannot draft: its block has one width (T19).
    """
    asked = env.USE_NEXTN_DECODE
    if asked is not None and not 0 <= asked <= block_size:
        has = f"drafts blocks of {block_size} tokens" if block_size else "has no draft layers"
        raise ValueError(
            f"DEEPINFER_USE_NEXTN_DECODE is {asked}, but the model {has}; set it to 0 … {block_size}, or unset it"
        )
    if engine_type is EngineType.PROMPT:
        return 0
    return min(_DRAFTS, block_size) if asked is None else asked


def bounded_replay(config: ModelConfig, drafts: int) -> Replay | None:
    """What DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE and DEEPINFER_YOCO_PREFILL_KEEP_TOKENS ask for (DB §9); None: "off".

    A step may be undone by its drafts and its own token, so 1 + drafts tokens are kept beside the window (DeepInfer's
    least number of backtracking tokens, also without drafts).

    Raises ValueError for a mode that is none, tokens without a mode, and a model or a number that it cannot be.
    """
    mode, keep = env.YOCO_PREFILL_TRUNCATION_MODE, env.YOCO_PREFILL_KEEP_TOKENS
    mode_name, keep_name = (f"DEEPINFER_YOCO_PREFILL_{name}" for name in ("TRUNCATION_MODE", "KEEP_TOKENS"))
    if mode == "off":
        if keep:
            raise ValueError(
                f"{keep_name} is {keep}, but {mode_name} is off, which keeps all tokens; set it to mask or compact, or "
                f"unset {keep_name}"
            )
        return None
    known = next((known for known in MODES if known == mode), None)
    if known is None:
        raise ValueError(f"{mode_name} is {mode!r}; expected off, {' or '.join(MODES)}")
    replay = Replay(known, keep)
    if problem := replay_problem(config.text, replay, rollback=1 + drafts):
        raise ValueError(f"{mode_name} is {mode} and {keep_name} is {keep}, but {problem}")
    return replay


def zero_overhead_scheduling(engine_type: EngineType) -> bool:
    """DEEPINFER_ZERO_OVERHEAD_SCHEDULING, by default on for all but PROMPT engines (DB §1.8).

    DeepInfer writes the default into the environment, where it binds the next engine of the process (DB §1.2);
    nothing is written here.
    """
    asked = env.ZERO_OVERHEAD_SCHEDULING
    return engine_type != EngineType.PROMPT if asked is None else asked


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


def verifies_by_confidence(limits: EngineLimits) -> bool:
    """DEEPINFER_ENABLE_MTP_VARLEN, if there are drafts."""
    return env.ENABLE_MTP_VARLEN and limits.num_drafts > 0


def pool_blocks(limits: EngineLimits, available: int | None) -> int:
    """Blocks of each dp rank: `available`; None: as many as its sequences can use.

    Raises ValueError if one sequence of max_model_len does not fit, with the arithmetic.
    """
    if available is None:
        return limits.seqs_per_index * limits.blocks_per_sequence
    if available < limits.blocks_per_sequence:
        raise ValueError(
            f"the cache has {available} blocks of {limits.tokens_per_block} tokens for each dp rank, but one "
            f"sequence of max_model_len ({limits.max_model_len}) tokens takes {limits.blocks_per_sequence}: lower "
            f"max_model_len to {available * limits.tokens_per_block}, or give the cache more (num_kv_blocks, "
            "gpu_memory_utilization)"
        )
    return available


def step_buckets(limits: EngineLimits, *, most_prefill_tokens: int, max_programs: int) -> BucketTable:
    """The step programs of an engine. Prompts that must not be cut need one as long as the longest."""
    whole = limits.prompt_limit
    budget = min(limits.max_num_batched_tokens, most_prefill_tokens) if limits.chunked_prefill else whole
    return bucket_table(
        max_num_seqs=limits.seqs_per_index,
        num_drafts=limits.num_drafts,
        max_prefill_tokens=budget,
        max_chunk=min(budget, whole),
        max_blocks=limits.blocks_per_sequence,
        max_programs=max_programs,
        chunked_prefill=limits.chunked_prefill,
        decode_sizes=2 if verifies_by_confidence(limits) else 1,
    )


def engine_plan(
    config: ModelConfig,
    args: EngineArgs,
    *,
    platform: str,
    memory: int,
    temporaries: int | None = None,
) -> MemoryPlan:
    """The memory plan of the engine that `args` ask for; see `plan_memory`."""
    whole_prompt = args.max_model_len or config.text.max_position_embeddings
    return plan_memory(
        config,
        precision=args.precision,
        platform=platform,
        data_parallel_size=args.data_parallel_size,
        expert_parallel_size=args.expert_parallel_size,
        memory=memory,
        utilization=args.gpu_memory_utilization,
        max_num_seqs=args.max_num_seqs,
        max_model_len=args.max_model_len,
        max_prefill_tokens=prefill_tokens(platform) if args.chunked_prefill else whole_prompt,
        tokens_per_block=args.tokens_per_block,
        packed=args.kv_cache_format == "packed",
        num_drafts=num_drafts(config.text.draft_block, args.engine_type),
        num_blocks=args.num_kv_blocks,
        image_cache_bytes=args.image_cache_bytes,
        temporaries=temporaries,
    )


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


def _num_bytes(params: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params))
