"""The checks that hold around every plan, on a scheduler whose plans a brute-force device runs."""

from collections import Counter

import numpy as np

from deepinfer_jax.scheduler import (
    BucketTable,
    DecodeStep,
    Imported,
    Limits,
    PrefillStep,
    Scheduler,
    Sequence,
    SequenceStatus,
    StepPlan,
    blocks_for,
    bucket_table,
    slots_for,
)
from tests.support.scheduler_twin_device import Device, State, next_token

EOS = 0


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


def imported(sequence: Sequence, num_outputs: int, tokens_per_block: int) -> Sequence:
    """The sequence after up to `num_outputs` tokens of output on another engine, with the state of all but the last."""
    text = sequence.prompt_token_ids.tolist()
    for _ in range(min(num_outputs, sequence.output_limit - 1)):
        if next_token(text) == sequence.eos_id and not sequence.ignore_eos:
            break
        text.append(next_token(text))
    sequence.output_token_ids = text[sequence.prompt_len :]
    blocks = [text[:-1][start : start + tokens_per_block] for start in range(0, len(text) - 1, tokens_per_block)]
    if blocks:
        sequence.imported = Imported(len(text) - 1, State(text[:-1], sequence), blocks)
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
    prefix_caching: bool = False,
    snapshot_budget: int = 10_000,
    decodes: bool = True,
    buckets: BucketTable | None = None,
) -> Scheduler:
    """A small scheduler with the programs that its limits ask for."""
    buckets = buckets or bucket_table(
        max_num_seqs=slots_for(max_num_seqs, data_parallel_size),
        num_drafts=num_drafts,
        max_prefill_tokens=max_prefill_tokens,
        max_chunk=max_prefill_tokens,
        max_blocks=blocks_for(max_model_len, tokens_per_block),
        max_programs=max_programs,
        chunked_prefill=chunked_prefill,
    )
    longest = max(time for _, time in buckets.prefill_shapes)
    limits = Limits(
        data_parallel_size=data_parallel_size,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        prompt_limit=max_model_len if chunked_prefill else min(max_model_len, longest),
        max_num_batched_tokens=max_num_batched_tokens,
        num_blocks=num_blocks,
        tokens_per_block=tokens_per_block,
        num_drafts=num_drafts,
        chunked_prefill=chunked_prefill,
        stop_preempted_request=stop_preempted_request,
        prefix_caching=prefix_caching,
        snapshot_budget=snapshot_budget,
        decodes=decodes,
    )
    return Scheduler(limits, buckets)


class Twin:
    """Drives a scheduler with the brute-force device and checks it around every call.

    Attributes:
        sequences: all that were added.
        ends: sequence -> how often a plan or an update told that it has ended.
        in_flight: the plans that are not committed, with their results.
        num_plans: how many were scheduled.
        handed_over: those that were, which nothing is told of any more.
    """

    def __init__(self, scheduler: Scheduler, seed: int = 0) -> None:
        self.scheduler = scheduler
        self.device = Device(scheduler, seed)
        self.sequences: list[Sequence] = []
        self.ends: dict[Sequence, int] = {}
        self.in_flight: list[tuple[StepPlan, dict[int, tuple[np.ndarray, np.ndarray, list[State]]]]] = []
        self.num_plans = 0
        self.handed_over: set[Sequence] = set()

    def add(self, sequence: Sequence) -> Sequence:
        self.sequences.append(sequence)
        self.scheduler.add_sequence(sequence)
        return sequence

    def launch(self) -> StepPlan:
        """Schedules a plan and runs it."""
        may_decode = [s for s in self.sequences if self._may_decode(s)]
        preemptions = {s: s.num_preemptions for s in self.sequences}
        tables = {s: {*s.block_table} for s in self.sequences}
        plan = self.scheduler.schedule()
        self._check_plan(plan)
        self.num_plans += 1
        assert self.num_plans < 20_000, "no end"
        if self.scheduler.limits.data_parallel_size == 1 and plan.prefill:
            for sequence in plan.prefill.sequences:
                # It may come back if it shares now what it had twice before.
                others = {block for s in self.sequences if s is not sequence for block in s.block_table}
                shares = others.intersection(sequence.block_table) - tables[sequence]
                assert shares or sequence.num_preemptions == preemptions[sequence], "given up and taken back"
        for sequence in plan.ignored:
            self._count_end(sequence)
        decoding = plan.decode.sequences if plan.decode else []
        for sequence in may_decode:
            assert sequence in decoding or sequence.num_preemptions > preemptions[sequence], "decode starves"
        assert set(decoding) <= set(may_decode), "a decode step in vain"
        self.device.prepare(plan)
        steps = [step for step in (plan.prefill, plan.decode) if step]
        if steps:
            self.in_flight.append((plan, {id(step): self.device.run(step) for step in steps}))
        self.check_accounts()
        return plan

    def land(self, failing: set[Sequence] | None = None) -> None:
        """Commits the oldest plan in flight; the rows of `failing` have logits that are not finite."""
        plan, results = self.in_flight.pop(0)
        for step in (plan.prefill, plan.decode):
            if step is None:
                continue
            tokens, counts, states = results[id(step)]
            lengths = [s.output_len for s in step.sequences]
            finished = [s.status.finished for s in step.sequences]
            finite = np.asarray([s not in (failing or set()) for s in step.sequences])
            at_hand = {s: self._at_hand(s) for s in failing or ()}
            for row, number in self.scheduler.update(step, tokens, counts, finite, states):
                sequence = step.sequences[row]
                assert not finished[row], "an ended sequence takes nothing"
                assert sequence.output_token_ids[lengths[row] :] == tokens[row, :number].tolist()
                assert number or sequence.status == SequenceStatus.FINISHED_FAILED
                assert finite[row] or sequence.status.finished
                if not finite[row]:
                    self.device.distrust(sequence, *at_hand[sequence])
                lengths[row] += number
                if sequence.status.finished:
                    self._count_end(sequence)
            assert [s.output_len for s in step.sequences] == lengths, "every token is told"
        self.check_accounts()

    def step(self) -> StepPlan:
        """Launches a plan and commits everything."""
        plan = self.launch()
        while self.in_flight:
            self.land()
        return plan

    def drain(self, depth: int = 1) -> None:
        """Runs until nothing is unfinished, `depth` plans in flight; then every sequence has ended once, and right."""
        while self.scheduler.num_unfinished or self.in_flight:
            for sequence in self.held():
                self.hand_over(sequence)
            while len(self.in_flight) >= depth:
                self.land()
            plan = self.launch()
            if plan.empty and self.in_flight:
                self.land()
            elif plan.empty:
                assert plan.ignored or self.held() or not self.scheduler.num_unfinished, (
                    "wedged: work is left, and no step"
                )
        self.scheduler.check_idle()
        for sequence in self.sequences:
            if sequence in self.handed_over:
                assert sequence not in self.ends and sequence.output_token_ids == continuation(sequence)[:1]
                continue
            assert self.ends.get(sequence) == 1, f"sequence {sequence.seq_id} ended {self.ends.get(sequence)} times"
            if sequence.finish_reason in ("stop", "length"):
                assert sequence.output_token_ids == continuation(sequence)
            assert sequence.output_token_ids == continuation(sequence)[: sequence.output_len]

    def held(self) -> list[Sequence]:
        """Sequences that can be handed over."""
        if self.scheduler.limits.decodes:
            return []
        running = [s for s in self.sequences if s.status == SequenceStatus.RUNNING and s not in self.handed_over]
        return [s for s in running if not self._in_flight(s)]

    def hand_over(self, sequence: Sequence) -> Imported:
        """Its state, after which the scheduler lets go of it."""
        count = len(sequence) - 1
        text = self.device.slots[sequence.dp_rank][sequence.state_id].text
        table = sequence.block_table[: blocks_for(count, self.scheduler.limits.tokens_per_block)]
        blocks = [self.device.block(sequence.dp_rank, block) for block in table]
        self.scheduler.hand_over(sequence)
        self.handed_over.add(sequence)
        self.check_accounts()
        return Imported(count, State(text[:count], sequence), blocks)

    def check_accounts(self) -> None:
        """Blocks and slots against what the sequences themselves say that they hold."""
        scheduler = self.scheduler
        owners: dict[tuple[int, int], tuple[int, list[int]]] = {}  # block -> its number in tables, tokens up to its end
        slots: list[tuple[int, int]] = []
        for s in self.sequences:
            assert (s.state_id >= 0) == (s.dp_rank >= 0)
            if s.state_id < 0:
                assert not s.block_table
                continue
            assert s not in self.handed_over
            assert not s.status.finished
            assert len(s.block_table) * scheduler.limits.tokens_per_block >= min(s.num_tokens, s.max_cached_tokens)
            if s.status == SequenceStatus.RUNNING:
                in_flight = self._in_flight(s)
                assert s.total_inflight_tokens == sum(in_flight) and s.num_tokens == len(s) - 1 + sum(in_flight)
                assert s.num_inflight_steps == len(in_flight)
            text = s.prompt_token_ids.tolist() + s.output_token_ids
            for number, block in enumerate(s.block_table):
                beginning = text[: (number + 1) * scheduler.limits.tokens_per_block]
                assert owners.setdefault((s.dp_rank, block), (number, beginning)) == (number, beginning), "two owners"
            slots.append((s.dp_rank, s.state_id))
            for index, block, key in s.published:
                if scheduler._residents.blocks[index].match(key) == block:
                    start = s.block_keys.index(key) * scheduler.limits.tokens_per_block
                    tokens = text[start : start + scheduler.limits.tokens_per_block]
                    assert self.device.block(index, block) == tokens, "a block can be found that is not written"
        assert len(set(slots)) == len(slots), "two owners"
        assert all(0 <= block < scheduler.limits.num_blocks for _, block in owners)
        assert scheduler.free_blocks == scheduler.total_blocks - len(owners)
        assert scheduler.snapshots.used <= scheduler.snapshots.budget
        assert scheduler.free_slots == scheduler.total_slots - len(slots)
        assert scheduler.num_running == len(slots) <= scheduler.limits.max_num_seqs
        waiting = [s for s in self.sequences if not s.status.finished and s.state_id < 0 and s not in self.handed_over]
        assert scheduler.num_waiting == len(waiting)

    def _at_hand(self, sequence: Sequence) -> tuple[list[tuple[int, int]], list[State]]:
        """The (dp rank, block) that it holds, and the snapshots of its first tokens."""
        kept = self.scheduler.snapshots._states
        blocks = [(sequence.dp_rank, block) for block in sequence.block_table]
        return blocks, [kept[key] for key in sequence.block_keys if key in kept]

    def _may_decode(self, sequence: Sequence) -> bool:
        """Its prompt is computed, and its results in flight may leave something to generate."""
        if sequence.status != SequenceStatus.RUNNING or not sequence.schedulable or not self.scheduler.limits.decodes:
            return False
        steps = [step for plan, _ in self.in_flight for step in (plan.prefill, plan.decode) if step]
        if sequence.waits_for_results and any(sequence in s.sequences and sequence not in s.dropped for s in steps):
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
                        most.append(1 + self.scheduler.limits.num_drafts)
                    elif step.samples[step.sequences.index(sequence)]:
                        most.append(1)
        return most

    def _check_plan(self, plan: StepPlan) -> None:
        scheduler = self.scheduler
        steps = [step for step in (plan.prefill, plan.decode) if step]
        rows = [sequence for step in steps for sequence in step.sequences]
        assert len(set(rows)) == len(rows), "no sequence is in both steps"
        assert all(step.bucket in scheduler.buckets.all and not step.dropped for step in steps)
        for restore in plan.restores:
            sequence = restore.sequence
            assert 0 < restore.num_tokens < len(sequence) and (sequence in rows) == (restore.blocks is None)
            if plan.prefill and sequence in rows:
                assert plan.prefill.starts[plan.prefill.sequences.index(sequence)] == restore.num_tokens
        self._check_blocks(plan, steps)
        if plan.prefill:
            per_index = np.zeros(scheduler.limits.data_parallel_size, int)
            np.add.at(per_index, plan.prefill.dp_rank, plan.prefill.num_new_tokens)
            if plan.decode:
                np.add.at(per_index, plan.decode.dp_rank, 1 + scheduler.limits.num_drafts)
            if scheduler.limits.chunked_prefill:
                assert (per_index <= scheduler.limits.max_num_batched_tokens).all()

    def _check_blocks(self, plan: StepPlan, steps: list[PrefillStep | DecodeStep]) -> None:
        """Who gets blocks gets them alone, and what is discarded can be matched by nobody."""
        residents = [s for s in self.sequences if s.state_id >= 0]
        references = Counter((s.dp_rank, block) for s in residents for block in s.block_table)
        given = [
            (int(index), block)
            for step in steps
            for index, blocks in zip(step.dp_rank, step.new_blocks.tolist(), strict=True)
            for block in blocks
            if block >= 0
        ]
        given += [(r.sequence.dp_rank, b) for r in plan.restores if r.blocks for b in r.sequence.block_table]
        assert all(references[block] == 1 for block in given) and len(set(given)) == len(given)
        kept = self.scheduler.snapshots._states.values()
        assert not {id(state) for state in plan.discarded_snapshots}.intersection(id(state) for state in kept)
        keys = {key for s in self.sequences for key in s.block_keys}
        for dp_rank, pool in enumerate(self.scheduler._residents.blocks):
            discarded = set(plan.discarded_blocks[dp_rank])
            assert discarded.isdisjoint(pool.match(key) for key in keys)
            assert all((dp_rank, b) in given or not references[dp_rank, b] for b in discarded)

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
    """Commits a step whose results are lost."""
    n = len(step.sequences)
    scheduler.update(step, np.zeros((n, 1), np.int32), np.zeros(n, np.int32), np.zeros(n, np.bool_))
