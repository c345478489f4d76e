"""How long anybody waits, whatever arrives behind; and that the same calls give the same plans."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.scheduler import Bucket, BucketTable, PrefillStep, Sequence, StepPlan, blocks_for
from tests.support.scheduler_twin import Twin, endless, make_scheduler, make_sequence

pytestmark = pytest.mark.pure

# (plans since the last arrival, prompt length, max_tokens)
ARRIVALS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 24), st.integers(1, 8)), min_size=1, max_size=30)


def rows(plan: StepPlan) -> list[Sequence]:
    return [s for step in (plan.prefill, plan.decode) if step for s in step.sequences]


@settings(max_examples=60)
@given(
    arrivals=ARRIVALS,
    depth=st.integers(1, 2),
    chunked_prefill=st.booleans(),
    data_parallel_size=st.integers(1, 2),
    stream=st.booleans(),
)
def test_with_enough_blocks_a_prompt_waits_only_for_those_before_it(
    arrivals: list[tuple[int, int, int]], depth: int, chunked_prefill: bool, data_parallel_size: int, stream: bool
) -> None:
    """Waiting is bounded by the work that was there at arrival, also under a stream of short requests behind."""
    scheduler = make_scheduler(
        max_num_seqs=4,
        data_parallel_size=data_parallel_size,
        num_blocks=4 * blocks_for(32, 4),
        max_num_batched_tokens=24,
        max_prefill_tokens=24,
        chunked_prefill=chunked_prefill,
    )
    twin = Twin(scheduler)
    latest_start: dict[Sequence, int] = {}  # of those that have not started
    pending = list(arrivals)
    plan_number = last_arrival = 0
    while pending or latest_start:
        while pending and plan_number >= last_arrival + pending[0][0]:
            _, prompt_len, max_tokens = pending.pop(0)
            last_arrival = plan_number
            # Each plan computes at least one token of those before it, except up to `depth` plans between the launch
            # that ends one of them and the result that tells.
            work = sum(
                max(0, s.prompt_len - s.num_tokens) + s.output_limit - s.output_len + depth
                for s in twin.sequences
                if not s.status.finished
            )
            sequence = twin.add(endless(len(twin.sequences), prompt_len, max_tokens))
            latest_start[sequence] = plan_number + work
        if stream:
            twin.add(endless(len(twin.sequences), 1, 1))
        plan = twin.launch()
        for sequence in rows(plan):
            latest_start.pop(sequence, None)
        assert all(plan_number < latest for latest in latest_start.values()), "a prompt starves"
        if twin.in_flight and (len(twin.in_flight) == depth or plan.empty):
            twin.land()  # the twin checks that every plan decodes all that can
        plan_number += 1
    twin.drain(depth)
    assert scheduler.num_preemptions == 0


@settings(max_examples=60)
@given(arrivals=ARRIVALS, depth=st.integers(1, 2), tokens_per_block=st.sampled_from([2, 4, 8]))
def test_the_oldest_sequence_advances_in_every_plan_in_a_pool_that_only_just_fits_it(
    arrivals: list[tuple[int, int, int]], depth: int, tokens_per_block: int
) -> None:
    longest = max(min(prompt_len + max_tokens - 1, 32) for _, prompt_len, max_tokens in arrivals)
    twin = Twin(make_scheduler(num_blocks=blocks_for(longest, tokens_per_block), tokens_per_block=tokens_per_block))
    for seq_id, (_, prompt_len, max_tokens) in enumerate(arrivals):
        twin.add(endless(seq_id, prompt_len, max_tokens))
    while twin.scheduler.num_unfinished:
        oldest = next(s for s in twin.sequences if not s.status.finished)
        in_flight = oldest.num_inflight_steps
        plan = twin.launch()
        assert oldest in rows(plan) or oldest.output_len + in_flight == oldest.output_limit
        assert oldest.num_preemptions == 0 or oldest.state_id >= 0
        if twin.in_flight and (len(twin.in_flight) == depth or plan.empty):
            twin.land()
    twin.drain(depth)
    assert all(s.output_len == s.output_limit for s in twin.sequences)


@pytest.mark.parametrize("num_drafts", [0, 2])
def test_preemption_changes_no_text(num_drafts: int) -> None:
    def texts(num_blocks: int) -> tuple[list[list[int]], int]:
        twin = Twin(make_scheduler(num_blocks=num_blocks, num_drafts=num_drafts))
        for seq_id in range(12):
            twin.add(make_sequence(seq_id, prompt_len=1 + seq_id % 5, max_tokens=25))
        twin.drain(depth=2)
        return [s.output_token_ids for s in twin.sequences], twin.scheduler.num_preemptions

    plenty, none = texts(num_blocks=64)
    scarce, some = texts(num_blocks=8)
    assert none == 0 and some > 0
    assert scarce == plenty


def test_the_same_calls_give_the_same_plans() -> None:
    def record() -> list[object]:
        twin = Twin(make_scheduler(num_blocks=8, num_drafts=2, data_parallel_size=2), seed=5)
        reported: list[object] = []
        for turn in range(120):
            if turn % 2 == 0:
                twin.add(make_sequence(turn, prompt_len=1 + turn % 17, max_tokens=1 + turn % 23))
            if turn % 13 == 12:
                twin.scheduler.abort({str(turn - turn % 2 - 4)})
            plan = twin.launch()
            reported.append([s.seq_id for s in plan.ignored])
            for step in (plan.prefill, plan.decode):
                if step:
                    reported += [step.bucket, [s.seq_id for s in step.sequences]]
                    reported += [getattr(step, name).tolist() for name in ("dp_rank", "row", "slots", "new_blocks")]
                if isinstance(step, PrefillStep):
                    reported += [step.starts.tolist(), step.tokens.tolist()]
            if len(twin.in_flight) == 2:
                twin.land()
        assert twin.scheduler.num_preemptions > 0
        twin.drain(depth=2)
        return reported

    assert record() == record()


def test_nobody_overtakes_the_first_that_finds_no_blocks() -> None:
    buckets = BucketTable(decode=(Bucket(4, 1, 8),), prefill=(Bucket(2, 32, 8),))
    twin = Twin(make_scheduler(num_blocks=8, tokens_per_block=4, buckets=buckets))
    running = twin.add(endless(0, 20, 8))
    twin.step()
    twin.add(endless(1, 24, 1))  # its chunk needs 6 blocks, 3 are free
    twin.add(endless(2, 4, 1))  # one would do
    while not running.status.finished:
        assert rows(twin.step()) == [running]
    assert [s.seq_id for s in rows(twin.step())] == [1, 2]
    twin.drain()
