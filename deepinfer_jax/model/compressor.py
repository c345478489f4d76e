"""Compressor of KV sources: tokens to latents, latents to entries and index keys (model.md §5.5)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from deepinfer_jax.cache.dense import Groups, OpenGroup
from deepinfer_jax.config.model_config import TextConfig
from deepinfer_jax.config.precision import PrecisionPolicy
from deepinfer_jax.kernels.dot import matmul
from deepinfer_jax.kernels.quantized_linear import linear
from deepinfer_jax.kernels.rowwise import rowwise
from deepinfer_jax.model.norm import rms_norm
from deepinfer_jax.model.rope import rotate, rotation
from deepinfer_jax.weights.params import Compressor, IndexKey


def compress(
    x: jax.Array,
    params: Compressor,
    ratio: int,
    start: jax.Array,
    lengths: jax.Array,
    extend: Callable[[OpenGroup], OpenGroup],
    text: TextConfig,
    policy: PrecisionPolicy,
) -> Groups:
    """Latents of the groups that end within the new tokens.

    Args:
        x: normed input of the layer's attention. [batch, time, hidden].
        start: absolute position of the first new token. int32 [batch].
        lengths: new tokens of each row. int32 [batch].
        extend: stores the new tokens and puts the ratio − 1 before them in front (`View.extend_open_group`); not called
            at ratio 1.
    """
    batch, time, _ = x.shape
    if ratio == 1:
        latents = rowwise(lambda x: rms_norm(linear(x, params.wkv), params.norm, text.rms_norm_eps), x)
        numbers = start[:, None] + jnp.arange(time, dtype=jnp.int32)
        complete = jnp.arange(time) < lengths[:, None]
        return Groups(latents, numbers, complete)
    carried = ratio - 1
    wide = x.astype(jnp.float32)
    tokens = extend(OpenGroup(matmul(wide, params.wkv), matmul(wide, params.wgate)))  # carried + time of them
    count = (time + ratio - 1) // ratio
    numbers = start[:, None] // ratio + jnp.arange(count, dtype=jnp.int32)
    # Token of absolute position p stands at p − start + carried in the concatenation.
    members = (numbers * ratio - start[:, None] + carried)[..., None] + jnp.arange(ratio, dtype=jnp.int32)
    members = jnp.minimum(members, carried + time - 1).reshape(batch, count * ratio, 1)
    grouped_kv = jnp.take_along_axis(tokens.kv, members, axis=1).reshape(batch, count, ratio, -1)
    grouped_gate = jnp.take_along_axis(tokens.gate, members, axis=1).reshape(batch, count, ratio, -1)

    def pool(gate: jax.Array, kv: jax.Array) -> jax.Array:
        latents = policy.round(jnp.sum(jax.nn.softmax(gate, axis=2) * kv, axis=2))
        return rms_norm(latents, params.norm, text.rms_norm_eps)

    complete = (numbers + 1) * ratio <= (start + lengths)[:, None]
    return Groups(rowwise(pool, grouped_gate, grouped_kv), numbers, complete)


def entries_and_index_keys(
    groups: Groups, params: IndexKey, ratio: int, text: TextConfig
) -> tuple[jax.Array, jax.Array]:
    """Rotated latents and index keys, before their cache quantisers.

    The position of entry j is that of its first token, j·ratio; the index key comes from the unrotated latent.

    Returns:
        entries [batch, groups, head_dim], index keys [batch, groups, index_dim].
    """

    def make(latents: jax.Array, numbers: jax.Array) -> tuple[jax.Array, jax.Array]:
        rope = rotation(text, numbers * ratio, compressed=True)
        index_keys = rms_norm(linear(latents, params.wk), params.k_norm, text.rms_norm_eps)
        return rotate(latents, rope), rotate(index_keys, rope)

    return rowwise(make, groups.latents, groups.numbers)
