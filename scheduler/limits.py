"""The sizes of a scheduler, and what can run at all: sizes that fit together, and requests that fit into them."""

from dataclasses import dataclass

from .buckets import BucketTable
from .plan import blocks_for
from .sequence import Sequence


def slots_for(max_num_seqs: int, data_parallel_size: int) -> int:
    """Slots of each dp rank for so many sequences in all. Rounded up: max_num_seqs itself bounds how many run."""
    return -(-max_num_seqs // data_parallel_size)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a scheduler may use, and by which rules.

    Attributes:
        data_parallel_size: dp ranks; each has its own blocks and slots.
        max_num_seqs: most sequences that hold a slot, over all dp ranks.
        max_model_len: longest prompt, and longest text that is computed on.
        prompt_limit: longest prompt that is computed here: without chunked prefill what a prefill program takes.
        max_num_batched_tokens: most new tokens of a plan per dp rank, at least max_num_seqs × (1 + num_drafts).
        num_blocks: size of each block pool.
        tokens_per_block: tokens that a block holds.
        num_drafts: drafts that a decode step verifies per sequence.
        chunked_prefill: whether a prompt may be cut.
        stop_preempted_request: whether preemption ends a request.
        prefix_caching: whether sequences start from state that earlier ones left.
        snapshot_budget: bytes of host memory for the slot states that this needs.
        decodes: False: sequences whose prompt is computed are held, for `Scheduler.hand_over`.
    """

    data_parallel_size: int = 1
    max_num_seqs: int
    max_model_len: int
    prompt_limit: int
    max_num_batched_tokens: int
    num_blocks: int
    tokens_per_block: int
    num_drafts: int = 0
    chunked_prefill: bool = True
    stop_preempted_request: bool = False
    prefix_caching: bool = False
    snapshot_budget: int = 0
    decodes: bool = True

    @property
    def num_slots(self) -> int:
        """Slots of each dp rank."""
        return slots_for(self.max_num_seqs, self.data_parallel_size)

    def refusal(self, prompt_len: int, max_tokens: int, *, imported: bool) -> str | None:
        """See `Scheduler.refusal`."""
        prompt_limit = self.max_model_len if imported else self.prompt_limit
        if prompt_len > prompt_limit:
            without = "" if prompt_limit == self.max_model_len else " without chunked prefill"
            return f"the prompt has {prompt_len} tokens, the limit{without} is {prompt_limit}"
        # The last token is given out, never computed on.
        longest = min(prompt_len + max_tokens - 1, self.max_model_len) if self.decodes else prompt_len
        blocks = blocks_for(longest, self.tokens_per_block)
        if blocks > self.num_blocks:
            return (
                f"{prompt_len} prompt tokens and max_tokens {max_tokens}, at most {longest} tokens in the cache, need "
                f"{blocks} blocks of {self.tokens_per_block} tokens, the pool has {self.num_blocks}; lower max_tokens, "
                "shorten the prompt or give the engine more blocks"
            )
        return None

    def check_sequence(self, sequence: Sequence) -> None:
        """Raises ValueError for a sequence that makes no sense; see `Scheduler.add_sequence`."""
        if not 0 < sequence.max_model_len <= self.max_model_len or sequence.prompt_len < 1 or sequence.max_tokens < 1:
            raise ValueError(
                f"request {sequence.request_id}: prompt_len {sequence.prompt_len} and max_tokens "
                f"{sequence.max_tokens} must be at least 1, max_model_len {sequence.max_model_len} from 1 to "
                f"{self.max_model_len}"
            )
        imported = sequence.imported
        if imported is not None and not self.decodes:
            raise ValueError(
                f"request {sequence.request_id}: imported state is of use only to a scheduler that decodes"
            )
        if imported is not None and not (
            0 < imported.num_tokens == len(sequence) - 1 and sequence.output_len < sequence.output_limit
        ):
            raise ValueError(
                f"request {sequence.request_id}: the imported state is of {imported.num_tokens} tokens; with "
                f"{sequence.prompt_len} prompt and {sequence.output_len} output tokens it must be of all but the last, "
                f"at least 1, and the output shorter than {sequence.output_limit}"
            )


def check_sizes(buckets: BucketTable, limits: Limits) -> None:
    """Raises ValueError unless some program serves every step."""
    max_blocks = blocks_for(limits.max_model_len, limits.tokens_per_block)
    for shape in buckets.prefill_shapes:
        buckets.choose_prefill(shape, max_blocks)
    longest = max(time for _, time in buckets.prefill_shapes)
    if not limits.chunked_prefill and limits.prompt_limit > longest:
        raise ValueError(
            f"prompts of up to {limits.prompt_limit} tokens are not cut, but the longest prefill program takes "
            f"{longest}"
        )
    if not limits.decodes:
        return
    buckets.choose_decode(limits.num_slots, max_blocks)
    time = 1 + limits.num_drafts
    if any(bucket.time != time for bucket in buckets.decode):
        raise ValueError(f"a decode program must take {time} tokens per row, got {buckets.decode}")
    if limits.max_num_batched_tokens < limits.max_num_seqs * time:
        raise ValueError(
            f"max_num_batched_tokens {limits.max_num_batched_tokens} must be at least max_num_seqs × (1 + drafts) = "
            f"{limits.max_num_seqs} × {time} = {limits.max_num_seqs * time}"
        )
