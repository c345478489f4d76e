"""What the engine counts: tokens, latencies, and where the host's time goes (DB §14.1)."""

import time
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

from deepinfer_jax.engine.metrics.draft_stats import DraftStats
from deepinfer_jax.engine.requests.request import Request
from deepinfer_jax.runtime.step_result import StepResult
from deepinfer_jax.scheduler import DecodeStep, PrefillStep, StepPlan

Phase = Literal["schedule", "launch", "wait", "process"]
"""schedule: planning a step; launch: packing it and handing it to the device; wait: until its results are there;
process: results to sequences and outputs."""
PHASES: tuple[Phase, ...] = get_args(Phase)

# Rates and latencies are of the latest so many iterations and requests.
_WINDOW = 1000


class _Step(NamedTuple):
    """The counters at the end of an engine iteration; time in perf_counter seconds."""

    time: float
    prompt_tokens: int
    generation_tokens: int


class _Latency:
    """Seconds per request: total and count since the start, mean and maximum of the latest thousand."""

    def __init__(self) -> None:
        self.total = 0.0
        self.count = 0
        self._latest: deque[float] = deque(maxlen=_WINDOW)

    def add(self, seconds: float) -> None:
        self.total += seconds
        self.count += 1
        self._latest.append(seconds)

    @property
    def mean(self) -> float:
        return sum(self._latest) / len(self._latest) if self._latest else 0.0

    @property
    def maximum(self) -> float:
        return max(self._latest, default=0.0)


class EngineStats:
    """Counters since the start, and rates and latencies over a window.

    Attributes:
        steps: engine iterations that launched something or read something.
        prompt_tokens, generation_tokens: tokens computed of prompts (again after preemption) and tokens handed out.
        cached_tokens: tokens whose state was restored instead of computed.
        finished: requests by finish reason; "handed_over" of those that another engine goes on with.
        seconds: time by phase.
        drafts: what became of them.
        queue, first_token: seconds from arrival to the first launch, and to the first output token.
    """

    def __init__(self, num_drafts: int) -> None:
        self.steps = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.cached_tokens = 0
        self.finished: Counter[str] = Counter()
        self.seconds: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
        self.drafts = DraftStats(num_drafts)
        self.queue = _Latency()
        self.first_token = _Latency()
        self._window: deque[_Step] = deque(maxlen=_WINDOW)

    def add_launch(self, plan: StepPlan[Request]) -> None:
        """Commits the launch of a plan."""
        if plan.prefill is not None:
            self.prompt_tokens += int(plan.prefill.num_new_tokens.sum())
        self.cached_tokens += sum(restore.num_tokens for restore in plan.restores if restore.blocks is None)

    def add_results(
        self, step: PrefillStep[Request] | DecodeStep[Request], result: StepResult, emitted: list[tuple[int, int]]
    ) -> None:
        """Commits what a step gave; emitted: what `Scheduler.update` returned."""
        self.generation_tokens += sum([number for _, number in emitted])
        if isinstance(step, DecodeStep):
            rows = [row for row, number in emitted if number]
            self.drafts.add(result.verified[rows], result.counts[rows])

    def end_step(self) -> None:
        """Commits one engine iteration."""
        self.steps += 1
        self._window.append(_Step(time.perf_counter(), self.prompt_tokens, self.generation_tokens))

    def throughput(self) -> tuple[float, float]:
        """Prompt and generation tokens per second from the end of the window's first iteration until now."""
        if len(self._window) < 2:
            return 0.0, 0.0
        first, last = self._window[0], self._window[-1]
        elapsed = time.perf_counter() - first.time
        return (
            (last.prompt_tokens - first.prompt_tokens) / elapsed,
            (last.generation_tokens - first.generation_tokens) / elapsed,
        )

    def snapshot(self) -> dict[str, Any]:
        """All figures by name; see `LLMEngine.stats`."""
        prompt_throughput, generation_throughput = self.throughput()
        return {
            "num_steps": self.steps,
            "num_cached_tokens": self.cached_tokens,
            "num_finished": dict(self.finished),
            "prompt_tokens": self.prompt_tokens,
            "generation_tokens": self.generation_tokens,
            "prompt_throughput": prompt_throughput,
            "generation_throughput": generation_throughput,
            "queue_time_mean": self.queue.mean,
            "queue_time_max": self.queue.maximum,
            "queue_time_sum": self.queue.total,
            "queue_time_count": self.queue.count,
            "ttft_mean": self.first_token.mean,
            "ttft_max": self.first_token.maximum,
            "ttft_sum": self.first_token.total,
            "ttft_count": self.first_token.count,
            **self.drafts.snapshot(),
        } | {f"{phase}_seconds": seconds for phase, seconds in self.seconds.items()}


def log_line(stats: Mapping[str, Any]) -> str:
    """One line for the log from `LLMEngine.stats()`, in the order of DeepInfer's (DB §14.1)."""
    busy = sum(stats[f"{phase}_seconds"] for phase in PHASES) or 1.0
    split = ", ".join(f"{p} {stats[f'{p}_seconds'] / busy:.0%}" for p in PHASES)
    return (
        f"step {stats['num_steps']}: prompt {stats['prompt_throughput']:.0f} tokens/s, "
        f"output {stats['generation_throughput']:.0f} tokens/s, "
        f"{stats['num_running']} running, {stats['num_waiting']} waiting, "
        f"blocks {1 - stats['free_blocks'] / stats['total_blocks']:.1%} used, "
        f"slots {1 - stats['free_slots'] / stats['total_slots']:.1%} used, "
        f"{stats['num_cached_tokens']} cached tokens, {_accepted(stats)}"
        f"{sum(stats['num_finished'].values())} finished, {stats['num_preemptions']} preemptions, "
        f"first token {stats['ttft_mean']:.3f} s (at most {stats['ttft_max']:.3f} s), "
        f"queue {stats['queue_time_mean']:.3f} s, host time: {split}"
    )


def _accepted(stats: Mapping[str, Any]) -> str:
    """Of drafts, "" without: tokens a step of a sequence, and the share of each draft that was accepted."""
    shares = zip(stats["num_drafts_accepted"], stats["num_drafts_verified"], strict=True)
    places = " ".join(f"{accepted / (verified or 1):.0%}" for accepted, verified in shares)
    return f"{stats['mean_accepted_length']:.2f} tokens a step (drafts accepted: {places}), " if places else ""
