"""Statistics of an engine.

- stats: tokens, latencies, host time. draft_stats: accepted drafts. prometheus: all of them as Prometheus metrics.
"""

from deepinfer_jax.engine.metrics.prometheus import EngineCollector

__all__ = ["EngineCollector"]
