"""What layers hand on beside the streams. What they all share and none changes is in `context.py`."""

from collections.abc import Mapping
from typing import Any

import jax
from flax import struct


@struct.dataclass
class Carry:
    """A value: a layer takes one and returns another (model.md Appendix A, §5.8).

    Attributes:
        pre: weights with which the next sublayer collapses the streams (T3). float32 [batch, time, streams].
        cache: the cache with all that the layers so far wrote; the context's view reads and writes it.
        picks: entries chosen by the last index source. int32 [batch, time, k]; None before the first.
        candidates: the candidate blocks, bool [batch, time, blocks]; while they are captured or edited, the entries
            inside them, bool [batch, time, entries]. None before the layer that chooses them.
        taps: by layer number, the mean streams that feed the drafts. [batch, time, hidden] each.
        captured: the captured tensors so far, by name. [batch, time, ...] each.
    """

    pre: jax.Array
    cache: Any = None
    picks: jax.Array | None = None
    candidates: jax.Array | None = None
    taps: Mapping[int, jax.Array] = struct.field(default_factory=dict)
    captured: Mapping[str, jax.Array] = struct.field(default_factory=dict)
