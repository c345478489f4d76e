"""What an engine counts, and its statistics for Prometheus."""

from deepinfer_jax.engine.metrics.prometheus import EngineCollector

__all__ = ["EngineCollector"]
