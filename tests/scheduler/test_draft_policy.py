"""Decode steps are sized by what earlier ones reported of their drafts."""

import numpy as np
import pytest

from deepinfer_jax.scheduler import (
    Bucket,
    BucketTable,
    DecodeStep,
    DraftPolicy,
    Limits,
    PrefillStep,
    Scheduler,
    Sequence,
    StepTimes,
)

pytestmark = pytest.mark.pure

FULL, PACKED = Bucket(4, 4, 8), Bucket(4, 4, 8, 8)
BUCKETS = BucketTable(decode=(FULL, PACKED), prefill=(Bucket(4, 8, 8),))
TEMPERATURES = (1.0, 2.0, 1.0)


def make_policy(full_ms: float = 18.0, data: int = 1) -> DraftPolicy:
    times = StepTimes({FULL: (FULL.tokens, full_ms), PACKED: (PACKED.tokens, 10.0)})
    return DraftPolicy(times, TEMPERATURES, data)


def make_scheduler(policy: DraftPolicy | None, sequences: int, data: int = 1) -> Scheduler:
    limits = Limits(
        data_parallel_size=data,
        max_num_seqs=4 * data,
        max_model_len=64,
        prompt_limit=64,
        max_num_batched_tokens=16 * data,
        num_blocks=32,
        tokens_per_block=8,
        num_drafts=3,
    )
    scheduler = Scheduler(limits, BUCKETS, policy)
    for i in range(sequences):
        scheduler.add_sequence(Sequence(i, str(i), np.arange(4, dtype=np.int32), 40, 1, 64))
    return scheduler


def commit(scheduler: Scheduler, step: PrefillStep | DecodeStep | None, count: int) -> None:
    assert step is not None
    n = len(step.sequences)
    tokens = np.full((n, 4), 9, np.int32)
    scheduler.update(step, tokens, np.full(n, count, np.int32), np.ones(n, np.bool_))


def decode(scheduler: Scheduler) -> DecodeStep:
    step = scheduler.schedule().decode
    assert step is not None
    return step


def started(policy: DraftPolicy | None, sequences: int, data: int = 1) -> Scheduler:
    scheduler = make_scheduler(policy, sequences, data)
    commit(scheduler, scheduler.schedule().prefill, 1)
    return scheduler


def test_without_a_policy_all_drafts_are_verified() -> None:
    step = decode(started(None, 3))
    assert (step.bucket, step.budget) == (FULL, None)


def test_confident_drafts_are_all_verified_and_others_as_far_as_they_pay() -> None:
    policy = make_policy(full_ms=14.0)
    scheduler = started(policy, 3)
    step = decode(scheduler)
    assert (step.bucket, step.budget) == (FULL, None)  # nothing is known: 12 tokens in 14 ms beat 8 in 10
    logits = np.log(np.asarray([[9.0, 81.0, 9.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1e-9]]))
    policy.commit(step, logits, np.full(3, 4, np.int32), np.asarray([2, 2, 2], np.int32))
    commit(scheduler, step, 2)
    np.testing.assert_allclose(step.sequences[0].rates, [0.9, 0.9 * 0.9, 0.9**3])
    np.testing.assert_allclose(step.sequences[1].rates, [0.5, 0.25, 0.125])
    # Five drafts more than the three tokens: 0.9, 0.81, 0.729, 0.5, 0.5; the other four are worth 0.63 tokens and 4 ms.
    step = decode(scheduler)
    assert step.bucket == PACKED and step.budget is not None and step.budget.tolist() == [5]


def test_drafts_that_are_surely_rejected_are_not_verified() -> None:
    policy = make_policy()
    scheduler = started(policy, 2)
    step = decode(scheduler)
    logits = np.asarray([[np.nan, 0, 0], [0.0, np.nan, 0]])
    policy.commit(step, logits, np.full(2, 4, np.int32), np.ones(2, np.int32))
    commit(scheduler, step, 1)
    step = decode(scheduler)
    assert step.bucket == PACKED and step.budget is not None and step.budget.tolist() == [1]


def test_each_data_index_has_its_own_budget() -> None:
    policy = make_policy(full_ms=100.0, data=2)
    scheduler = started(policy, 5, data=2)
    step = decode(scheduler)
    counts = np.bincount(step.dp_rank)
    assert step.bucket == PACKED and step.budget is not None
    assert step.budget.tolist() == [min(8 - n, 3 * n) for n in counts.tolist()]


def test_measured_slopes_and_overheads_change_the_choice() -> None:
    policy = make_policy(full_ms=18.0)
    sequences = decode(started(None, 3)).sequences
    for sequence in sequences:
        sequence.rates = [0.9, 0.81, 0.729]
    index = np.zeros(3, np.int32)

    def chosen() -> Bucket:
        return policy.choose(sequences, index, (PACKED, FULL))[0]

    assert chosen() == PACKED  # 7.32 tokens in 10 ms, 10.3 in 18
    for _ in range(9):
        policy.times.add(PACKED, 3, 10.0, 30.0)
    assert chosen() == FULL  # with 30 ms besides
    for _ in range(200):
        policy.times.add(PACKED, 3, 10.0 + 8 * 10.0, 0.0)  # 10 ms more for each row
    assert policy.times.slope_ms == 10.0 and chosen() == PACKED


def test_the_snapshot_tells_predicted_and_real_acceptance() -> None:
    policy = make_policy()
    assert policy.snapshot()["real_acceptance"] == [0.0, 0.0, 0.0]
    step = decode(started(policy, 2))
    logits = np.log(np.asarray([[3.0, 1.0, 1.0], [1.0, 9.0, 1.0]]))
    policy.commit(step, logits, np.asarray([4, 2], np.int32), np.asarray([2, 2], np.int32))
    found = policy.snapshot()
    # Both first drafts accepted; of the second ones only that of the first sequence was verified, and rejected.
    assert found["predicted_acceptance"] == pytest.approx([(0.75 + 0.5) / 2, 0.5, 0.0])
    assert found["real_acceptance"] == [1.0, 0.0, 0.0]
    assert found["num_steps_by_size"] == {8: 1}
