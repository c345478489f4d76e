"""The scheduler against its rules, without a model: what runs, in what order, in which rows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.scheduler import Scheduler, Sequence, SequenceStatus, StepPlan

EOS = 1


def make_sequence(seq_id: int, prompt_len: int, max_tokens: int = 4, **kwargs: object) -> Sequence:
    prompt = np.arange(100, 100 + prompt_len, dtype=np.int32)
    defaults = {"eos_id": EOS, "max_model_len": 32}
    return Sequence(seq_id, str(seq_id), prompt, max_tokens, **(defaults | kwargs))  # type: ignore[arg-type]


def make_scheduler(*buckets: tuple[int, int]) -> Scheduler:
    return Scheduler(buckets=buckets or ((2, 4),), max_model_len=32)


def rows(plan: StepPlan) -> list[tuple[int, int]]:
    return [(s.seq_id, int(n)) for s, n in zip(plan.sequences, plan.num_new_tokens, strict=True)]


def run_step(scheduler: Scheduler, token: int = 7) -> StepPlan:
    plan = scheduler.schedule()
    n = len(plan.sequences)
    scheduler.update(plan, np.full(n, token, np.int32), np.ones(n, np.bool_))
    return plan


def test_a_prompt_runs_in_chunks_and_then_one_token_per_step() -> None:
    scheduler = make_scheduler()
    sequence = make_sequence(0, prompt_len=10, max_tokens=2)
    scheduler.add_sequence(sequence)
    plans = [run_step(scheduler) for _ in range(4)]
    assert [rows(p) for p in plans] == [[(0, 4)], [(0, 4)], [(0, 2)], [(0, 1)]]
    assert [p.completes.tolist() for p in plans] == [[False], [False], [True], [True]]
    assert [p.resets.tolist() for p in plans] == [[True], [False], [False], [False]]
    assert plans[1].tokens.tolist() == [[104, 105, 106, 107]]
    assert plans[3].tokens.tolist() == [[7]]
    assert sequence.output_token_ids == [7, 7]
    assert sequence.finish_reason == "length"
    assert not scheduler.schedule().sequences


def test_running_sequences_go_on_beside_prompts() -> None:
    scheduler = make_scheduler((3, 4))
    scheduler.add_sequence(make_sequence(0, prompt_len=2, max_tokens=9))
    run_step(scheduler)
    scheduler.add_sequence(make_sequence(1, prompt_len=6))
    scheduler.add_sequence(make_sequence(2, prompt_len=9))
    assert rows(run_step(scheduler)) == [(0, 1), (1, 4), (2, 4)]
    assert rows(run_step(scheduler)) == [(0, 1), (1, 2), (2, 4)]
    assert rows(run_step(scheduler)) == [(0, 1), (1, 1), (2, 1)]


def test_the_cache_grows_with_what_runs_and_shrinks_when_all_start_from_nothing() -> None:
    scheduler = make_scheduler((1, 8), (4, 2))
    scheduler.add_sequence(make_sequence(0, prompt_len=9, max_tokens=4))
    alone = run_step(scheduler)
    assert (alone.cache_rows, alone.chunk, rows(alone)) == (1, 8, [(0, 8)])
    scheduler.add_sequence(make_sequence(1, prompt_len=5, max_tokens=1))
    together = run_step(scheduler)
    assert (together.cache_rows, together.chunk, rows(together)) == (4, 2, [(0, 1), (1, 2)])
    run_step(scheduler)
    run_step(scheduler)  # sequence 1 is done; the other keeps its row in the larger cache
    assert (run_step(scheduler).cache_rows, scheduler.num_unfinished) == (4, 0)
    scheduler.add_sequence(make_sequence(2, prompt_len=5))
    assert (run_step(scheduler).cache_rows, scheduler.num_unfinished) == (1, 1)


def test_rows_of_a_plan_are_padded_on_the_right_with_zeros() -> None:
    scheduler = make_scheduler()
    scheduler.add_sequence(make_sequence(0, prompt_len=1))
    scheduler.add_sequence(make_sequence(1, prompt_len=3))
    plan = scheduler.schedule()
    assert plan.tokens.tolist() == [[100, 0, 0], [100, 101, 102]]
    assert plan.tokens.dtype == plan.slots.dtype == np.int32


def test_stop_rules_in_deepinfers_order() -> None:
    stopped = make_sequence(0, 3, max_tokens=1)
    stopped.append_token(EOS)
    assert stopped.finish_reason == "stop"  # also the last allowed token: EOS is asked first

    ignoring = make_sequence(1, 3, ignore_eos=True)
    ignoring.append_token(EOS)
    assert ignoring.finish_reason == ""

    full = make_sequence(2, 31, max_tokens=9)
    full.append_token(7)
    assert full.finish_reason == ""  # length 32 == max_model_len goes on
    full.append_token(7)
    assert (full.finish_reason, len(full)) == ("length", 33)


def test_a_prompt_of_the_limit_runs_and_a_longer_one_is_ignored() -> None:
    scheduler = make_scheduler()
    fits, too_long = make_sequence(0, 32), make_sequence(1, 33)
    scheduler.add_sequence(fits)
    scheduler.add_sequence(too_long)
    plan = scheduler.schedule()
    assert rows(plan) == [(0, 4)]
    assert plan.ignored == (too_long,)
    assert too_long.finish_reason == "prompt_length_exceeded"
    assert scheduler.num_unfinished == 1


def test_abort_of_a_running_sequence_is_silent_and_of_a_waiting_one_is_reported() -> None:
    scheduler = make_scheduler((1, 4))
    running, waiting = make_sequence(0, 2), make_sequence(1, 3)
    scheduler.add_sequence(running)
    scheduler.add_sequence(waiting)
    run_step(scheduler)
    assert scheduler.abort({"0", "1", "unknown"}) == (2, 3 + 3)
    plan = scheduler.schedule()
    assert (plan.sequences, plan.ignored) == ((), (waiting,))
    assert scheduler.num_unfinished == 0


def test_a_row_with_infinite_logits_fails_alone() -> None:
    scheduler = make_scheduler()
    bad, good = make_sequence(0, 2), make_sequence(1, 2)
    scheduler.add_sequence(bad)
    scheduler.add_sequence(good)
    plan = scheduler.schedule()
    changed = scheduler.update(plan, np.asarray([5, 6], np.int32), np.asarray([False, True]))
    assert changed == [bad, good]
    assert (bad.status, bad.output_token_ids) == (SequenceStatus.FINISHED_FAILED, [])
    assert good.output_token_ids == [6]


@pytest.mark.parametrize("buckets", [(), ((0, 4),), ((2, 0),), ((4, 2), (2, 4))])
def test_impossible_buckets_are_refused(buckets: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError, match="buckets must be"):
        Scheduler(buckets=buckets, max_model_len=32)


@settings(max_examples=200)
@given(
    prompts=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 6)), max_size=12),
    buckets=st.sampled_from([((1, 3),), ((2, 9),), ((1, 9), (3, 2)), ((1, 4), (2, 4), (5, 1))]),
    aborts=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 11)), max_size=4),
)
def test_any_mix_finishes_within_its_sizes_and_returns_every_slot(
    prompts: list[tuple[int, int]], buckets: tuple[tuple[int, int], ...], aborts: list[tuple[int, int]]
) -> None:
    scheduler = make_scheduler(*buckets)
    sequences = [make_sequence(i, length, max_tokens) for i, (length, max_tokens) in enumerate(prompts)]
    for sequence in sequences:
        scheduler.add_sequence(sequence)

    cached: dict[int, list[int]] = {}  # slot -> tokens: what a cache would hold
    rows_before = 0
    for step in range(2000):
        if not scheduler.num_unfinished:
            break
        scheduler.abort({str(target) for when, target in aborts if when == step})
        plan = scheduler.schedule()
        assert (plan.cache_rows, plan.chunk) in buckets
        assert (plan.num_new_tokens >= 1).all() and (plan.num_new_tokens <= plan.chunk).all()
        if not plan.resets.all():
            assert plan.cache_rows >= rows_before
        rows_before = plan.cache_rows
        assert len(set(plan.slots.tolist())) == len(plan.slots) and set(plan.slots.tolist()) <= set(
            range(plan.cache_rows)
        )
        for row, sequence in enumerate(plan.sequences):
            slot, count = int(plan.slots[row]), int(plan.num_new_tokens[row])
            if plan.resets[row]:
                cached[slot] = []
            cached[slot] += plan.tokens[row, :count].tolist()
            everything = sequence.prompt_token_ids.tolist() + sequence.output_token_ids
            assert cached[slot] == everything[: len(cached[slot])]
            assert plan.completes[row] == (len(cached[slot]) == len(everything))
        n = len(plan.sequences)
        scheduler.update(plan, np.full(n, 7, np.int32), np.ones(n, np.bool_))

    assert scheduler.num_unfinished == 0
    assert all(s.status.finished and s.slot == -1 for s in sequences)
    for sequence in sequences:
        if sequence.finish_reason == "length":
            room = sequence.max_model_len + 1 - sequence.prompt_len
            assert sequence.output_len == min(sequence.max_tokens, room)
    assert sorted(scheduler._free_slots) == list(range(buckets[-1][0]))
