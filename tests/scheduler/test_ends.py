"""How sequences end before their time: aborted, failed or refused; each is reported once and frees all."""

import pytest

from tests.support.scheduler_twin import Twin, endless, make_scheduler, prefilled

pytestmark = pytest.mark.pure


@pytest.mark.parametrize("num_launches", range(7))
@pytest.mark.parametrize("depth", [1, 2])
def test_abort_at_any_moment_frees_at_once_and_is_told_once(num_launches: int, depth: int) -> None:
    twin = Twin(make_scheduler(max_num_seqs=2))
    hit, other = twin.add(endless(0, prompt_len=20)), twin.add(endless(1, prompt_len=3))
    waiting = twin.add(endless(2, prompt_len=3))
    for _ in range(num_launches):  # before, between and in chunks, in decode steps
        if len(twin.in_flight) == depth:
            twin.land()
        twin.launch()
    assert twin.scheduler.abort(["0", "2", "unknown"]) == (2, len(hit) + 3)
    assert twin.scheduler.abort(["0", "2"]) == (0, 0)
    assert hit.block_table == [] and hit.state_id == -1
    twin.check_accounts()
    while len(twin.in_flight) >= depth:
        twin.land()
    assert twin.launch().ignored == (hit, waiting)
    assert (hit.finish_reason, waiting.finish_reason) == ("abort", "abort")
    twin.drain(depth)
    assert other.finish_reason == "length"


def test_abort_of_a_finished_sequence_changes_nothing() -> None:
    twin = Twin(make_scheduler())
    sequence = twin.add(endless(0, prompt_len=3, max_tokens=1))
    twin.step()
    assert twin.scheduler.abort({"0"}) == (0, 0)
    assert sequence.finish_reason == "length"
    assert twin.launch().ignored == ()


def test_a_row_with_infinite_logits_fails_alone() -> None:
    twin = Twin(make_scheduler())
    bad, good = twin.add(endless(0, 2)), twin.add(endless(1, 2))
    long = twin.add(endless(2, 20))  # fails at a chunk that is not its last
    assert prefilled(twin.launch()) == [(0, 0, 2), (1, 0, 2), (2, 0, 2)]
    twin.land(failing={bad, long})
    assert [s.finish_reason for s in (bad, good, long)] == ["logits_not_finite", "", "logits_not_finite"]
    assert [s.output_len for s in (bad, good, long)] == [0, 1, 0]
    twin.drain()


@pytest.mark.parametrize("num_preemptions", [0, 1])
def test_a_reset_forgets_all_but_those_that_wait_and_fills_the_pools(num_preemptions: int) -> None:
    twin = Twin(make_scheduler(max_num_seqs=2, num_blocks=10))
    first, second, third = (twin.add(endless(seq_id, prompt_len=6)) for seq_id in range(3))
    refused = twin.add(endless(3, prompt_len=33))
    twin.scheduler.add_sequence(refused)
    twin.step()
    while twin.scheduler.num_preemptions < num_preemptions:
        twin.step()
    twin.launch()
    twin.launch()
    kept = {third, second} if num_preemptions else {third}
    assert twin.scheduler.reset() == kept
    twin.scheduler.check_idle()
    assert twin.scheduler.num_unfinished == len(kept)
    twin.sequences = [sequence for sequence in (first, second, third) if sequence in kept]
    twin.in_flight.clear()
    twin.drain(depth=2)
    assert third.finish_reason == "length"


def test_requests_that_can_never_run_are_refused_with_the_arithmetic() -> None:
    scheduler = make_scheduler(num_blocks=5, tokens_per_block=4, max_model_len=32)
    assert scheduler.refusal(33, 1) == "the prompt has 33 tokens, the limit is 32"
    assert scheduler.refusal(8, 13) is None  # 20 tokens in the cache: the 21st is given out, never computed on
    assert scheduler.refusal(8, 14) == (
        "8 prompt tokens and max_tokens 14, at most 21 tokens in the cache, need 6 blocks of 4 tokens, the pool has 5; "
        "lower max_tokens, shorten the prompt or give the engine more blocks"
    )
    whole = make_scheduler(chunked_prefill=False, max_prefill_tokens=16)
    assert whole.refusal(17, 1) == "the prompt has 17 tokens, the limit without chunked prefill is 16"
    # However large max_tokens is, max_model_len ends the text.
    assert make_scheduler(num_blocks=8, tokens_per_block=4, max_model_len=32).refusal(1, 2**31) is None


def test_a_refused_sequence_counts_as_unfinished_until_the_next_plan_tells_it() -> None:
    twin = Twin(make_scheduler())
    fits, too_long = twin.add(endless(0, 32)), twin.add(endless(1, 33))
    assert (twin.scheduler.num_unfinished, twin.scheduler.num_waiting) == (2, 1)
    plan = twin.launch()
    assert plan.ignored == (too_long,) and too_long.finish_reason == "prompt_length_exceeded"
    assert twin.scheduler.num_unfinished == 1
    twin.drain()
    assert fits.output_len == 1
