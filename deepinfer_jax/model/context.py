"""What all layers of one forward pass share and none changes. What they hand on is in `carry.py`."""

import dataclasses
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from deepinfer_jax.cache.view import View
from deepinfer_jax.config.model_config import TextConfig
from deepinfer_jax.config.precision import PrecisionPolicy
from deepinfer_jax.kernels.choice import KernelChoice
from deepinfer_jax.model.probe import Probe
from deepinfer_jax.model.rope import Rotation, rotation


class Rotations(NamedTuple):
    """Of the new tokens: in layers that see their window only, and in compressed layers."""

    window: Rotation
    compressed: Rotation


@dataclasses.dataclass(frozen=True)
class ForwardContext:
    """The settings of one pass, and what is known of its new tokens before the first layer.

    Attributes:
        text: the model.
        policy: what is rounded and quantised.
        view: where the new tokens stand in the cache.
        rotations: rotary positions of the new tokens.
        probe: captures and edits.
        kernels: which implementation of each kernel runs.
        mesh: what the routed experts are spread over, or None.
        image_mask: bool [batch, time]; None: all is text.
        engram_rows: table rows of the Engram layers. int32 [batch, time, layers, (ngram - 1)·heads], or None.
        kept_from: first position that windows may show under bounded replay; None: any. int32 [batch].
        entries_are_stored: the KV source among the layers to come has stored its entries already.
    """

    text: TextConfig
    policy: PrecisionPolicy
    view: View[Any]
    rotations: Rotations
    probe: Probe
    kernels: KernelChoice
    mesh: Mesh | None = None
    image_mask: jax.Array | None = None
    engram_rows: jax.Array | None = None
    kept_from: jax.Array | None = None
    entries_are_stored: bool = False

    @classmethod
    def of(
        cls,
        text: TextConfig,
        policy: PrecisionPolicy,
        view: View[Any],
        probe: Probe,
        kernels: KernelChoice,
        mesh: Mesh | None = None,
        image_mask: jax.Array | None = None,
        engram_rows: jax.Array | None = None,
    ) -> "ForwardContext":
        """The context of the exact model."""
        positions = view.new.positions
        rotations = Rotations(
            window=rotation(text, positions, compressed=False), compressed=rotation(text, positions, compressed=True)
        )
        return cls(text, policy, view, rotations, probe, kernels, mesh, image_mask, engram_rows)
