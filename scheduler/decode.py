"""Plans the decode step of an iteration: which sequences are its rows, their blocks, and the step itself.

**Rows.** A sequence decodes in every plan unless the tokens that are surely on their way already fill its limits (an
EOS on its way cannot be known), or it waits for results in flight (`Sequence.waits_for_results`).

**Blocks.** It needs blocks for its text, the most that the steps in flight may add, and the drafts. Where they are not
free, younger sequences are preempted, or it is preempted itself.

**Step.** `DecodeLayout` makes the arrays; `DraftPolicy` chooses how many drafts are verified.
"""

from .buckets import BucketTable
from .decode_layout import DecodeLayout
from .draft_policy import DraftPolicy
from .lifecycle import Lifecycle
from .plan import DecodeStep, blocks_per_decode
from .prefix_cache import PrefixCache
from .sequence import Sequence


class DecodePlanner:
    """Makes the decode steps of one scheduler, in two halves: the prefill step is planned between them.

    Arguments:
        lifecycle: the sequences; the rows are in its `decoding` from `reserve` to `plan`.
        buckets: the step programs.
        prefix: says after which rows a snapshot is taken.
        num_drafts: drafts that a step verifies per sequence.
    """

    def __init__(self, lifecycle: Lifecycle, buckets: BucketTable, prefix: PrefixCache, *, num_drafts: int) -> None:
        self._lifecycle = lifecycle
        self._buckets = buckets
        self._prefix = prefix
        self._num_drafts = num_drafts
        self._blocks_per_decode = blocks_per_decode(prefix.tokens_per_block, num_drafts)
        self.reset()

    def reset(self) -> None:
        """Forgets the rows of the last step."""
        self._layout = DecodeLayout.of([], self._blocks_per_decode)

    def reserve(self) -> dict[Sequence, int]:
        """Picks the decode rows and gives them their blocks, oldest first.

        Returns the former lengths of the block tables that became longer.
        """
        residents, in_flight, num_drafts = self._lifecycle.residents, self._lifecycle.in_flight, self._num_drafts
        self._lifecycle.decoding = [
            sequence
            for sequence in residents.running
            if sequence.schedulable
            and not (
                sequence.waits_for_results
                and (sequence.num_inflight_steps or in_flight.prefills(sequence))  # a chunk may sample nothing
            )
            and len(sequence.output_token_ids) + sequence.num_inflight_steps < sequence.output_limit
        ]
        tokens_per_block = self._prefix.tokens_per_block
        short = [
            sequence
            for sequence in self._lifecycle.decoding
            if sequence.num_tokens + 1 + num_drafts > len(sequence.block_table) * tokens_per_block
        ]
        grown: dict[Sequence, int] = {}
        for sequence in short:
            if sequence.state_id < 0:  # an older one has preempted it
                continue
            num_blocks = len(sequence.block_table)
            # Up to its last token and the drafts, after all that the steps in flight may add.
            wanted = min(sequence.num_tokens + 1 + num_drafts, sequence.max_cached_tokens)
            if not self._lifecycle.reserve(sequence, wanted):
                self._lifecycle.preempt(sequence)
            elif len(sequence.block_table) > num_blocks:
                grown[sequence] = num_blocks
        return grown

    def plan(self, grown: dict[Sequence, int], draft_policy: DraftPolicy | None) -> DecodeStep | None:
        """The decode step of the rows that are left after preemption.

        Arguments:
            grown: what `reserve` returned.
            draft_policy: chooses how many drafts the step verifies; None: all of them.
        """
        decoding, self._lifecycle.decoding = self._lifecycle.decoding, []
        if decoding != self._layout.sequences:
            self._layout = DecodeLayout.of(decoding, self._blocks_per_decode)
        if not decoding:
            return None
        for sequence in decoding:
            sequence.num_tokens += 1 + self._num_drafts
            sequence.num_inflight_steps += 1
        grown = {s: first for s, first in grown.items() if s in self._layout.index}
        captures = self._prefix.decode_captures(decoding)
        return self._layout.step(self._buckets, grown, captures, draft_policy)
