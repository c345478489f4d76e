"""The engine's statistics for Prometheus.

from prometheus_client import REGISTRY, start_http_server
REGISTRY.register(EngineCollector(engine))
start_http_server(9400)
"""

from collections.abc import Iterator
from typing import Any, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from deepinfer_jax.engine.metrics.stats import PHASES

# Metric name, meaning, key of `LLMEngine.stats()`.
_GAUGES = (
    ("deepinfer_num_requests_running", "Requests that hold a slot.", "num_running"),
    ("deepinfer_num_requests_waiting", "Requests that wait for a slot.", "num_waiting"),
    ("deepinfer_requests_awaiting_images", "Of them, with images to open.", "num_requests_awaiting_images"),
    ("deepinfer_kv_blocks", "Blocks of the paged cache.", "total_blocks"),
    ("deepinfer_kv_blocks_free", "Free blocks of the paged cache.", "free_blocks"),
    ("deepinfer_state_slots", "Slots of running sequences.", "total_slots"),
    ("deepinfer_state_slots_free", "Free slots.", "free_slots"),
    ("deepinfer_snapshots", "Slot states kept in host memory for prompts that begin alike.", "num_snapshots"),
    ("deepinfer_snapshot_bytes", "Host memory that they take.", "snapshot_bytes"),
    ("deepinfer_compiled_programs", "Compiled step programs; constant after start.", "compile_count"),
)
# prometheus_client appends _total.
_COUNTERS = (
    ("deepinfer_engine_steps", "Engine iterations.", "num_steps"),
    ("deepinfer_prompt_tokens", "Prompt tokens computed.", "prompt_tokens"),
    ("deepinfer_generation_tokens", "Output tokens handed out.", "generation_tokens"),
    ("deepinfer_cached_tokens", "Prompt tokens whose state was reused.", "num_cached_tokens"),
    ("deepinfer_decode_rows", "Rows of decode steps.", "num_decode_rows"),
    ("deepinfer_wasted_rows", "Those of rejected drafts.", "num_wasted_rows"),
    ("deepinfer_images_opened", "Images of requests that were opened.", "num_images_opened"),
    ("deepinfer_images_encoded", "Images that the vision tower saw.", "num_images_encoded"),
    ("deepinfer_images_reused", "Images of prefill steps that it had seen before.", "num_images_reused"),
    ("deepinfer_num_preemptions", "Sequences that gave up their blocks.", "num_preemptions"),
)
_SUMMARIES = (
    ("deepinfer_request_queue_time_seconds", "Arrival to first launch.", "queue_time"),
    ("deepinfer_time_to_first_token_seconds", "Arrival to first output token.", "ttft"),
)
# By the draft's place in its block, from 0.
_DRAFT_COUNTERS = (
    ("deepinfer_drafts_verified", "Drafts that were verified.", "num_drafts_verified"),
    ("deepinfer_drafts_accepted", "Drafts that were accepted.", "num_drafts_accepted"),
)
_LABEL = ["model_name"]


class HasStats(Protocol):
    """What is collected from: an `LLMEngine`."""

    args: Any

    def stats(self) -> dict[str, Any]: ...


class EngineCollector(Collector):
    """Turns `engine.stats()` into metrics at each scrape; may be registered on any registry.

    Every metric has the label model_name, `EngineArgs.served_model_name`.
    """

    def __init__(self, engine: HasStats) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        model: list[str] = [self._engine.args.served_model_name]
        for name, text, key in _GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=_LABEL)
            gauge.add_metric(model, stats[key])
            yield gauge
        for name, text, key in _COUNTERS:
            counter = CounterMetricFamily(name, text, labels=_LABEL)
            counter.add_metric(model, stats[key])
            yield counter
        for name, text, key in _DRAFT_COUNTERS:
            counter = CounterMetricFamily(name, text, labels=[*_LABEL, "place"])
            for place, count in enumerate(stats[key]):
                counter.add_metric([*model, str(place)], count)
            yield counter
        for name, text, key in _SUMMARIES:
            summary = SummaryMetricFamily(name, text, labels=_LABEL)
            summary.add_metric(model, count_value=stats[f"{key}_count"], sum_value=stats[f"{key}_sum"])
            yield summary
        finished = CounterMetricFamily(
            "deepinfer_requests_finished", "Requests by finish reason.", labels=[*_LABEL, "reason"]
        )
        for reason, count in stats["num_finished"].items():
            finished.add_metric([*model, reason], count)
        yield finished
        seconds = CounterMetricFamily(
            "deepinfer_engine_seconds", "Host time by phase of a step.", labels=[*_LABEL, "phase"]
        )
        for phase in PHASES:
            seconds.add_metric([*model, phase], stats[f"{phase}_seconds"])
        yield seconds
