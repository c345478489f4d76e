"""A brute-force device that runs plans, and the checks that hold around every plan.

The device keeps what a real one keeps: pools of blocks, and per slot a length, a last token and a block table that
grows by what steps send. It runs steps when they are launched, in their order, as a real one does, whatever the host
learns of them later. Every row must read back exactly its own tokens through its block table; the next token is a
hash of all of them, so a right continuation proves blocks, slots, chunks, preemption and data index.
"""

import random
from dataclasses import dataclass, field

import numpy as np

from deepinfer_jax.scheduler import (
    BucketTable,
    DecodeStep,
    PrefillStep,
    Scheduler,
    Sequence,
    SequenceStatus,
    StepPlan,
    blocks_for,
    bucket_table,
)

EOS = 0
GARBAGE = -99


def next_token(tokens: list[int]) -> int:
    """The continuation of a text; EOS about once in 40 tokens."""
    return hash(tuple(tokens)) % 40


def continuation(sequence: Sequence) -> list[int]:
    """What the sequence must have given when it has finished by itself."""
    tokens, output = sequence.prompt_token_ids.tolist(), []
    while True:
        output.append(next_token(tokens + output))
        if output[-1] == sequence.eos_id and not sequence.ignore_eos:
            return output
        if len(tokens) + len(output) > sequence.max_model_len or len(output) == sequence.max_tokens:
            return output


def make_sequence(seq_id: int, prompt_len: int, max_tokens: int = 4, *, max_model_len: int = 32) -> Sequence:
    prompt = (np.arange(prompt_len, dtype=np.int32) * 7 + seq_id) % 1000
    return Sequence(seq_id, str(seq_id), prompt, max_tokens, EOS, max_model_len)


def endless(seq_id: int, prompt_len: int, max_tokens: int = 20) -> Sequence:
    """A sequence that only max_tokens stops."""
    sequence = make_sequence(seq_id, prompt_len, max_tokens)
    sequence.ignore_eos = True
    return sequence


def make_scheduler(
    *,
    max_num_seqs: int = 4,
    max_model_len: int = 32,
    num_blocks: int = 64,
    tokens_per_block: int = 4,
    num_drafts: int = 0,
    data_parallel_size: int = 1,
    max_num_batched_tokens: int = 32,
    max_prefill_tokens: int = 8,
    max_programs: int = 12,
    chunked_prefill: bool = True,
    stop_preempted_request: bool = False,
    buckets: BucketTable | None = None,
) -> Scheduler:
    """A small scheduler with the programs that its limits ask for."""
    buckets = buckets or bucket_table(
        max_num_seqs=-(-max_num_seqs // data_parallel_size),
        num_drafts=num_drafts,
        max_prefill_tokens=max_prefill_tokens,
        max_chunk=max_prefill_tokens,
        max_blocks=blocks_for(max_model_len, tokens_per_block),
        max_programs=max_programs,
        chunked_prefill=chunked_prefill,
    )
    return Scheduler(
        buckets=buckets,
        data_parallel_size=data_parallel_size,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        num_blocks=num_blocks,
        tokens_per_block=tokens_per_block,
        num_drafts=num_drafts,
        chunked_prefill=chunked_prefill,
        stop_preempted_request=stop_preempted_request,
    )


@dataclass
class Slot:
    """What the device keeps of a slot: the tokens it has computed or sampled, and its block table."""

    text: list[int] = field(default_factory=list)
    table: list[int] = field(default_factory=list)


class Device:
    """Runs the steps of a scheduler's plans."""

    def __init__(self, scheduler: Scheduler, seed: int = 0) -> None:
        self.scheduler = scheduler
        self.tokens_per_block = scheduler.tokens_per_block
        size = scheduler.total_slots // scheduler.data_parallel_size
        self.slots = [[Slot() for _ in range(size)] for _ in range(scheduler.data_parallel_size)]
        self.memory: dict[tuple[int, int, int], int] = {}  # (data index, block, offset) -> token
        self.random = random.Random(seed)

    def run(self, step: PrefillStep | DecodeStep) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, counts) of the step."""
        check_shape(step)
        run_row = self._prefill_row if isinstance(step, PrefillStep) else self._decode_row
        rows = [run_row(step, index) for index in range(len(step.sequences))]  # type: ignore[arg-type]
        width = 1 if isinstance(step, PrefillStep) else self.scheduler.lookahead
        tokens = np.full((len(rows), width), GARBAGE, np.int32)
        for index, row in enumerate(rows):
            tokens[index, : len(row)] = row
        return tokens, np.asarray([len(row) for row in rows], np.int32)

    def _slot(self, step: PrefillStep | DecodeStep, index: int) -> Slot:
        slot = self.slots[step.data_index[index]][step.slots[index]]
        new = [block for block in step.new_blocks[index].tolist() if block >= 0]
        if isinstance(step, PrefillStep) and step.starts[index] == 0:
            slot.text, slot.table = [], []
        if new:
            assert step.first_new_block[index] == len(slot.table), "block tables grow at their end"
            slot.table += new
        return slot

    def _write(self, step: PrefillStep | DecodeStep, index: int, slot: Slot, start: int, tokens: list[int]) -> None:
        for position, token in enumerate(tokens, start):
            if position // self.tokens_per_block < len(slot.table):
                block = slot.table[position // self.tokens_per_block]
                self.memory[int(step.data_index[index]), block, position % self.tokens_per_block] = token

    def _read(self, step: PrefillStep | DecodeStep, index: int, slot: Slot, count: int) -> list[int]:
        assert blocks_for(count, self.tokens_per_block) <= min(step.bucket.width, len(slot.table))
        return [
            self.memory[int(step.data_index[index]), slot.table[p // self.tokens_per_block], p % self.tokens_per_block]
            for p in range(count)
        ]

    def _prefill_row(self, step: PrefillStep, index: int) -> list[int]:
        sequence, slot = step.sequences[index], self._slot(step, index)
        start, count = int(step.starts[index]), int(step.num_new_tokens[index])
        new = step.tokens[index].tolist()
        text = sequence.prompt_token_ids.tolist() + sequence.output_token_ids
        assert new == text[start : start + count] + [0] * (step.bucket.time - count)
        assert step.completes[index] == (start + count == len(text))
        assert len(slot.text) == start, "chunks follow each other"
        self._write(step, index, slot, start, new[:count])
        slot.text = self._read(step, index, slot, start + count)
        assert slot.text == text[: start + count], "a row reads its own tokens"
        if not step.completes[index]:
            return []
        slot.text.append(next_token(slot.text))
        return slot.text[-1:]

    def _decode_row(self, step: DecodeStep, index: int) -> list[int]:
        sequence, slot = step.sequences[index], self._slot(step, index)
        known, computed = slot.text, len(slot.text) - 1
        if computed >= sequence.max_cached_tokens:  # surely finished; the host does not know yet
            return [GARBAGE] * self.scheduler.lookahead
        if computed:
            assert self._read(step, index, slot, computed) == known[:computed], "a row reads its own tokens"
        accepted = [next_token(known)]
        for _ in range(self.random.randrange(self.scheduler.lookahead)):
            accepted.append(next_token(known + accepted))
        drafts = (accepted[:-1] + [GARBAGE] * self.scheduler.num_drafts)[: self.scheduler.num_drafts]
        self._write(step, index, slot, computed, [known[-1], *drafts])
        last_needed = min(computed + len(accepted), sequence.max_cached_tokens)
        assert self._read(step, index, slot, last_needed) == (known + accepted)[:last_needed]
        slot.text = known + accepted
        return accepted


def check_shape(step: PrefillStep | DecodeStep) -> None:
    """The rows fit the bucket, and no two are in one place or one slot."""
    n = len(step.sequences)
    assert n and len(set(step.sequences)) == n
    for array in (step.data_index, step.row, step.slots, step.first_new_block):
        assert array.shape == (n,) and array.dtype == np.int32
    assert (step.row >= 0).all() and (step.row < step.bucket.rows).all()
    places = list(zip(step.data_index.tolist(), step.row.tolist(), strict=True))
    slots = list(zip(step.data_index.tolist(), step.slots.tolist(), strict=True))
    assert len(set(places)) == len(set(slots)) == n
    if isinstance(step, PrefillStep):
        assert (step.num_new_tokens >= 1).all() and (step.num_new_tokens <= step.bucket.time).all()


class Twin:
    """Drives a scheduler with the brute-force device and checks it around every call.

    Attributes:
        sequences: all that were added.
        ends: sequence -> how often a plan or an update told that it has ended.
        in_flight: the plans that are not booked, with their results.
        num_plans: how many were scheduled.
    """

    def __init__(self, scheduler: Scheduler, seed: int = 0) -> None:
        self.scheduler = scheduler
        self.device = Device(scheduler, seed)
        self.sequences: list[Sequence] = []
        self.ends: dict[Sequence, int] = {}
        self.in_flight: list[tuple[StepPlan, dict[int, tuple[np.ndarray, np.ndarray]]]] = []
        self.num_plans = 0

    def add(self, sequence: Sequence) -> Sequence:
        self.sequences.append(sequence)
        self.scheduler.add_sequence(sequence)
        return sequence

    def launch(self) -> StepPlan:
        """Schedules a plan and runs it."""
        may_decode = [s for s in self.sequences if self._may_decode(s)]
        preemptions = {s: s.num_preemptions for s in self.sequences}
        plan = self.scheduler.schedule()
        self._check_plan(plan)
        self.num_plans += 1
        assert self.num_plans < 20_000, "no end"
        if self.scheduler.data_parallel_size == 1 and plan.prefill:
            assert all(s.num_preemptions == preemptions[s] for s in plan.prefill.sequences), "given up and taken back"
        for sequence in plan.ignored:
            self._count_end(sequence)
        decoding = plan.decode.sequences if plan.decode else []
        for sequence in may_decode:
            assert sequence in decoding or sequence.num_preemptions > preemptions[sequence], "decode starves"
        assert set(decoding) <= set(may_decode), "a decode step in vain"
        if not plan.empty:
            steps = [step for step in (plan.prefill, plan.decode) if step]
            self.in_flight.append((plan, {id(step): self.device.run(step) for step in steps}))
        self.check_accounts()
        return plan

    def land(self, failing: set[Sequence] | None = None) -> None:
        """Books the oldest plan in flight; the rows of `failing` have logits that are not finite."""
        plan, results = self.in_flight.pop(0)
        for step in (plan.prefill, plan.decode):
            if step is None:
                continue
            tokens, counts = results[id(step)]
            lengths = [s.output_len for s in step.sequences]
            finished = [s.status.finished for s in step.sequences]
            finite = np.asarray([s not in (failing or set()) for s in step.sequences])
            for row, number in self.scheduler.update(step, tokens, counts, finite):
                sequence = step.sequences[row]
                assert not finished[row], "an ended sequence takes nothing"
                assert sequence.output_token_ids[lengths[row] :] == tokens[row, :number].tolist()
                assert number or sequence.status == SequenceStatus.FINISHED_FAILED
                lengths[row] += number
                if sequence.status.finished:
                    self._count_end(sequence)
            assert [s.output_len for s in step.sequences] == lengths, "every token is told"
        self.check_accounts()

    def step(self) -> StepPlan:
        """Launches a plan and books everything."""
        plan = self.launch()
        while self.in_flight:
            self.land()
        return plan

    def drain(self, depth: int = 1) -> None:
        """Runs until nothing is unfinished, `depth` plans in flight; then every sequence has ended once, and right."""
        while self.scheduler.num_unfinished or self.in_flight:
            while len(self.in_flight) >= depth:
                self.land()
            plan = self.launch()
            if plan.empty and self.in_flight:
                self.land()
            elif plan.empty:
                assert plan.ignored or not self.scheduler.num_unfinished, "wedged: work is left, and no step"
        self.scheduler.check_idle()
        for sequence in self.sequences:
            assert self.ends.get(sequence) == 1, f"sequence {sequence.seq_id} ended {self.ends.get(sequence)} times"
            if sequence.finish_reason in ("stop", "length"):
                assert sequence.output_token_ids == continuation(sequence)
            assert sequence.output_token_ids == continuation(sequence)[: sequence.output_len]

    def check_accounts(self) -> None:
        """Blocks and slots against what the sequences themselves say that they hold."""
        scheduler = self.scheduler
        blocks: list[tuple[int, int]] = []
        slots: list[tuple[int, int]] = []
        for s in self.sequences:
            assert (s.state_id >= 0) == (s.data_index >= 0)
            if s.state_id < 0:
                assert not s.block_table
                continue
            assert not s.status.finished
            assert len(s.block_table) * scheduler.tokens_per_block >= min(s.num_tokens, s.max_cached_tokens)
            if s.status == SequenceStatus.RUNNING:
                in_flight = self._in_flight(s)
                assert s.total_inflight_tokens == sum(in_flight) and s.num_tokens == len(s) - 1 + sum(in_flight)
                assert s.num_inflight_steps == len(in_flight)
            blocks += [(s.data_index, block) for block in s.block_table]
            slots.append((s.data_index, s.state_id))
        assert len(set(blocks)) == len(blocks) and len(set(slots)) == len(slots), "two owners"
        assert all(0 <= block < scheduler.num_blocks for _, block in blocks)
        assert scheduler.free_blocks == scheduler.total_blocks - len(blocks)
        assert scheduler.free_slots == scheduler.total_slots - len(slots)
        assert scheduler.num_running == len(slots) <= scheduler.max_num_seqs
        waiting = [s for s in self.sequences if not s.status.finished and s.state_id < 0]
        assert scheduler.num_waiting == len(waiting)

    def _may_decode(self, sequence: Sequence) -> bool:
        """Its prompt is computed, and its results in flight may leave something to generate."""
        if sequence.status != SequenceStatus.RUNNING or not sequence.schedulable:
            return False
        output = sequence.output_len + len(self._in_flight(sequence))  # each step gives at least one
        return output < sequence.max_tokens and sequence.prompt_len + output <= sequence.max_model_len

    def _in_flight(self, sequence: Sequence) -> list[int]:
        """The most tokens that each step in flight may give the sequence, of those that surely give some."""
        most: list[int] = []
        for plan, _ in self.in_flight:
            for step in (plan.prefill, plan.decode):
                if step and sequence in step.sequences and sequence not in step.dropped:
                    if isinstance(step, DecodeStep):
                        most.append(self.scheduler.lookahead)
                    elif step.completes[step.sequences.index(sequence)]:
                        most.append(1)
        return most

    def _check_plan(self, plan: StepPlan) -> None:
        scheduler = self.scheduler
        steps = [step for step in (plan.prefill, plan.decode) if step]
        rows = [sequence for step in steps for sequence in step.sequences]
        assert len(set(rows)) == len(rows), "no sequence is in both steps"
        assert all(step.bucket in scheduler.buckets.all and not step.dropped for step in steps)
        if plan.prefill:
            per_index = np.zeros(scheduler.data_parallel_size, int)
            np.add.at(per_index, plan.prefill.data_index, plan.prefill.num_new_tokens)
            if plan.decode:
                np.add.at(per_index, plan.decode.data_index, scheduler.lookahead)
            if scheduler.chunked_prefill:
                assert (per_index <= scheduler.max_num_batched_tokens).all()

    def _count_end(self, sequence: Sequence) -> None:
        assert sequence.status.finished
        self.ends[sequence] = self.ends.get(sequence, 0) + 1


def prefilled(plan: StepPlan) -> list[tuple[int, int, int]]:
    """(sequence, start, new tokens) of each chunk."""
    if plan.prefill is None:
        return []
    ids = [s.seq_id for s in plan.prefill.sequences]
    return list(zip(ids, plan.prefill.starts.tolist(), plan.prefill.num_new_tokens.tolist(), strict=True))


def decoded(plan: StepPlan) -> list[int]:
    """The sequences of the decode step."""
    return [s.seq_id for s in plan.decode.sequences] if plan.decode else []


def give_up(scheduler: Scheduler, step: PrefillStep | DecodeStep) -> None:
    """Books a step whose results are lost."""
    n = len(step.sequences)
    scheduler.update(step, np.zeros((n, 1), np.int32), np.zeros(n, np.int32), np.zeros(n, np.bool_))
