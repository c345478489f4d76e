"""What can run at all: sizes that fit together, and requests that fit into them."""

from dataclasses import dataclass

from .buckets import BucketTable
from .plan import blocks_for
from .sequence import Sequence


@dataclass(frozen=True)
class Limits:
    """The sizes on which it depends whether a request can run.

    Attributes:
        max_model_len: longest prompt, and longest text that is computed on.
        prompt_limit: longest prompt that is computed here.
        num_blocks: size of each block pool.
        tokens_per_block: tokens that a block holds.
        decodes: whether more than prompts is computed.
    """

    max_model_len: int
    prompt_limit: int
    num_blocks: int
    tokens_per_block: int
    decodes: bool

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


def check_sizes(
    buckets: BucketTable,
    limits: Limits,
    *,
    max_num_seqs: int,
    num_slots: int,
    lookahead: int,
    max_num_batched_tokens: int,
) -> None:
    """Raises ValueError unless some program serves every step; `num_slots` is of a dp rank."""
    max_blocks = blocks_for(limits.max_model_len, limits.tokens_per_block)
    for shape in buckets.prefill_shapes:
        buckets.choose_prefill(shape, max_blocks)
    if not limits.decodes:
        return
    buckets.choose_decode(num_slots, max_blocks)
    if any(bucket.time != lookahead for bucket in buckets.decode):
        raise ValueError(f"a decode program must take {lookahead} tokens per row, got {buckets.decode}")
    if max_num_batched_tokens < max_num_seqs * lookahead:
        raise ValueError(
            f"max_num_batched_tokens {max_num_batched_tokens} must be at least max_num_seqs × (1 + drafts) = "
            f"{max_num_seqs} × {lookahead} = {max_num_seqs * lookahead}"
        )
