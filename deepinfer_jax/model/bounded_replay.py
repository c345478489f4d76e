"""Decoder bounded replay: the later layers run on the end of a prompt only (DB §9, model.md §8).

P is the first layer of ratio 1. Layers before it are producers, those from P on consumers. Consumers look at old tokens
in two ways: through entries and index keys that all come from the input of layer P, and through their windows. So
they run on the last `keep` tokens alone, whose windows then begin at the first of them: an approximation, by which
prefill costs the producers' layers only. Decode steps are exact in what they do.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from deepinfer_jax.cache.view import NewTokens
from deepinfer_jax.config.layer_plan import LayerPlan, layer_plans
from deepinfer_jax.config.model_config import TextConfig
from deepinfer_jax.model.carry import Carry
from deepinfer_jax.model.compressor import store_entries
from deepinfer_jax.model.context import ForwardContext
from deepinfer_jax.model.hyper_connections import enter_sublayer
from deepinfer_jax.weights.params import Layer

Mode = Literal["mask", "compact"]
MODES: tuple[Mode, ...] = get_args(Mode)


@dataclasses.dataclass(frozen=True)
class Replay:
    """How consumer layers run on a prompt.

    Attributes:
        mode: "mask" computes all rows and narrows the windows; "compact" leaves the rows before the last `keep` out.
            Both give the same numbers in the rows that are kept.
        keep: tokens at the end of a prompt.
    """

    mode: Mode
    keep: int


@dataclasses.dataclass(frozen=True)
class KeptRows:
    """The rows of one prefill step that consumers run on.

    Attributes:
        kept_from: first position that they may see in their windows: the length of the whole sequence − keep, or less
            than 1. int32 [batch].
    """

    replay: Replay
    kept_from: jax.Array

    def lengths(self, new: NewTokens) -> jax.Array:
        """How many of each row's last new tokens have final states. int32 [batch]."""
        if self.replay.mode == "mask":
            return new.lengths
        return jnp.clip(new.start + new.lengths - self.kept_from, 0, new.lengths)


def first_consumer(text: TextConfig) -> int | None:
    """P; None without a layer of ratio 1."""
    return next((plan.index for plan in layer_plans(text) if plan.ratio == 1), None)


def replay_problem(text: TextConfig, replay: Replay, rollback: int) -> str | None:
    """Why a model cannot run like this, None if it can.

    That P is a KV source need not be asked: every compressed layer has a source of its ratio at or before it.

    Args:
        rollback: by how many tokens a sequence may be shortened after its prompt, and decoded again.
    """
    first, window = first_consumer(text), text.sliding_window
    if first is None:
        return "no layer has compression ratio 1, so there is no first consumer layer"
    if first == 0:
        return "layer 0 has compression ratio 1, so every layer is a consumer and nothing can be left out"
    if replay.keep < window + rollback:
        return (
            f"{replay.keep} tokens are kept, fewer than sliding_window + rollback = {window} + {rollback} = "
            f"{window + rollback}: the windows of the first decoded tokens would reach before them"
        )
    if sources := [i for i in text.kv_source_layer_ids if i > first]:
        return f"layers {sources} are KV sources after layer {first}: they would compress the kept tokens only"
    if engrams := [i for i in text.engram_layer_ids if i >= first]:
        return f"Engram layers {engrams} are not before layer {first}: they would remember the kept tokens only"
    taps = [plan.index for plan in layer_plans(text) if plan.tap]
    if taps and min(taps) < first <= max(taps):
        return f"the drafts' target layers {taps} lie on both sides of layer {first}: they would tap different rows"
    return None


Run = Callable[[jax.Array, Carry, ForwardContext], tuple[jax.Array, Carry]]
"""The consumer layers and the final norm: streams, carry and context -> final states [batch, ·, hidden] and carry."""


def run_consumers(
    streams: jax.Array,
    carry: Carry,
    params: Layer,
    plan: LayerPlan,
    context: ForwardContext,
    kept: KeptRows,
    run: Run,
) -> tuple[jax.Array, Carry]:
    """What `run` makes of the rows that consumer layers see, from P's own inputs on.

    Where mode is "compact" they are min(time, keep) rows each: the kept ones first, then padding. All rows have left
    their entries and index keys before. Picks and candidates need no gathering: P, a KV source, picks anew, and
    candidates have ratio 1 if P may use them. A step in which no row keeps anything, as most of a long prompt's are,
    runs no consumer layer.

    Args:
        params, plan: of layer P.

    Returns:
        [batch, time, hidden], or [batch, min(time, keep), hidden], zeros if nothing ran; and the carry with the cache.
    """
    if kept.replay.mode == "mask":
        return run(streams, carry, dataclasses.replace(context, kept_from=kept.kept_from))
    text, new = context.text, context.view.new
    _, x = enter_sublayer(streams, carry.pre, params=params.hc_attn, norm=params.attn_norm, text=text)
    cache = store_entries(x, carry.cache, params.attn, plan, context)
    lengths, full = kept.lengths(new), new.time
    time = min(full, kept.replay.keep)
    index = jnp.minimum((new.lengths - lengths)[:, None] + jnp.arange(time, dtype=jnp.int32), full - 1)
    nothing = jnp.zeros((len(streams), time, streams.shape[-1]), streams.dtype)
    view = context.view.last(lengths, time)

    def take(rows: jax.Array) -> jax.Array:
        return jnp.take_along_axis(rows, index.reshape(*index.shape, *[1] * (rows.ndim - 2)), axis=1)

    def run_kept(windows: Any, draft_windows: Any) -> tuple[jax.Array, Any, Any]:
        narrow = ForwardContext.of(text, context.policy, view, context.probe, context.kernels, context.mesh)
        own = dataclasses.replace(cache, windows=windows, draft_windows=draft_windows)
        hidden, after = run(
            take(streams),
            Carry(pre=take(carry.pre), cache=own),
            dataclasses.replace(
                narrow,
                image_mask=None if context.image_mask is None else take(context.image_mask),
                kept_from=kept.kept_from,
                entries_are_stored=True,
            ),
        )
        return hidden, after.cache.windows, after.cache.draft_windows

    # Only what consumers write goes through the branch: whatever does might be copied.
    hidden, windows, draft_windows = jax.lax.cond(
        jnp.any(lengths > 0),
        run_kept,
        lambda windows, draft_windows: (nothing, windows, draft_windows),
        cache.windows,
        cache.draft_windows,
    )
    cache = dataclasses.replace(cache, windows=windows, draft_windows=draft_windows)
    return hidden, dataclasses.replace(carry, cache=cache)
