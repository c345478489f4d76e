"""`GrammarCompiler`: the requests that wait for their grammar, which the threads of `structured/pool.py` compile."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from deepinfer_jax.engine.config import GrammarLimits
from deepinfer_jax.engine.grammars.constraint import Constraint
from deepinfer_jax.engine.requests.background import BackgroundWork
from deepinfer_jax.engine.requests.request import Request
from deepinfer_jax.scheduler import Sequence, SequenceStatus
from deepinfer_jax.structured import GrammarError, GrammarPool, PendingGrammar, StructuredArgs, grammar_vocabulary


@dataclass(frozen=True, eq=False)
class Compilation:
    """The grammar of one request, while it is compiled; a `Job`.

    Attributes:
        constraint: of the request; it gets the grammar.
        output_token_ids: what the request has given so far, in another engine.
        grammar: on its way; or why it was not even begun.
    """

    constraint: Constraint
    output_token_ids: list[int]
    grammar: PendingGrammar | GrammarError

    def result(self) -> Constraint | None:
        """The constraint with the masks of the first step, None if its grammar is not compiled yet.

        Raises GrammarError if there will be none, or it does not allow the output.
        """
        if isinstance(self.grammar, GrammarError):
            raise self.grammar
        if self.constraint.matcher is None:
            self.constraint.matcher = self.grammar.matcher()
        if self.constraint.matcher is None:
            return None
        self.constraint.advance(self.output_token_ids, [])
        return self.constraint

    def release(self) -> None:
        """Nothing: what is compiled is kept for others, up to a bound."""


class GrammarCompiler(BackgroundWork[Constraint, Compilation]):
    """Compiles the grammars of requests, in threads that start with the first one.

    Arguments:
        tokenizer: of the engine.
        vocab_size: width of the logits.
        num_rows: most rows of a sequence in a step.
        limits: of the threads that compile grammars.

    Attributes:
        in_use: whether any request had a grammar so far.
    """

    name = "grammar"

    def __init__(self, tokenizer: Any, vocab_size: int, num_rows: int, limits: GrammarLimits) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._limits = limits
        self._shape = (num_rows, -(-vocab_size // 32))
        self._pool: GrammarPool | None = None

    @property
    def in_use(self) -> bool:
        return self._pool is not None

    def constraint(self, args: StructuredArgs) -> Constraint:
        """Of a new request."""
        return Constraint(args, np.zeros(self._shape, np.uint32), np.zeros(self._shape[0], np.bool_))

    def submit(self, sequence: Sequence[Request]) -> None:
        """Has the grammar of a submitted sequence compiled; it must not be schedulable."""
        constraint = sequence.request.constraint
        assert constraint is not None
        if self._pool is None:
            self._pool = self._make_pool()
        grammar: PendingGrammar | GrammarError
        try:
            grammar = self._pool.submit(constraint.args)
        except GrammarError as error:
            grammar = error
        self._pending[sequence] = Compilation(constraint, sequence.output_token_ids, grammar)

    def close(self) -> None:
        """Ends the threads. May be called again."""
        super().close()
        if self._pool is not None:
            self._pool.close()

    def _wait_for(self, jobs: list[Compilation], seconds: float) -> None:
        if self._pool is not None:
            self._pool.wait([job.grammar for job in jobs if isinstance(job.grammar, PendingGrammar)], seconds)

    def _status(self, error: ValueError) -> SequenceStatus:
        return SequenceStatus.FINISHED_SO_FAILED

    def _make_pool(self) -> GrammarPool:
        return GrammarPool(
            lambda: grammar_vocabulary(self._tokenizer, self._vocab_size, self._tokenizer.eos_token_id),
            num_threads=self._limits.num_threads,
            timeout=self._limits.timeout,
            cache_bytes=self._limits.cache_bytes,
        )
