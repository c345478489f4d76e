"""Decoder bounded replay: the later layers run on the end of a prompt only (DB §9, model.md §8).

P is the first layer of ratio 1. Layers before it are producers, those from P on consumers. Consumers look at old tokens
in two ways: through entries and index keys that all come from the input of layer P, and through their windows. So
they run on the last `keep` tokens alone, whose windows then begin at the first of them: an approximation, by which
prefill costs the producers' layers only. Decode steps are exact in what they do.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from deepinfer_jax.cache.dense import View
from deepinfer_jax.config.layer_plan import LayerPlan, layer_plans
from deepinfer_jax.config.model_config import TextConfig
from deepinfer_jax.model.attention import ForwardContext, store_entries
from deepinfer_jax.model.block import enter_sublayer
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

    def lengths(self, view: View) -> jax.Array:
        """How many of each row's last new tokens have final states. int32 [batch]."""
        if self.replay.mode == "mask":
            return view.lengths
        return jnp.clip(view.start + view.lengths - self.kept_from, 0, view.lengths)


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


def run_consumers(
    streams: jax.Array,
    pre: jax.Array,
    image_mask: jax.Array | None,
    layer: Layer,
    plan: LayerPlan,
    step: ForwardContext,
    kept: KeptRows,
    run: Callable[[jax.Array, jax.Array, jax.Array | None, ForwardContext], jax.Array],
) -> jax.Array:
    """What `run` makes of the rows that consumer layers see, from P's own inputs on.

    Where mode is "compact" they are min(time, keep) rows each: the kept ones first, then padding. All rows have left
    their entries and index keys before. Picks and candidates need no gathering: P, a KV source, picks anew, and
    candidates have ratio 1 if P may use them. A step in which no row keeps anything, as most of a long prompt's are,
    runs no consumer layer.

    Args:
        layer, plan: of layer P.
        run: the consumer layers and the final norm, on (streams, pre, image_mask, step), to [batch, ·, hidden].

    Returns:
        [batch, time, hidden], or [batch, min(time, keep), hidden], zeros if nothing ran.
    """
    if kept.replay.mode == "mask":
        return run(streams, pre, image_mask, dataclasses.replace(step, kept_from=kept.kept_from))
    wide = step.view
    _, x = enter_sublayer(streams, pre, layer.hc_attn, layer.attn_norm, step.text)
    store_entries(x, layer.attn, plan, step)
    lengths, full = kept.lengths(wide), streams.shape[1]
    time = min(full, kept.replay.keep)
    index = jnp.minimum((wide.lengths - lengths)[:, None] + jnp.arange(time, dtype=jnp.int32), full - 1)

    def take(rows: jax.Array) -> jax.Array:
        return jnp.take_along_axis(rows, index.reshape(*index.shape, *[1] * (rows.ndim - 2)), axis=1)

    def run_kept(view: View) -> jax.Array:
        narrow = ForwardContext.start(step.text, step.policy, view, step.probe, step.kernels)
        narrow = dataclasses.replace(narrow, kept_from=kept.kept_from, entries_are_stored=True)
        return run(take(streams), take(pre), None if image_mask is None else take(image_mask), narrow)

    nothing = jnp.zeros((len(streams), time, streams.shape[-1]), streams.dtype)
    return wide.last(lengths, time).run_if(jnp.any(lengths > 0), run_kept, nothing)
