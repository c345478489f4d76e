"""Named tensors of the forward pass: which can be captured or edited, and how that is done under jit (design.md §4)."""

import dataclasses
import difflib
import fnmatch
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from deepinfer_jax.config.layer_plan import layer_plans
from deepinfer_jax.config.model_config import ModelConfig
from deepinfer_jax.model.carry import Carry

Edit = Callable[[jax.Array], jax.Array]


@functools.cache
def capture_names(config: ModelConfig) -> tuple[str, ...]:
    """Every name that `forward` knows for this model, in the order in which the pass computes them.

    `embed` [batch, time, hidden] (after the image merge); for each layer N: `engram.rows` int32 [batch, time, rows],
    `engram.streams` [batch, time, streams, hidden], `attention.input` and `attention.output` [batch, time, hidden],
    `attention.index_scores` [batch, time, entries] (masked, what the top-k sees), `attention.candidates` bool
    [batch, time, entries], `attention.index_picks` int32 [batch, time, k] ascending with −1 last, `moe.expert_ids`
    int32 and `moe.expert_weights` float32 [batch, time, k], `moe.output` [batch, time, hidden], `streams` [batch, time,
    streams, hidden] and `pre` float32 [batch, time, streams] as handed to the next layer; then `taps` [batch, time,
    targets·hidden] and `final_norm` [batch, time, hidden].
    """
    names = ["embed"]
    for plan in layer_plans(config.text):
        local = []
        if plan.engram is not None:
            local += ["engram.rows", "engram.streams"]
        local += ["attention.input"]
        if plan.is_index_source:
            local += ["attention.index_scores"]
        if plan.is_candidate_source:
            local += ["attention.candidates"]
        if plan.is_index_source:
            local += ["attention.index_picks"]
        local += ["attention.output", "moe.expert_ids", "moe.expert_weights", "moe.output", "streams", "pre"]
        names += [f"layers.{plan.index}.{name}" for name in local]
    if config.text.num_nextn_predict_layers:
        names.append("taps")
    return (*names, "final_norm")


def resolve_captures(config: ModelConfig, patterns: Iterable[str]) -> tuple[str, ...]:
    """The names that the patterns (`*` matches anything) stand for.

    Raises:
        ValueError: a pattern matches nothing; the message gives the nearest names.
    """
    known = capture_names(config)
    chosen: dict[str, None] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        matches = [name for name in known if fnmatch.fnmatchcase(name, pattern)]
        if not matches:
            raise ValueError(_unknown("capture", pattern, known))
        chosen.update(dict.fromkeys(matches))
    return tuple(chosen)


def resolve_edits(config: ModelConfig, edits: Mapping[str, Edit] | None) -> tuple[tuple[str, Edit], ...]:
    """The (name, function) pairs that the patterns of `edits` stand for; a later pattern wins.

    Raises:
        ValueError: a pattern matches nothing.
    """
    chosen: dict[str, Edit] = {}
    for pattern, function in (edits or {}).items():
        matches = [name for name in capture_names(config) if fnmatch.fnmatchcase(name, pattern)]
        if not matches:
            raise ValueError(_unknown("edit", pattern, capture_names(config)))
        chosen.update(dict.fromkeys(matches, function))
    return tuple(chosen.items())


def _unknown(what: str, pattern: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(pattern, known, n=3, cutoff=0.4)
    hint = f"; the nearest names are {', '.join(near)}" if near else ""
    return f"{what} name {pattern!r} matches nothing in this model{hint} (capture_names(config) lists all)"


@dataclasses.dataclass(frozen=True)
class Probe:
    """What is asked about the tensors of one pass: which are captured, which are edited.

    Attributes:
        captures: of `resolve_captures`.
        edits: of `resolve_edits`.
    """

    captures: tuple[str, ...] = ()
    edits: tuple[tuple[str, Edit], ...] = ()

    @property
    def has_edits(self) -> bool:
        """Whether somebody replaces a tensor of this pass."""
        return bool(self.edits)

    def watches(self, name: str) -> bool:
        """Whether this tensor is captured or edited."""
        return name in self.captures or name in dict(self.edits)

    def __call__(self, name: str, value: jax.Array, carry: Carry) -> tuple[jax.Array, Carry]:
        """The tensor to go on with, and the carry with it if it is captured.

        Raises:
            ValueError: see `observe`.
        """
        value, captured = self.observe(name, value)
        return value, dataclasses.replace(carry, captured={**carry.captured, **captured})

    def observe(self, name: str, value: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The tensor to go on with, and it under its name if it is captured, else nothing.

        An edit may return any array of the shape, NumPy included; another float or integer type is converted.

        Raises:
            ValueError: an edit returned something else.
        """
        edit = dict(self.edits).get(name)
        if edit is not None:
            value = _edited(name, edit(value), value)
        return value, {name: value} if name in self.captures else {}


def _edited(name: str, result: Any, value: jax.Array) -> jax.Array:
    """What an edit made of a tensor, in the tensor's type."""
    if not hasattr(result, "shape"):
        raise ValueError(f"the edit of {name!r} returned {type(result).__name__}; it must return an array")
    edited = jnp.asarray(result)
    if edited.shape != value.shape or _kind(edited) != _kind(value):
        raise ValueError(
            f"the edit of {name!r} returned {edited.dtype}{list(edited.shape)}; "
            f"it must keep {value.dtype}{list(value.shape)}"
        )
    return edited.astype(value.dtype)


def _kind(array: jax.Array) -> Any:
    """Whether it holds truth values, integers or real numbers."""
    kinds = (jnp.bool_, jnp.integer, jnp.floating)
    return next(kind for kind in kinds if jnp.issubdtype(array.dtype, kind))
