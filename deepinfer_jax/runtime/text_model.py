"""The model as the step programs see it: advance rows of a cache, and logits of some of their positions."""

from dataclasses import dataclass
from typing import Any, Protocol

from jax import Array

from deepinfer_jax.cache import Cache, init_cache, reset_rows
from deepinfer_jax.config import ModelConfig, Precision
from deepinfer_jax.kernels.choice import KernelChoice
from deepinfer_jax.model.forward import compute_logits, forward
from deepinfer_jax.params import Params


class StepModel(Protocol):
    """What a step program asks of a model. `params` and `cache` are pytrees, opaque to the caller.

    Every leaf of the cache has the rows as its leading axis. Equal models compute alike: programs are shared.
    """

    def __hash__(self) -> int: ...

    def init_cache(self, rows: int) -> Any:
        """An empty cache of `rows` rows."""

    def advance(self, params: Any, cache: Any, tokens: Array, lengths: Array, resets: Array) -> tuple[Array, Any]:
        """Runs `lengths` [rows] new tokens of int32 `tokens` [rows, time]; rows of length 0 stay as they are.

        Rows where bool `resets` [rows] holds are emptied first. Returns hidden [rows, time, hidden] and the cache.
        """

    def logits(self, params: Any, hidden: Array) -> Array:
        """float32 [rows, time, vocab] of hidden [rows, time, hidden]."""


@dataclass(frozen=True)
class TextModel:
    """DeepSeek-V4.1's text model on a dense cache of `max_length` positions per row, with `kernels`."""

    config: ModelConfig
    precision: Precision
    max_length: int
    kernels: KernelChoice

    def init_cache(self, rows: int) -> Cache:
        return init_cache(self.config, rows, self.max_length, precision=self.precision)

    def advance(
        self, params: Params, cache: Cache, tokens: Array, lengths: Array, resets: Array
    ) -> tuple[Array, Cache]:
        output = forward(
            params,
            self.config,
            tokens,
            cache=reset_rows(cache, resets),
            lengths=lengths,
            precision=self.precision,
            return_logits=False,
            kernels=self.kernels,
        )
        assert output.cache is not None  # one was given
        return output.hidden, output.cache

    def logits(self, params: Params, hidden: Array) -> Array:
        return compute_logits(params, hidden)
