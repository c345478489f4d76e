"""Requests that end early, steps that break, engines that stop: everybody hears once, and nothing is kept."""

import logging
import os
from typing import Any

import pytest

from deepinfer_jax.engine.args import EngineType
from deepinfer_jax.engine.environ import rearm
from deepinfer_jax.engine.llm_engine import LLMEngine
from deepinfer_jax.engine.requests.outputs import RequestOutput
from deepinfer_jax.engine.requests.sampling_params import SamplingParams
from deepinfer_jax.engine.resolution import zero_overhead_scheduling
from tests.support.engine_runs import while_unfinished
from tests.support.toy import greedy_twin, make_table, random_prompt, run, sampled_twin, tokens, toy_engine

pytestmark = [pytest.mark.toy, pytest.mark.unoptimised]

TABLE = make_table()
GREEDY = SamplingParams(temperature=0, max_tokens=9)


def collect(results: dict[str, list[RequestOutput]], outputs: list[RequestOutput]) -> None:
    for output in outputs:
        results.setdefault(output.request_id, []).append(output)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("moment", range(12))
def test_an_abort_at_any_moment_gives_one_last_output_and_leaves_the_others_alone(moment: int, overlap: bool) -> None:
    """A prompt of 17 in chunks of 8 and 5 outputs: waiting, between chunks, in flight, running, finished."""
    engine = toy_engine(overlap=overlap)
    prompt, other = random_prompt(17), random_prompt(5, seed=1)
    engine.add_request("u", "gone", SamplingParams(temperature=0, max_tokens=5), prompt)
    engine.add_request("u", "stays", GREEDY, other)
    results: dict[str, list[RequestOutput]] = {}
    for _ in range(moment):
        collect(results, engine.step())
    had = tokens(results.get("gone", []))
    finished = len(had) == 5
    assert engine.abort_request({"gone", "unknown"}) == ((0, 0) if finished else (1, 17 + len(had)))
    assert engine.abort_request("gone") == (0, 0)
    for request_id, outputs in run(engine).items():
        results.setdefault(request_id, []).extend(outputs)
    *before, last = results["gone"]
    if not finished:
        assert (last.finish_reason, last.finished) == ("abort", True)
        assert f"request gone: the request was aborted after {len(had)} tokens" in last.message
        assert tokens(before) == had == greedy_twin(TABLE, prompt, 5)[: len(had)]
    assert tokens(results["stays"]) == greedy_twin(TABLE, other, 9)
    assert engine.stats()["num_finished"] == ({"length": 2} if finished else {"length": 1, "abort": 1})


def test_a_request_of_the_abort_test_takes_between_six_and_twelve_steps() -> None:
    engine = toy_engine()
    engine.add_request("u", "r", SamplingParams(temperature=0, max_tokens=5), random_prompt(17))
    steps = 0
    for _ in while_unfinished(engine):
        engine.step()
        steps += 1
    assert 6 <= steps < 12


def test_aborting_a_waiting_request_takes_it_out_of_the_queue_and_frees_its_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = toy_engine()
    for i in range(6):
        engine.add_request("u", f"running {i}", SamplingParams(max_tokens=12, ignore_eos=True), [5, 6])
    engine.add_request("u", "waiting", GREEDY, [5, 6, 7])
    for _ in range(2):  # a prefill step takes four prompts
        engine.step()
    assert (engine.stats()["num_running"], engine.stats()["num_waiting"]) == (6, 1)
    with caplog.at_level(logging.INFO):
        assert engine.abort_request(["waiting", "unknown"]) == (1, 3)
    assert caplog.messages == ["nothing to abort: unknown not unfinished"]
    (output,) = [o for o in engine.step() if o.request_id == "waiting"]
    assert (output.finish_reason, output.token_id, output.num_output_tokens) == ("abort", 7, 1)
    assert engine.get_num_unfinished_requests() == 6
    engine.add_request("u", "waiting", SamplingParams(temperature=0, max_tokens=2), [5, 6])
    assert tokens(run(engine)["waiting"]) == greedy_twin(TABLE, [5, 6], 2)
    with pytest.raises(TypeError, match="request_id must be"):
        engine.abort_request(7)  # type: ignore[arg-type]


def test_there_is_something_to_do_until_every_output_is_handed_out() -> None:
    engine = toy_engine()
    engine.add_request("u", "r", SamplingParams(temperature=0, max_tokens=1), [5])
    assert engine.has_unfinished_requests()
    assert engine.step() == []  # launched, not read
    assert engine.has_unfinished_requests() and engine.get_num_unfinished_requests() == 1
    (output,) = engine.step()
    assert output.finished and not engine.has_unfinished_requests()
    without = toy_engine(overlap=False)
    without.add_request("u", "r", SamplingParams(temperature=0, max_tokens=1), [5])
    assert [o.token_id for o in without.step()] == [output.token_id]


def test_a_flush_reads_what_is_in_flight_and_launches_nothing() -> None:
    engine = toy_engine()
    engine.add_request("u", "r", SamplingParams(temperature=0, max_tokens=4), [5, 6])
    engine.step()
    assert tokens(engine.flush_inflight_reqs()) == greedy_twin(TABLE, [5, 6], 1)
    assert engine.flush_inflight_reqs() == []
    assert tokens(run(engine)["r"]) == greedy_twin(TABLE, [5, 6], 4)[1:]


def test_an_engine_that_starts_again_gives_the_same_tokens() -> None:
    params = [SamplingParams(max_tokens=6, seq_seed=i, top_p=0.9) for i in range(4)]
    prompts = [random_prompt(3 + 4 * i, seed=i) for i in range(4)]
    for _ in range(2):
        engine = toy_engine()
        for i in range(4):
            engine.add_request("u", str(i), params[i], prompts[i])
        results = run(engine)
        engine.close()
        assert [tokens(results[str(i)]) for i in range(4)] == [
            sampled_twin(TABLE, prompts[i], params[i], 6) for i in range(4)
        ]


def test_an_engine_writes_nothing_into_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepInfer's first engine decides for all of a process (DB §1.2)."""
    name = "DEEPINFER_ZERO_OVERHEAD_SCHEDULING"
    monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    assert toy_engine().limits.zero_overhead_scheduling
    assert dict(os.environ) == before
    assert not toy_engine(overlap=False).limits.zero_overhead_scheduling
    assert toy_engine().limits.zero_overhead_scheduling
    assert zero_overhead_scheduling(EngineType.COMPLETION) and not zero_overhead_scheduling(EngineType.PROMPT)


class Broken:
    """A launched step whose results never come."""

    def result(self) -> Any:
        raise RuntimeError("the device is gone")


def breaks_at(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Lets the third decode launch of the engine fail, at once or when its result is read."""
    runner, launches = engine.core.runner, []
    decode = runner.decode

    def third_fails(*arguments: Any) -> Any:
        launches.append(1)
        if len(launches) != 3:
            return decode(*arguments)
        if where == "launch":
            runner._state = None  # given away
            raise RuntimeError("the device is gone")
        return Broken()

    monkeypatch.setattr(runner, "decode", third_fails)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("where", ["launch", "result"])
def test_a_step_that_breaks_ends_what_ran_and_the_engine_goes_on(
    where: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = toy_engine(overlap=overlap, max_num_seqs=2)
    for i in range(2):
        engine.add_request("u", f"lost {i}", SamplingParams(max_tokens=9, ignore_eos=True), [5, 6])
    engine.add_request("u", "next", SamplingParams(temperature=0, max_tokens=3), [8, 9])
    breaks_at(engine, monkeypatch, where)
    results: dict[str, list[RequestOutput]] = {}
    with pytest.raises(RuntimeError, match="the device is gone"):
        while True:
            collect(results, engine.step())
    assert engine.stats()["num_running"] == 0
    assert engine.stats()["free_blocks"] == engine.stats()["total_blocks"]
    for request_id, outputs in run(engine).items():
        results.setdefault(request_id, []).extend(outputs)
    for i in range(2):
        assert [o.finished for o in results[f"lost {i}"]][-2:] == [False, True]
        last = results[f"lost {i}"][-1]
        assert last.finish_reason == "abort" and "(RuntimeError: the device is gone)" in last.message
    assert tokens(results["next"]) == greedy_twin(TABLE, [8, 9], 3)


def test_an_interrupt_while_results_are_committed_leaves_no_name_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = toy_engine()
    update = engine.core.scheduler.update
    params = SamplingParams(temperature=0, max_tokens=1)
    engine.add_request("u", "ends", params, [5, 6])
    engine.add_request("u", "goes on", SamplingParams(max_tokens=9), [5, 6])

    def interrupted(*arguments: Any) -> Any:
        monkeypatch.undo()
        update(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.core.scheduler, "update", interrupted)
    with pytest.raises(KeyboardInterrupt):
        while True:
            engine.step()
    last = run(engine)
    assert {name: [o.finished for o in outputs] for name, outputs in last.items()} == {
        "ends": [True],
        "goes on": [True],
    }
    for name in ("ends", "goes on"):
        engine.add_request("u", name, params, [8, 9])
    assert {name: tokens(outputs) for name, outputs in run(engine).items()} == dict.fromkeys(
        ("ends", "goes on"), greedy_twin(TABLE, [8, 9], 1)
    )


def test_an_idle_engine_whose_pools_are_not_full_says_so_and_fills_them() -> None:
    engine = toy_engine()
    engine.core.scheduler._residents.blocks[0].allocate(1)  # lost
    engine.add_request("u", "r", SamplingParams(temperature=0, max_tokens=2), [5, 6])
    with pytest.raises(AssertionError, match=r"not idle: 0 sequences run, 59 of 60 blocks"):
        run(engine)
    (last,) = engine.step()  # what was read is not lost
    assert (last.token_id, last.finish_reason) == (greedy_twin(TABLE, [5, 6], 2)[1], "length")
    assert not engine.has_unfinished_requests()
    engine.core.scheduler.check_idle()


def test_the_log_has_a_line_every_so_many_steps(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name = "DEEPINFER_LOGGING_INTERVAL_STEP"
    for interval, quiet, lines in [("3", False, 3), ("3", True, 0), ("0", False, 0)]:
        monkeypatch.setenv(name, interval)
        rearm(name)
        engine = toy_engine(disable_log_stats=quiet, overlap=False)
        engine.add_request("u", "r", SamplingParams(temperature=0, max_tokens=9), [5, 6])
        caplog.clear()
        with caplog.at_level(logging.INFO):
            run(engine)
        said = [r.message for r in caplog.records if "1 running, 0 waiting" in r.message or "0 running" in r.message]
        assert len(said) == lines
    monkeypatch.undo()
    rearm(name)
