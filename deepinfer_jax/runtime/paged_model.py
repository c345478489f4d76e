"""The model as the step programs see it: advance rows of paged caches, and logits of some of their positions."""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from jax import Array

from deepinfer_jax.cache.packed_view import PackedView
from deepinfer_jax.cache.paged import PagedCache, paged_state
from deepinfer_jax.cache.paged_view import PagedView, draft_windows
from deepinfer_jax.config.model_config import ModelConfig, Precision
from deepinfer_jax.config.precision import precision_policy
from deepinfer_jax.kernels.choice import KernelChoice
from deepinfer_jax.model.backbone import hidden_states
from deepinfer_jax.model.bounded_replay import KeptRows, Replay
from deepinfer_jax.model.dspark import DraftContext, Pick, draft_block
from deepinfer_jax.model.forward import compute_logits
from deepinfer_jax.model.probe import Probe
from deepinfer_jax.weights.params import Params


class StepBatch(NamedTuple):
    """The rows of a step, `rows` for each dp rank.

    Attributes:
        tokens: int32 [data, rows, time], valid in the first `lengths` columns of a row.
        lengths: new tokens, 0 in idle rows. int32 [data, rows].
        starts: tokens of the sequence that the cache holds already. int32 [data, rows].
        slots: int32 [data, rows]; an idle row has the number of slots.
        tables: blocks in order of position, the number of blocks where there is none. int32 [data, rows, width].
        kept_from: the first position that the windows of consumer layers may see under bounded replay (DB §9), 0: all.
            int32 [data, rows]; None of a decode step, which it leaves alone.
        offsets: a sequence may have several rows, of one token each, side by side in order of position: how many of
            them are before each row. int32 [data, rows]; None: every row is a sequence.
        places: what images put in the place of tokens (`model/embedding.py`), −1 at text and at padding.
            int32 [data, rows, time]; None: all is text.
        features: the rows [n, hidden] that places name; None: they name none.
    """

    tokens: Array
    lengths: Array
    starts: Array
    slots: Array
    tables: Array
    kept_from: Array | None = None
    offsets: Array | None = None
    places: Array | None = None
    features: Array | None = None


class Advanced(NamedTuple):
    """What a step made of its rows; data · rows of them.

    Attributes:
        hidden: what the head reads, of each row's last `lengths` new tokens, t ≤ time. [data · rows, t, hidden].
        lengths: 0 where a row has none; what stands there then is finite all the same. int32 [data · rows].
        cache: the pools after the step.
    """

    hidden: Array
    lengths: Array
    cache: Any


class Drafted(NamedTuple):
    """Drafts of data · rows rows, k for each.

    Attributes:
        tokens: int32 [data · rows, k].
        logprobs: the distribution that each was drawn from. float32 [data · rows, k, vocab].
        confidences: raw logits of the confidence head. float32 [data · rows, k].
    """

    tokens: Array
    logprobs: Array
    confidences: Array


class StepModel(Protocol):
    """What a step program asks of a model. `params` and `cache` are pytrees, opaque to the caller.

    Equal models compute alike: programs are shared.
    """

    def __hash__(self) -> int: ...

    @property
    def batch_invariant(self) -> bool:
        """Whether a row's results have the same bits in any step; then so have its tokens and log-probabilities."""

    @property
    def vocab_size(self) -> int:
        """Width of its logits."""

    def state(self, tokens_per_block: int) -> Any:
        """All that it keeps of a sequence, a pytree of `cache.pools.StateSpec`; the cache is the same tree of pools."""

    def advance(self, params: Any, cache: Any, batch: StepBatch) -> Advanced:
        """Runs the new tokens of each row.

        A row that starts at 0 finds whatever the last owner of its slot and blocks left there.
        """

    def logits(self, params: Any, hidden: Array) -> Array:
        """float32 [batch, time, vocab] of hidden [batch, time, hidden]."""

    def draft(
        self, params: Any, cache: Any, slots: Array, lengths: Array, tokens: Array, count: int, pick: Pick
    ) -> Drafted:
        """The first `count` drafts behind each row's newest token; asked only where `CacheShape.num_drafts` is `count`.

        They depend on the row's tokens alone, never on what was computed and taken back.

        Args:
            slots: int32 [data, rows].
            lengths: tokens that the cache holds of each row; 0: nothing is to be drafted. int32 [data, rows].
            tokens: at position `lengths`. int32 [data, rows].
            pick: chooses each draft, from the first to the last; beside it, it gives the distribution that it was drawn
                from, log-probabilities float32 [data · rows, vocab].
        """


@dataclass(frozen=True)
class PagedModel:
    """DeepSeek-V4.1's text model on a paged cache, packed or not, with `kernels`.

    replay: how prefill steps run consumer layers; None: exactly.
    """

    config: ModelConfig
    precision: Precision
    kernels: KernelChoice
    packed: bool = True
    replay: Replay | None = None

    @property
    def batch_invariant(self) -> bool:
        return self.kernels.batch_invariant

    @property
    def vocab_size(self) -> int:
        return self.config.text.vocab_size

    def state(self, tokens_per_block: int) -> PagedCache:
        return paged_state(self.config, self.precision, tokens_per_block=tokens_per_block, packed=self.packed)

    def advance(self, params: Params, cache: PagedCache, batch: StepBatch) -> Advanced:
        policy = precision_policy(self.config, self.precision)
        time = batch.tokens.shape[2]
        arguments = cache, batch.tables, batch.slots, batch.starts, batch.lengths, time, self.config, policy
        if batch.offsets is None:
            view = PagedView.of(*arguments, in_order=self.batch_invariant)
        else:
            view = PackedView.of(*arguments, in_order=self.batch_invariant, offsets=batch.offsets)
        tokens = batch.tokens.reshape(-1, time)
        kept = None
        if self.replay is not None and batch.kept_from is not None:
            kept = KeptRows(self.replay, batch.kept_from.reshape(-1))
        hidden, carry = hidden_states(
            params,
            tokens,
            view,
            cache,
            self.config,
            policy,
            Probe(),
            self.kernels,
            places=None if batch.places is None else batch.places.reshape(-1, time),
            features=batch.features,
            kept=kept,
        )
        return Advanced(hidden, view.new.lengths if kept is None else kept.lengths(view.new), carry.cache)

    def logits(self, params: Params, hidden: Array) -> Array:
        return compute_logits(params, hidden, self.kernels)

    def draft(
        self,
        params: Params,
        cache: PagedCache,
        slots: Array,
        lengths: Array,
        tokens: Array,
        count: int,
        pick: Pick,
    ) -> Drafted:
        dtype = precision_policy(self.config, self.precision).dtype
        keys, positions = draft_windows(cache, slots, lengths, self.config.text.sliding_window, dtype)
        context = DraftContext(keys, positions, lengths.reshape(-1))
        given = tokens.reshape(-1)
        return Drafted(*draft_block(params, context, given, pick, count, self.config, self.precision, self.kernels))
