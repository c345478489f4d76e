"""A brute-force device that runs the plans of a scheduler.

It keeps what a real one keeps: pools of blocks, and per slot a length, a last token and a block table that grows by
what steps send. It runs steps when they are launched, in their order, as a real one does, whatever the host learns of
them later. Every row must read back exactly its own tokens through its block table; the next token is a hash of all of
them, so a right continuation proves blocks, slots, chunks, preemption and dp rank. State that is put back carries
its tokens too, and whatever has lost its meaning is overwritten as soon as the plan says so.
"""

import random
from dataclasses import dataclass, field

import numpy as np

from deepinfer_jax.scheduler import (
    DecodeStep,
    PrefillStep,
    Restore,
    Scheduler,
    Sequence,
    SequenceStatus,
    StepPlan,
    blocks_for,
)

GARBAGE = -99


def next_token(tokens: list[int]) -> int:
    """The continuation of a text; EOS about once in 40 tokens."""
    return hash(tuple(tokens)) % 40


@dataclass(frozen=True, eq=False)
class State:
    """What is read from a slot: the tokens whose state it is, and who computed it."""

    tokens: list[int]
    writer: Sequence
    nbytes: int = 100


@dataclass
class Slot:
    """What the device keeps of a slot: the tokens it has computed or sampled, and its block table."""

    text: list[int] = field(default_factory=list)
    table: list[int] = field(default_factory=list)


class Device:
    """Runs the steps of a scheduler's plans."""

    def __init__(self, scheduler: Scheduler, seed: int = 0) -> None:
        self.scheduler = scheduler
        self.tokens_per_block = scheduler.limits.tokens_per_block
        size = scheduler.total_slots // scheduler.limits.data_parallel_size
        self.slots = [[Slot() for _ in range(size)] for _ in range(scheduler.limits.data_parallel_size)]
        self.memory: dict[tuple[int, int, int], int] = {}  # (dp rank, block, offset) -> token
        self.writer: dict[tuple[int, int], Sequence] = {}  # (dp rank, block) -> who wrote to it last
        self.kept: list[State] = []  # all that was ever captured: so what is given up is held by someone
        self.distrusted: set[State] = set()
        self.random = random.Random(seed)

    def prepare(self, plan: StepPlan) -> None:
        """What comes before the steps of a plan: overwrites what is discarded, and restores."""
        for dp_rank, blocks in enumerate(plan.discarded_blocks):
            for block in blocks:
                self.writer.pop((dp_rank, block), None)
                for offset in range(self.tokens_per_block):
                    self.memory.pop((dp_rank, block, offset), None)
        for dp_rank, slots in enumerate(plan.discarded_slots):
            for slot in slots:
                self.slots[dp_rank][slot] = Slot([GARBAGE], [GARBAGE])
        for state in plan.discarded_snapshots:
            assert state.tokens != [GARBAGE], "told twice"
            state.tokens[:] = [GARBAGE]
        for restore in plan.restores:
            self._restore(restore)

    def distrust(self, sequence: Sequence, blocks: list[tuple[int, int]], states: list[State]) -> None:
        """Nobody may start from what a failed sequence may have read: as if it had written that."""
        self.writer |= dict.fromkeys(blocks, sequence)
        self.distrusted |= {*states}

    def _restore(self, restore: Restore) -> None:
        sequence, count = restore.sequence, restore.num_tokens
        text = sequence.prompt_token_ids.tolist() + sequence.output_token_ids
        assert restore.state.tokens == text[:count], "the state of other tokens"
        assert restore.state.writer.status != SequenceStatus.FINISHED_FAILED, "the state of a failed sequence"
        assert restore.state not in self.distrusted, "a state that a failed sequence may have read"
        slot = self.slots[sequence.dp_rank][sequence.state_id]
        slot.table = sequence.block_table[: blocks_for(count, self.tokens_per_block)]
        if restore.blocks is None:
            slot.text = text[:count]
            for block, place in enumerate(slot.table):
                tokens = self.block(sequence.dp_rank, place)
                start = block * self.tokens_per_block
                assert tokens == text[start : start + self.tokens_per_block], "a block of other tokens"
                assert self.writer[sequence.dp_rank, place].status != SequenceStatus.FINISHED_FAILED
        else:
            slot.text = text
            assert len(restore.blocks) == len(slot.table) == len(sequence.block_table)
            self._write(sequence, slot, 0, [token for block in restore.blocks for token in block])

    def block(self, dp_rank: int, block: int) -> list[int]:
        """The tokens in a block, as far as it is written."""
        places = ((dp_rank, block, offset) for offset in range(self.tokens_per_block))
        return [self.memory[place] for place in places if place in self.memory]

    def run(self, step: PrefillStep | DecodeStep) -> tuple[np.ndarray, np.ndarray, list[State]]:
        """(tokens, counts, states of the captures) of the step."""
        check_shape(step)
        run_row = self._prefill_row if isinstance(step, PrefillStep) else self._decode_row
        rows = [run_row(step, index) for index in range(len(step.sequences))]  # type: ignore[arg-type]
        states = [self._captured(step, index) for index in step.captures]
        self.kept += states
        width = 1 if isinstance(step, PrefillStep) else 1 + self.scheduler.limits.num_drafts
        tokens = np.full((len(rows), width), GARBAGE, np.int32)
        for index, row in enumerate(rows):
            tokens[index, : len(row)] = row
        return tokens, np.asarray([len(row) for row in rows], np.int32), states

    def _captured(self, step: PrefillStep | DecodeStep, index: int) -> State:
        text = self.slots[step.dp_rank[index]][step.slots[index]].text
        # The last token of a text that is computed to its end is the next one's input: its state is not there yet.
        is_known = isinstance(step, PrefillStep) and not step.completes[index]
        count = len(text) if is_known else len(text) - 1
        assert count and count % self.tokens_per_block == 0, "a state that does not end with a block"
        return State(text[:count], step.sequences[index])

    def _slot(self, step: PrefillStep | DecodeStep, index: int) -> Slot:
        slot = self.slots[step.dp_rank[index]][step.slots[index]]
        new = [block for block in step.new_blocks[index].tolist() if block >= 0]
        if isinstance(step, PrefillStep) and step.starts[index] == 0:
            slot.text, slot.table = [], []
        if new:
            assert step.first_new_block[index] == len(slot.table), "block tables grow at their end"
            slot.table += new
        return slot

    def _write(self, sequence: Sequence, slot: Slot, start: int, tokens: list[int]) -> None:
        dp_rank = sequence.dp_rank
        for position, token in enumerate(tokens, start):
            if position // self.tokens_per_block < len(slot.table):
                block = slot.table[position // self.tokens_per_block]
                self.memory[dp_rank, block, position % self.tokens_per_block] = token
                self.writer[dp_rank, block] = sequence

    def _read(self, step: PrefillStep | DecodeStep, index: int, slot: Slot, count: int) -> list[int]:
        assert blocks_for(count, self.tokens_per_block) <= min(step.bucket.width, len(slot.table))
        return [
            self.memory[int(step.dp_rank[index]), slot.table[p // self.tokens_per_block], p % self.tokens_per_block]
            for p in range(count)
        ]

    def _prefill_row(self, step: PrefillStep, index: int) -> list[int]:
        sequence, slot = step.sequences[index], self._slot(step, index)
        start, count = int(step.starts[index]), int(step.num_new_tokens[index])
        new = step.tokens[index].tolist()
        text = sequence.prompt_token_ids.tolist() + sequence.output_token_ids
        assert new == text[start : start + count] + [0] * (step.bucket.time - count)
        goes_on = bool(sequence.output_token_ids)  # after a preemption: the last token is the decode step's
        assert step.completes[index] == (start + count == len(text) - goes_on)
        assert step.samples[index] == (step.completes[index] and not goes_on)
        assert len(slot.text) == start, "chunks follow each other"
        self._write(sequence, slot, start, new[:count])
        slot.text = self._read(step, index, slot, start + count)
        assert slot.text == text[: start + count], "a row reads its own tokens"
        if not step.completes[index]:
            return []
        if goes_on:
            slot.text.append(text[-1])
            return []
        slot.text.append(next_token(slot.text))
        return slot.text[-1:]

    def _decode_row(self, step: DecodeStep, index: int) -> list[int]:
        sequence, slot = step.sequences[index], self._slot(step, index)
        known, computed = slot.text, len(slot.text) - 1
        if computed >= sequence.max_cached_tokens:  # surely finished; the host does not know yet
            return [GARBAGE] * (1 + self.scheduler.limits.num_drafts)
        if computed:
            assert self._read(step, index, slot, computed) == known[:computed], "a row reads its own tokens"
        accepted = [next_token(known)]
        for _ in range(self.random.randrange(1 + self.scheduler.limits.num_drafts)):
            accepted.append(next_token(known + accepted))
        drafts = (accepted[:-1] + [GARBAGE] * self.scheduler.limits.num_drafts)[: self.scheduler.limits.num_drafts]
        self._write(sequence, slot, computed, [known[-1], *drafts])
        last_needed = min(computed + len(accepted), sequence.max_cached_tokens)
        assert self._read(step, index, slot, last_needed) == (known + accepted)[:last_needed]
        slot.text = known + accepted
        return accepted


def check_shape(step: PrefillStep | DecodeStep) -> None:
    """The rows fit the bucket, and no two are in one place or one slot."""
    n = len(step.sequences)
    assert n and len(set(step.sequences)) == n
    for array in (step.dp_rank, step.row, step.slots, step.first_new_block):
        assert array.shape == (n,) and array.dtype == np.int32
    assert (step.row >= 0).all() and (step.row < step.bucket.rows).all()
    places = list(zip(step.dp_rank.tolist(), step.row.tolist(), strict=True))
    slots = list(zip(step.dp_rank.tolist(), step.slots.tolist(), strict=True))
    assert len(set(places)) == len(set(slots)) == n
    if isinstance(step, PrefillStep):
        assert (step.num_new_tokens >= 1).all() and (step.num_new_tokens <= step.bucket.time).all()
