"""What an engine is, once its arguments, config.json, the environment and the devices are known (DB §1.3).

`engine/resolution.py` makes it; everything that an engine is built from follows from it, and nothing of the engine
reads an argument or an environment variable again.
"""

from dataclasses import dataclass

from deepinfer_jax.cache.pools import CacheShape
from deepinfer_jax.config.model_config import Precision
from deepinfer_jax.engine.args import EngineType, KVCacheFormat
from deepinfer_jax.model.bounded_replay import Replay
from deepinfer_jax.runtime.duties import RunnerDuties
from deepinfer_jax.sampling import SamplerOptions
from deepinfer_jax.scheduler import BucketTable, Limits, blocks_for, bucket_table, slots_for

MOST_PROGRAMS = 12
"""Step programs of an engine, unless compiling so many takes longer than they save."""


@dataclass(frozen=True, kw_only=True)
class DecodeTimesCache:
    """Where measured decode times are kept.

    Attributes:
        directory: a folder; None: nowhere.
        ttl: seconds that they stay valid.
    """

    directory: str | None
    ttl: int


@dataclass(frozen=True, kw_only=True)
class GrammarLimits:
    """Arguments of `structured.GrammarPool`.

    Attributes:
        num_threads: that compile grammars.
        timeout: seconds from submission until a grammar must be ready.
        cache_bytes: of compiled grammars that are kept; None: any; 0: none is kept.
    """

    num_threads: int
    timeout: int
    cache_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class ImageLimits:
    """Arguments of `ImageWorkers`.

    Attributes:
        num_threads: that open images.
        max_bytes: of pixels that may lie open for requests that have not started.
        max_requests: whose images may do so.
        timeout: seconds that opening a request's images may take; 0 or less: no limit.
    """

    num_threads: int
    max_bytes: int
    max_requests: int
    timeout: float


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The sizes and rules of one engine.

    Attributes:
        engine_type: what it does of a request.
        precision: of weights, caches and arithmetic.
        kv_cache_format: how the cache is stored.
        vocab_size: ids that a prompt may hold.
        data_parallel_size: dp ranks; each has its own blocks and slots.
        max_model_len: most tokens of prompt and output together; also the longest prompt.
        max_num_seqs: most sequences that run at once, over all dp ranks.
        max_num_batched_tokens: most tokens of one engine iteration on each dp rank.
        most_prefill_tokens: most new tokens of a prefill step on each dp rank where prompts may be cut.
        tokens_per_block: tokens of one block of the paged cache.
        num_blocks: blocks of each dp rank.
        num_drafts: tokens drafted per step. So a row of a decode step has 1 + num_drafts tokens, and that many at most
            are taken back.
        image_rows: rows of image features; 0 without a vision tower.
        chunked_prefill: whether a prompt may run in pieces.
        zero_overhead_scheduling: whether the next step is launched before the results of the last are read.
        stop_preempted_request: whether a request that gives way ends, instead of being computed again.
        prefix_caching: whether beginnings of earlier requests are reused.
        snapshot_memory_bytes: host memory for what that needs beside the blocks.
        replay: on how much of a prompt the consumer layers run (bounded replay, DB §9); None: all.
        sampler: what all rows are sampled by.
        confidence_temperatures: of the confidence head, one per draft.
        verifies_by_confidence: whether a step verifies only as many drafts as pay.
        decode_times: where measured step times are kept, by which it is known how many pay.
        batch_invariant: whether a row's result has the same bits for any neighbours, batch size and chunks.
        poison_freed_state: whether what is freed is overwritten with NaN.
        grammars: how they are compiled.
        images: how they are opened.
        logging_interval: steps between log lines of statistics; 0 or less: none.
        compilation_cache_dir: folder of compiled programs; empty: none; None: the user's.

    Raises ValueError if a sequence of max_model_len does not fit into the blocks, with the arithmetic.
    """

    engine_type: EngineType
    precision: Precision
    kv_cache_format: KVCacheFormat
    vocab_size: int
    data_parallel_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    most_prefill_tokens: int
    tokens_per_block: int
    num_blocks: int
    num_drafts: int
    image_rows: int
    chunked_prefill: bool
    zero_overhead_scheduling: bool
    stop_preempted_request: bool
    prefix_caching: bool
    snapshot_memory_bytes: int
    replay: Replay | None
    sampler: SamplerOptions
    confidence_temperatures: tuple[float, ...]
    verifies_by_confidence: bool
    decode_times: DecodeTimesCache
    batch_invariant: bool
    poison_freed_state: bool
    grammars: GrammarLimits
    images: ImageLimits
    logging_interval: int
    compilation_cache_dir: str | None

    def __post_init__(self) -> None:
        if self.num_blocks < self.blocks_per_sequence:
            raise ValueError(
                f"the cache has {self.num_blocks} blocks of {self.tokens_per_block} tokens for each dp rank, but one "
                f"sequence of max_model_len ({self.max_model_len}) tokens takes {self.blocks_per_sequence}: lower "
                f"max_model_len to {self.num_blocks * self.tokens_per_block}, or give the cache more (num_kv_blocks, "
                "gpu_memory_utilization)"
            )

    @property
    def runtime_max_model_len(self) -> int:
        """Every position that a step computes is below this: max_model_len, the drafts of one step, and what the step
        in flight may add.

        DeepInfer sizes its rotary tables and block tables by it; here it is a bound to check against, since rotary
        angles are computed and no step is launched for a sequence that is known to be full.
        """
        in_flight = 1 + self.num_drafts if self.zero_overhead_scheduling else 0
        return self.max_model_len + 2 * self.num_drafts + in_flight

    @property
    def prompt_limit(self) -> int:
        """Longest prompt: max_model_len, or without chunked prefill what one step takes."""
        return self.max_model_len if self.chunked_prefill else min(self.max_model_len, self.max_num_batched_tokens)

    @property
    def num_slots(self) -> int:
        """Slots of each dp rank."""
        return slots_for(self.max_num_seqs, self.data_parallel_size)

    @property
    def blocks_per_sequence(self) -> int:
        """Blocks of a sequence of max_model_len tokens: the width of a block table."""
        return blocks_for(self.max_model_len, self.tokens_per_block)

    @property
    def keep_tokens(self) -> int | None:
        """How many last tokens of a prompt the consumer layers run on; None: all."""
        return None if self.replay is None else self.replay.keep

    @property
    def cache_shape(self) -> CacheShape:
        """The sizes of the device's pools."""
        return CacheShape(
            data=self.data_parallel_size,
            slots=self.num_slots,
            blocks=self.num_blocks,
            tokens_per_block=self.tokens_per_block,
            num_drafts=self.num_drafts,
        )

    @property
    def scheduler_limits(self) -> Limits:
        """What the scheduler may use."""
        return Limits(
            data_parallel_size=self.data_parallel_size,
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            prompt_limit=self.prompt_limit,
            max_num_batched_tokens=self.max_num_batched_tokens,
            num_blocks=self.num_blocks,
            tokens_per_block=self.tokens_per_block,
            num_drafts=self.num_drafts,
            chunked_prefill=self.chunked_prefill,
            stop_preempted_request=self.stop_preempted_request,
            prefix_caching=self.prefix_caching,
            snapshot_budget=self.snapshot_memory_bytes,
            decodes=self.engine_type is not EngineType.PROMPT,
        )

    @property
    def runner_duties(self) -> RunnerDuties:
        """What the runner must be able to do."""
        hands_over = self.engine_type is not EngineType.NORMAL
        return RunnerDuties(
            prefills=True,
            decodes=self.engine_type is not EngineType.PROMPT,
            moves_slots=hands_over or self.prefix_caching,
            moves_blocks=hands_over,
            drafts=self.num_drafts > 0 and self.engine_type is EngineType.COMPLETION,
            poisons=self.poison_freed_state,
        )

    def buckets(self, max_programs: int) -> BucketTable:
        """The step programs, at most so many. Prompts that must not be cut need one as long as the longest."""
        longest = self.prompt_limit
        prefill = min(self.max_num_batched_tokens, self.most_prefill_tokens) if self.chunked_prefill else longest
        return bucket_table(
            max_num_seqs=self.num_slots,
            num_drafts=self.num_drafts,
            max_prefill_tokens=prefill,
            max_chunk=min(prefill, longest),
            max_blocks=self.blocks_per_sequence,
            max_programs=max_programs,
            chunked_prefill=self.chunked_prefill,
            decode_sizes=2 if self.verifies_by_confidence else 1,
        )
