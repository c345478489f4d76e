"""A throughput line in the log, every ten seconds while the engine steps."""

import logging
import time

logger = logging.getLogger(__name__)

_INTERVAL_SECONDS = 10.0


class StatsLogger:
    """Counts tokens and logs rates."""

    def __init__(self) -> None:
        self._start_interval()

    def _start_interval(self) -> None:
        self._start = time.perf_counter()
        self._prompt_tokens = 0
        self._output_tokens = 0

    def record(self, *, prompt_tokens: int, output_tokens: int, running: int, waiting: int) -> None:
        """Books one step."""
        self._prompt_tokens += prompt_tokens
        self._output_tokens += output_tokens
        elapsed = time.perf_counter() - self._start
        if elapsed < _INTERVAL_SECONDS:
            return
        logger.info(
            "prompt %.0f tokens/s, output %.0f tokens/s, %d running, %d waiting",
            self._prompt_tokens / elapsed,
            self._output_tokens / elapsed,
            running,
            waiting,
        )
        self._start_interval()
