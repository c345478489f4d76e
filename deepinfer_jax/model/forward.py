"""The public `forward` over `backbone.py`, on a dense cache (design.md §4), and the head."""

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy.typing as npt
from flax import struct

from deepinfer_jax.cache.dense import Cache, DenseView, init_cache, with_lengths_after
from deepinfer_jax.config.model_config import ModelConfig
from deepinfer_jax.config.precision import precision_policy
from deepinfer_jax.kernels.choice import KernelChoice
from deepinfer_jax.kernels.dot import matmul
from deepinfer_jax.kernels.rowwise import batch_invariant
from deepinfer_jax.model.backbone import hidden_states
from deepinfer_jax.model.checks import check_inputs
from deepinfer_jax.model.embedding import places_of
from deepinfer_jax.model.probe import Edit, Probe, resolve_captures, resolve_edits
from deepinfer_jax.weights.params import Params

IntArray = jax.Array | npt.NDArray[Any]


@struct.dataclass
class ForwardOutput:
    """Result of `forward`.

    Attributes:
        logits: float32 [batch, time, vocab]; None with return_logits=False.
        hidden: normed final states, what the head reads. [batch, time, hidden].
        cache: the cache after these tokens; None when none was given.
        captured: the captured tensors by name, each [batch, time, ...].
    """

    logits: jax.Array | None
    hidden: jax.Array
    cache: Cache | None
    captured: dict[str, jax.Array]


def forward(
    params: Params,
    config: ModelConfig,
    tokens: IntArray,
    *,
    cache: Cache | None = None,
    lengths: IntArray | None = None,
    token_types: IntArray | None = None,
    image_embeds: jax.Array | None = None,
    precision: str = "reference",
    capture: Iterable[str] = (),
    edit: Mapping[str, Edit] | None = None,
    return_logits: bool = True,
    kernels: KernelChoice = KernelChoice(),  # noqa: B008 (frozen, so one shared default is safe)
) -> ForwardOutput:
    """The exact model on a batch of token rows. Pure, jittable, differentiable; runs on any backend.

    Called eagerly it checks its inputs and runs an internally jitted body; under an outer `jax.jit` it nests and
    checks shapes and dtypes only.

    Args:
        params: from `load_params` or `init_params`, in the same precision. With Engram layers they hold one integer
            array (`token_map`): `jax.grad(..., allow_int=True)` differentiates the whole tree.
        config: the model.
        tokens: any integer dtype [batch, time].
        cache: continue after what it holds (each row has its own length); None starts at position 0.
        lengths: tokens of each row, the rest is padding on the right. int [batch]; None: all of them.
        token_types: roles, −1 text, 0 image start, 1 image, 2 new line, 3 image end. int [batch, time]; None: text.
        image_embeds: aligner rows [features, hidden] for the image positions in batch-major order.
        precision: "reference", "bf16", "float32" or "float32_exact" (design.md §4).
        capture: names or `*` patterns of tensors to return (`model.probe.capture_names` lists them).
        edit: name or pattern -> function of one array; its result takes the tensor's place. The function is static:
            another function object, be it the same lambda made again, compiles another program. To vary numbers
            inside it, close over traced arrays under an outer `jax.jit`, `jax.vmap` or `jax.grad`.
        return_logits: False leaves the head out.
        kernels: implementation of each kernel, e.g. `KernelChoice.for_devices(jax.devices())`; the default is plain
            XLA, which is differentiable and runs on meshes. With `batch_invariant` a row's results and its cached
            state have the same bits for any batch, chunks and cache length.

    Returns:
        `ForwardOutput`. Logits at padding positions mean nothing. Under tracing, rows that overflow the cache have
        NaN logits and hidden states.

    Raises:
        ValueError: wrong shape or dtype, an id or role out of range, a precision other than that of params or cache,
            an unknown capture or edit name, a cache that would overflow, image data that do not fit.
    """
    captures = resolve_captures(config, capture)
    edits = resolve_edits(config, edit)
    tokens, lengths, token_types = check_inputs(
        params, config, tokens, cache, lengths, token_types, image_embeds, precision
    )
    return _forward(
        params,
        tokens,
        cache,
        lengths,
        token_types,
        image_embeds,
        config=config,
        precision=precision,
        captures=captures,
        edits=edits,
        return_logits=return_logits,
        kernels=kernels,
    )


@jax.named_scope("head")
def compute_logits(
    params: Params,
    hidden: jax.Array,
    kernels: KernelChoice = KernelChoice(),  # noqa: B008 (frozen, so one shared default is safe)
) -> jax.Array:
    """The head on normed final states (model.md §11). [..., hidden] -> float32 [..., vocab]."""
    with batch_invariant(kernels.batch_invariant):
        return matmul(hidden, params.head)


@functools.partial(jax.jit, static_argnames=("config", "precision", "captures", "edits", "return_logits", "kernels"))
def _forward(
    params: Params,
    tokens: jax.Array,
    cache: Cache | None,
    lengths: jax.Array | None,
    token_types: jax.Array | None,
    image_embeds: jax.Array | None,
    *,
    config: ModelConfig,
    precision: str,
    captures: tuple[str, ...],
    edits: tuple[tuple[str, Edit], ...],
    return_logits: bool,
    kernels: KernelChoice,
) -> ForwardOutput:
    batch, time = tokens.shape
    policy = precision_policy(config, precision)
    lengths = jnp.full(batch, time, jnp.int32) if lengths is None else lengths
    before = init_cache(config, batch, time, precision=precision) if cache is None else cache
    view = DenseView.of(before, lengths, time, config, policy, in_order=kernels.batch_invariant)
    places = None if token_types is None else places_of(jnp.where(view.new.positions >= 0, token_types, -1))
    hidden, carry = hidden_states(
        params,
        tokens,
        view,
        before,
        config,
        policy,
        Probe(captures, edits),
        kernels,
        places=places,
        features=image_embeds,
    )
    overflow = (before.lengths + lengths > before.max_length)[:, None, None]
    hidden = jnp.where(overflow, jnp.nan, hidden)
    logits = compute_logits(params, hidden, kernels) if return_logits else None
    after = None if cache is None else with_lengths_after(carry.cache, lengths)
    return ForwardOutput(logits, hidden, after, dict(carry.captured))
