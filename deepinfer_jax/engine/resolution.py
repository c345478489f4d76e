"""From what is asked for to what an engine is: the one place where arguments, environment, model and devices meet.

The environment is read here and never later: an engine keeps what it was made with, and one that is made after
`environ.rearm` sees what was set since.
"""

import dataclasses
import logging

from deepinfer_jax.config.model_config import ModelConfig, TextConfig
from deepinfer_jax.engine.args import EngineArgs, EngineType
from deepinfer_jax.engine.config import DecodeTimesCache, EngineConfig, GrammarLimits, ImageLimits
from deepinfer_jax.engine.environ import env
from deepinfer_jax.engine.sampler_options import confidence_temperatures, sampler_options
from deepinfer_jax.memory.demand import MemoryDemand
from deepinfer_jax.memory.device import prefill_tokens
from deepinfer_jax.memory.plan import MemoryPlan, plan_memory
from deepinfer_jax.model.bounded_replay import MODES, Replay, replay_problem
from deepinfer_jax.scheduler import blocks_for, slots_for

logger = logging.getLogger(__name__)

_DRAFTS = 5
"""Tokens drafted per step unless asked for otherwise (DB §6.1)."""
# Chunks longer than this gain little: the experts' tiles are full by then.
_CHUNKED_BATCHED_TOKENS = 2048
# DeepInfer's floor for prompts that run in one piece (DB §1.3).
_WHOLE_BATCHED_TOKENS = 4096
_GB = 1 << 30


def resolve_engine(args: EngineArgs, model: ModelConfig, *, platform: str, memory: int) -> EngineConfig:
    """The engine that `args` ask for, of this model on devices of this platform with so many free bytes each.

    Reads nothing but the environment. Raises ValueError for what cannot be, with the reason.
    """
    plan = plan_memory(memory_demand(args, model, platform=platform, memory=memory))
    if plan.problem:
        raise ValueError(f"{args.model}: {plan.problem}")
    return planned_engine(args, model, plan, platform=platform)


def memory_demand(
    args: EngineArgs, model: ModelConfig, *, platform: str, memory: int, temporaries: int | None = None
) -> MemoryDemand:
    """What the engine needs of its devices, as far as it is known without a plan; temporaries: measured."""
    whole_prompt = args.max_model_len or model.text.max_position_embeddings
    return MemoryDemand(
        model,
        precision=args.precision,
        platform=platform,
        data_parallel_size=args.data_parallel_size,
        expert_parallel_size=args.expert_parallel_size,
        memory=memory,
        utilization=args.gpu_memory_utilization,
        max_num_seqs=args.max_num_seqs,
        max_model_len=args.max_model_len,
        max_prefill_tokens=None if args.chunked_prefill else whole_prompt,
        tokens_per_block=args.tokens_per_block,
        packed=args.kv_cache_format == "packed",
        num_drafts=resolve_num_drafts(model.text.draft_block, args.engine_type),
        num_blocks=args.num_kv_blocks,
        image_cache_bytes=args.image_cache_bytes,
        temporaries=temporaries,
    )


def planned_engine(args: EngineArgs, model: ModelConfig, plan: MemoryPlan, *, platform: str) -> EngineConfig:
    """The engine of a plan that has no problem."""
    text = model.text
    config = resolve_config(
        args,
        vocab_size=text.vocab_size,
        max_position_embeddings=text.max_position_embeddings,
        draft_block=text.draft_block,
        most_prefill_tokens=prefill_tokens(platform),
        max_len_in_memory=plan.max_model_len,
        num_blocks=plan.num_blocks,
        image_rows=plan.image_rows,
    )
    return dataclasses.replace(config, replay=bounded_replay(text, config.num_drafts))


def resolve_config(
    args: EngineArgs,
    *,
    vocab_size: int,
    max_position_embeddings: int,
    draft_block: int,
    most_prefill_tokens: int,
    max_len_in_memory: int | None = None,
    num_blocks: int | None = None,
    image_rows: int = 0,
) -> EngineConfig:
    """The engine that `args` and the environment ask for, its replay aside.

    Arguments:
        vocab_size, max_position_embeddings, draft_block: of the model; draft_block: tokens that it drafts at once.
        most_prefill_tokens: of a prefill step on each dp rank, where prompts may be cut.
        max_len_in_memory: longest sequence that the memory left for the cache holds; None: not known to be short.
        num_blocks: of each dp rank; None: as many as its sequences can use.
        image_rows: of image features.

    Raises ValueError for a token budget or a pool that is too small, with the arithmetic, and for an environment
    variable that cannot be, starting with its name.
    """
    num_drafts = resolve_num_drafts(draft_block, args.engine_type)
    max_model_len = args.max_model_len or min(max_position_embeddings, max_len_in_memory or max_position_embeddings)
    if max_model_len > max_position_embeddings:
        logger.warning(
            "max_model_len %d exceeds the model's max_position_embeddings %d", max_model_len, max_position_embeddings
        )
    if num_blocks is None:
        slots = slots_for(args.max_num_seqs, args.data_parallel_size)
        num_blocks = slots * blocks_for(max_model_len, args.tokens_per_block)
    temperatures = confidence_temperatures(num_drafts)
    return EngineConfig(
        engine_type=args.engine_type,
        precision=args.precision,
        kv_cache_format=args.kv_cache_format,
        vocab_size=vocab_size,
        data_parallel_size=args.data_parallel_size,
        max_model_len=max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=_token_budget(args, max_model_len, num_drafts),
        most_prefill_tokens=most_prefill_tokens,
        tokens_per_block=args.tokens_per_block,
        num_blocks=num_blocks,
        num_drafts=num_drafts,
        image_rows=image_rows,
        chunked_prefill=args.chunked_prefill,
        zero_overhead_scheduling=zero_overhead_scheduling(args.engine_type),
        stop_preempted_request=args.stop_preempted_request,
        # Some text must be longer than a block, and states kept.
        prefix_caching=args.enable_prefix_caching
        and args.snapshot_memory_bytes > 0
        and max_model_len > args.tokens_per_block,
        snapshot_memory_bytes=args.snapshot_memory_bytes,
        replay=None,
        sampler=sampler_options(vocab_size, temperatures),
        confidence_temperatures=temperatures,
        verifies_by_confidence=env.ENABLE_MTP_VARLEN and num_drafts > 0,
        decode_times=DecodeTimesCache(directory=env.DECODE_PERF_CACHE_DIR, ttl=env.DECODE_PERF_CACHE_TTL_SEC),
        batch_invariant=env.BATCH_INVARIANT,
        poison_freed_state=env.POISON_FREED_STATE,
        grammars=_grammar_limits(),
        images=_image_limits(),
        logging_interval=0 if args.disable_log_stats else env.LOGGING_INTERVAL_STEP,
        compilation_cache_dir=env.COMPILATION_CACHE_DIR,
    )


def resolve_num_drafts(draft_block: int, engine_type: EngineType) -> int:
    """Tokens drafted per step: DEEPINFER_USE_NEXTN_DECODE, if it is not set the block of drafts, at most 5.

    A PROMPT engine decodes nothing, so it drafts nothing.

    Args:
        draft_block: tokens that the model drafts at once.

    Raises ValueError for a number that the model cannot draft: its block has one width (T19).
    """
    asked = env.USE_NEXTN_DECODE
    if asked is not None and not 0 <= asked <= draft_block:
        has = f"drafts blocks of {draft_block} tokens" if draft_block else "has no draft layers"
        raise ValueError(
            f"DEEPINFER_USE_NEXTN_DECODE is {asked}, but the model {has}; set it to 0 … {draft_block}, or unset it"
        )
    if engine_type is EngineType.PROMPT:
        return 0
    return min(_DRAFTS, draft_block) if asked is None else asked


def bounded_replay(text: TextConfig, num_drafts: int) -> Replay | None:
    """What DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE and DEEPINFER_YOCO_PREFILL_KEEP_TOKENS ask for (DB §9); None: "off".

    A step may be undone by its drafts and its own token, so 1 + num_drafts tokens are kept beside the window
    (DeepInfer's least number of backtracking tokens, also without drafts).

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
    if problem := replay_problem(text, replay, rollback=1 + num_drafts):
        raise ValueError(f"{mode_name} is {mode} and {keep_name} is {keep}, but {problem}")
    return replay


def _token_budget(args: EngineArgs, max_model_len: int, num_drafts: int) -> int:
    """`max_num_batched_tokens`, by default as `EngineArgs` says."""
    decoding = args.max_num_seqs * (1 + num_drafts)
    if args.max_num_batched_tokens is None:
        if args.chunked_prefill:
            return max(_CHUNKED_BATCHED_TOKENS, decoding)
        return max(max_model_len, _WHOLE_BATCHED_TOKENS, decoding)
    if args.max_num_batched_tokens < decoding:
        raise ValueError(
            f"max_num_batched_tokens ({args.max_num_batched_tokens}) must be at least "
            f"max_num_seqs × (1 + drafts) = {args.max_num_seqs} × {1 + num_drafts} = {decoding}: "
            "each running sequence needs that many per step"
        )
    if not args.chunked_prefill and args.max_num_batched_tokens < max_model_len:
        raise ValueError(
            f"max_num_batched_tokens ({args.max_num_batched_tokens}) must be at least max_model_len "
            f"({max_model_len}) when chunked_prefill is off: a prompt runs in one piece"
        )
    return args.max_num_batched_tokens


def zero_overhead_scheduling(engine_type: EngineType) -> bool:
    """DEEPINFER_ZERO_OVERHEAD_SCHEDULING, by default on for all but PROMPT engines (DB §1.8).

    DeepInfer writes the default into the environment, where it binds the next engine of the process (DB §1.2);
    nothing is written here.
    """
    asked = env.ZERO_OVERHEAD_SCHEDULING
    return engine_type is not EngineType.PROMPT if asked is None else asked


def _grammar_limits() -> GrammarLimits:
    limit = env.XGRAMMAR_CACHE_LIMIT_BYTES
    return GrammarLimits(
        num_threads=_at_least_one("SO_BUILDER_CPUS"),
        timeout=_at_least_one("XGRAMMAR_TIMEOUT"),
        cache_bytes=0 if env.XGRAMMAR_DISABLE_CACHE else limit if limit > 0 else None,
    )


def _image_limits() -> ImageLimits:
    return ImageLimits(
        num_threads=_at_least_one("MULTI_MODAL_CPUS"),
        max_bytes=_at_least_one("MULTIMODAL_POOL_SIZE_GB") * _GB,
        max_requests=_at_least_one("MULTI_MODAL_BUFFER_SIZE"),
        timeout=env.MULTI_MODAL_WORKER_TIMEOUT,
    )


def _at_least_one(name: str) -> int:
    value: int = getattr(env, name)
    if value < 1:
        raise ValueError(f"DEEPINFER_{name} is {value}; it must be at least 1")
    return value
