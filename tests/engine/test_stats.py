"""What the engine counts, against what was done; the same figures for Prometheus."""

import gc
import logging
import time
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from deepinfer_jax.engine.environ import rearm
from deepinfer_jax.engine.metrics.prometheus import EngineCollector
from deepinfer_jax.engine.metrics.stats import EngineStats, log_line
from deepinfer_jax.engine.requests.sampling_params import SamplingParams
from tests.support.toy import random_prompt, run, tokens, toy_engine

pytestmark = [pytest.mark.toy, pytest.mark.unoptimised]

PHASES = ("schedule", "launch", "wait", "process")


def test_counters_are_those_of_the_requests() -> None:
    engine = toy_engine()
    for i in range(9):
        engine.add_request("u", str(i), SamplingParams(max_tokens=3 + i, ignore_eos=True), random_prompt(4 + i, seed=i))
    before = time.perf_counter()
    engine.step()
    stats = engine.stats()
    assert (stats["num_running"], stats["num_waiting"], stats["generation_tokens"]) == (4, 5, 0)
    assert (stats["total_slots"], stats["free_slots"]) == (6, 2)
    assert stats["total_blocks"] == 60 and stats["free_blocks"] < 60
    run(engine)
    elapsed = time.perf_counter() - before
    stats = engine.stats()
    assert stats["prompt_tokens"] == sum(range(4, 13))
    assert stats["generation_tokens"] == sum(range(3, 12))
    assert stats["num_finished"] == {"length": 9}
    assert (stats["num_running"], stats["num_waiting"], stats["free_blocks"], stats["free_slots"]) == (0, 0, 60, 6)
    assert stats["num_cached_tokens"] == stats["num_preemptions"] == 0
    assert stats["compile_count"] == engine.compile_count
    # Each request waited less than all of it took, and its first token came after its start.
    assert stats["queue_time_count"] == stats["ttft_count"] == 9
    assert 0 < stats["queue_time_mean"] < stats["ttft_mean"] <= stats["ttft_max"] < elapsed + 60
    assert 0 < sum(stats[f"{phase}_seconds"] for phase in PHASES) < elapsed + 1e-3


def test_queue_time_counts_from_the_arrival_that_the_caller_gives() -> None:
    engine = toy_engine()
    engine.add_request("u", "r", SamplingParams(max_tokens=1), [5], arrival_time=time.perf_counter() - 1000)
    run(engine)
    assert 1000 <= engine.stats()["queue_time_max"] <= engine.stats()["ttft_max"] < 2000


def test_throughput_is_of_the_window_after_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("deepinfer_jax.engine.metrics.stats.time.perf_counter", lambda: now)
    stats = EngineStats(num_drafts=0)
    assert stats.throughput() == (0.0, 0.0)
    for prompt, generation in [(1000, 50), (20, 4), (0, 6)]:
        stats.prompt_tokens += prompt
        stats.generation_tokens += generation
        stats.end_step()
        now += 2.0
    assert stats.throughput() == (20 / 6, 10 / 6)
    assert stats.snapshot()["prompt_throughput"] == 20 / 6


def test_what_is_remembered_of_the_past_is_bounded() -> None:
    stats = EngineStats(num_drafts=0)
    for i in range(5000):
        stats.queue.add(i)
        stats.end_step()
    assert (stats.queue.mean, stats.queue.maximum, stats.queue.count) == (4499.5, 4999, 5000)
    assert len(stats._window) == 1000


def test_a_line_is_logged_every_so_many_steps_with_the_figures_of_that_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DEEPINFER_LOGGING_INTERVAL_STEP", "3")
    rearm()
    engine = toy_engine(disable_log_stats=False)
    monkeypatch.undo()
    rearm()
    for i in range(8):
        engine.add_request("u", str(i), SamplingParams(max_tokens=3, ignore_eos=True), [5, 6, 7])
    with caplog.at_level(logging.INFO, "deepinfer_jax.engine.llm_engine"):
        run(engine)
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(":")[0] for line in lines] == [f"step {n}" for n in range(3, engine.stats()["num_steps"] + 1, 3)]
    # Six slots, and the results of a step are read one step later: after three steps nothing has ended.
    assert "6 running, 2 waiting, " in lines[0] and " slots 100.0% used, " in lines[0] and " 0 finished, " in lines[0]
    assert " slots 0.0% used, 0 cached tokens, 8 finished, 0 preemptions, " in log_line(engine.stats())


def test_a_share_of_the_host_time_is_that_of_its_phase() -> None:
    stats = EngineStats(num_drafts=0)
    stats.seconds = {"schedule": 1.0, "launch": 2.0, "wait": 16.0, "process": 1.0}
    pools = dict.fromkeys(("free_blocks", "total_blocks", "free_slots", "total_slots"), 4)
    counts = dict.fromkeys(("num_running", "num_waiting", "num_cached_tokens", "num_preemptions"), 0)
    line = log_line(pools | counts | stats.snapshot())
    assert line.endswith("host time: schedule 5%, launch 10%, wait 80%, process 5%")


def test_prometheus_reads_the_same_figures_under_conventional_names() -> None:
    engine = toy_engine(served_model_name="mine")
    for i in range(3):
        engine.add_request("u", str(i), SamplingParams(max_tokens=4, ignore_eos=True), [5, 6, 7])
    first = tokens(run(engine)["0"])
    engine.add_request("u", "again", SamplingParams(max_tokens=4, ignore_eos=True), [5, 6, 7, *first[:3]])
    run(engine)
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine))
    text = generate_latest(registry).decode()
    samples: dict[Any, float] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            assert sample.labels.pop("model_name") == "mine"
            samples[sample.name, *sample.labels.values()] = sample.value
    stats = engine.stats()
    assert samples["deepinfer_generation_tokens_total",] == 16
    # The last prompt begins like the others: of the blocks of 4 tokens the first is there, with its snapshot.
    assert samples["deepinfer_prompt_tokens_total",] == 9 + 2
    assert samples["deepinfer_cached_tokens_total",] == 4
    assert samples["deepinfer_snapshots",] == stats["num_snapshots"] > 0
    assert samples["deepinfer_snapshot_bytes",] == stats["snapshot_bytes"] > 0
    assert samples["deepinfer_requests_finished_total", "length"] == 4
    assert samples["deepinfer_time_to_first_token_seconds_count",] == 4
    assert samples["deepinfer_time_to_first_token_seconds_sum",] == pytest.approx(stats["ttft_sum"])
    assert samples["deepinfer_num_requests_running",] == samples["deepinfer_num_requests_waiting",] == 0
    assert samples["deepinfer_kv_blocks_free",] == samples["deepinfer_kv_blocks",] == stats["total_blocks"]
    assert samples["deepinfer_compiled_programs",] == engine.compile_count
    for phase in PHASES:
        assert samples["deepinfer_engine_seconds_total", phase] == pytest.approx(stats[f"{phase}_seconds"])


def test_a_step_leaves_the_garbage_collector_as_it_was() -> None:
    engine = toy_engine()
    seen = []
    schedule = engine.core.scheduler.schedule
    engine.core.scheduler.schedule = lambda: (seen.append(gc.isenabled()), schedule())[1]  # type: ignore[method-assign]
    engine.step()
    assert gc.isenabled()
    gc.disable()
    try:
        engine.step()
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert seen == [False, False]
