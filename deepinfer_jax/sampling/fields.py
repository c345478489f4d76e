"""The table of what a request samples by: one declaration of each value, from which all else about it follows.

A new scalar of the sampler is declared here, as what a request may set (`SamplerScalars`) and as what the device keeps
of it (`SlotFields`), and read by its filter (`filters.py`); no other file changes. `SamplingParams` inherits the first,
fields, defaults and checks, and `SamplerState` has them all; from the second follow the columns in which the host sends
it, the arrays of the slot table and their bytes, `SamplingRows`, and `plain_rows`.

Type checkers know every field of `SamplingParams` and of `SamplingRows`, and of `SamplerState` those that it spells
out: it is frozen and positional, `SamplingParams` neither, and such dataclasses cannot share a base.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, get_type_hints

import numpy as np
from jax import Array

_MAX_INT32 = 2**31 - 1
_MAX_FLOAT32 = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Scalar:
    """What a request may set a scalar to.

    Attributes:
        must_be: the values that it may have, in words.
        holds: whether a value is one of them; of NaN false.
        kind: a greedy request switches its filters off; penalties act on what prompt and output hold.
    """

    must_be: str
    holds: Callable[[Any], bool]
    kind: Literal["temperature", "filter", "penalty"]


@dataclass(kw_only=True)
class SamplerScalars:
    """The scalars of a request. The type says which kind of number each is, the default switches it off.

    Attributes:
        temperature: >= 0. Below 1e-5 it is greedy: the filters are switched off, and the token is the exact
            argmax, the lowest id on ties (DeepInfer samples at 1e-5 instead).
        top_p: in (0, 1]; nucleus on the full softmax.
        top_k: -1 (off) or >= 1; on the full softmax too.
        min_p: in [0, 1]; only tokens with at least min_p times the probability of the likeliest, 0: all.
        presence_penalty, frequency_penalty: -2..2, taken from the logit of what the output holds, once, and once for
            each time that it does.
        repetition_penalty: > 0; the logit of what prompt or output hold is divided by it if positive, else multiplied.
    """

    temperature: Annotated[
        float, Scalar("a finite number >= 0 of float32", lambda value: 0 <= value <= _MAX_FLOAT32, "temperature")
    ] = 1.0
    top_p: Annotated[float, Scalar("in (0, 1]", lambda value: 0 < value <= 1, "filter")] = 1.0
    top_k: Annotated[
        int, Scalar(f"-1 (off) or in 1..{_MAX_INT32}", lambda value: value == -1 or 1 <= value <= _MAX_INT32, "filter")
    ] = -1
    min_p: Annotated[float, Scalar("in [0, 1]", lambda value: 0 <= value <= 1, "filter")] = 0.0
    presence_penalty: Annotated[float, Scalar("in -2..2", lambda value: -2 <= value <= 2, "penalty")] = 0.0
    frequency_penalty: Annotated[float, Scalar("in -2..2", lambda value: -2 <= value <= 2, "penalty")] = 0.0
    repetition_penalty: Annotated[
        float, Scalar("in 0.001..1000 (1: off)", lambda value: 1e-3 <= value <= 1e3, "penalty")
    ] = 1.0


@dataclass(frozen=True)
class SlotField:
    """What the device keeps of a request, for as long as it has a slot.

    Attributes:
        source: the attribute of `SamplingParams` that it is; "": it is none, the host sends it by itself.
        dtype: float32, bool, int32 or uint32.
        off: the value with which it changes nothing.
        words: the columns that make up a field of several words; (): a scalar, its column has its name.
    """

    source: str
    dtype: type[np.generic]
    off: float
    words: tuple[str, ...] = ()

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes of one value: none of a scalar."""
        return (len(self.words),) if self.words else ()


def _scalar(name: str) -> SlotField:
    """The slot field of one of `SamplerScalars`."""
    off = getattr(SamplerScalars, name)
    return SlotField(name, {float: np.float32, int: np.int32, bool: np.bool_}[type(off)], off)


@dataclass(frozen=True, kw_only=True)
class SlotFields:
    """What rows sample by, of the request alone: `[rows]`, or [data, slots] in the slot table, unless said otherwise.

    Attributes:
        temperature: float32, > 0; greedy rows hold GREEDY_TEMPERATURE.
        greedy: bool, exact argmax, lowest id on ties.
        top_p: float32; >= 1 disables.
        top_k: int32; negative disables.
        min_p: float32; 0 disables.
        raw_logprobs: bool, the log-probabilities that come out are those of the model, softmax(logits); else those of
            the distribution sampled from.
        presence, frequency, repetition: float32 penalties, see `adjusted_logits`.
        seed: uint32 [..., 2], low and high word of the request's `seq_seed`.
    """

    temperature: Annotated[Array, _scalar("temperature")]
    greedy: Annotated[Array, SlotField("greedy", np.bool_, False)]
    top_p: Annotated[Array, _scalar("top_p")]
    top_k: Annotated[Array, _scalar("top_k")]
    min_p: Annotated[Array, _scalar("min_p")]
    raw_logprobs: Annotated[Array, SlotField("raw_logprobs", np.bool_, False)]
    presence: Annotated[Array, _scalar("presence_penalty")]
    frequency: Annotated[Array, _scalar("frequency_penalty")]
    repetition: Annotated[Array, _scalar("repetition_penalty")]
    seed: Annotated[Array, SlotField("", np.uint32, 0, words=("seed_low", "seed_high"))]

    def replace(self, **changes: Any) -> Self:
        """A copy with other values in these fields."""
        return dataclasses.replace(self, **changes)


def notes[Note](cls: type, kind: type[Note]) -> dict[str, Note]:
    """What a class says about its fields by `Annotated`, in their order; those without such a note are left out."""
    found = {}
    for name, hint in get_type_hints(cls, include_extras=True).items():
        for note in getattr(hint, "__metadata__", ()):
            if isinstance(note, kind):
                found[name] = note
    return found


@functools.cache
def sampler_scalars() -> dict[str, Scalar]:
    """The fields of `SamplerScalars`."""
    return notes(SamplerScalars, Scalar)
