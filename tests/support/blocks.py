"""Each sublayer of each block on golden inputs, so that nothing accumulates from block to block."""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from deepinfer_jax import Cache, ModelConfig, Params, init_cache
from deepinfer_jax.cache.dense import DenseView, with_lengths_after
from deepinfer_jax.config.layer_plan import layer_plans
from deepinfer_jax.config.precision import precision_policy
from deepinfer_jax.kernels.choice import KernelChoice
from deepinfer_jax.kernels.formats import pack_fp4_kv
from deepinfer_jax.kernels.sparse_attention import PackedEntries
from deepinfer_jax.model.backbone import layer
from deepinfer_jax.model.block import initial_streams
from deepinfer_jax.model.carry import Carry
from deepinfer_jax.model.context import ForwardContext
from deepinfer_jax.model.probe import Probe
from tests.support.golden import LAYER_KEYS, MODES, Array, Case, model


@dataclasses.dataclass(frozen=True)
class GoldenProbe(Probe):
    """Captures what was computed and goes on with the golden value, so that each step is judged by itself.

    golden: by capture name.
    """

    golden: Mapping[str, jax.Array] = dataclasses.field(default_factory=dict)

    def watches(self, name: str) -> bool:
        return True

    def observe(self, name: str, value: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        known = self.golden.get(name, value).astype(value.dtype)
        if name.endswith(("index_scores", "candidates")):  # the cache has room for entries that do not exist yet
            nothing = False if known.dtype == bool else -jnp.inf
            room = value.shape[-1] - known.shape[-1]
            known = jnp.pad(known, [(0, 0), (0, 0), (0, room)], constant_values=nothing)
        return jnp.asarray(known), {name: value}


def _capture_name(key: str) -> str:
    layer, name = key[1:].split("/")
    return f"layers.{layer}.{LAYER_KEYS[name]}"


@functools.partial(jax.jit, static_argnames=("config", "precision"))
def _run_blocks(
    params: Params, cache: Cache, golden: dict[str, jax.Array], *, config: ModelConfig, precision: str
) -> tuple[dict[str, jax.Array], Cache]:
    text, policy = config.text, precision_policy(config, precision)
    embedded = golden["embed"].astype(policy.dtype)
    batch, time, _ = embedded.shape
    lengths = jnp.full(batch, time, jnp.int32)
    view = DenseView.of(cache, lengths, time, config, policy)
    image_mask = golden["token_types"] >= 0 if "token_types" in golden else None
    probe = GoldenProbe(golden={_capture_name(key): value for key, value in golden.items() if key.startswith("L")})
    rows = golden["engram_ids"].astype(jnp.int32)
    context = ForwardContext.of(text, policy, view, probe, KernelChoice(), params.mesh, image_mask, rows)
    streams, pre = initial_streams(embedded, text)
    carry = Carry(pre=pre, cache=cache)
    for plan, own in zip(layer_plans(text), params.layers, strict=True):
        _, carry = layer(streams, carry, own, plan, context)
        streams = golden[f"L{plan.index}/out"].astype(policy.dtype)
        carry = dataclasses.replace(carry, pre=golden[f"L{plan.index}/pre_mix"])
    return dict(carry.captured), with_lengths_after(carry.cache, lengths)


@dataclasses.dataclass(frozen=True)
class BlockRun:
    """Results of all blocks: of the prefill, then of each decode step, as `Replay`; and the caches."""

    results: list[dict[str, Array]]
    after_prefill: Cache
    at_end: Cache

    def get(self, layer: int, key: str, step: int | None) -> Array:
        """The counterpart of `Case.get(f"L{layer}/{key}", step)`."""
        return self.results[0 if step is None else step + 1][f"layers.{layer}.{LAYER_KEYS[key]}"]


@functools.cache
def run_blocks(case: Case) -> BlockRun:
    """Runs every block of a full golden file on its golden inputs; decode continues on golden caches."""
    precision = next(ours for ours, mode in MODES.items() if mode == case.mode)
    config, params = model(case.folder, precision)
    cache = init_cache(config, *case.tokens.shape, precision=precision)
    results, after_prefill = [], cache
    for step in (None, *range(case.steps)):
        golden = {f"L{layer}/{key}": jnp.array(array) for layer, key, array in case.layer_arrays(step)}
        golden |= {key: jnp.array(case.get(key, step)) for key in ("embed", "engram_ids")}
        if step is None and case.token_types is not None:
            golden["token_types"] = jnp.array(case.token_types)
        captured, cache = _run_blocks(params, cache, golden, config=config, precision=precision)
        results.append({name: jax.device_get(array) for name, array in captured.items()})
        if step is None:
            after_prefill = cache
            cache = _with_golden_contents(cache, case, config)
    return BlockRun(results, after_prefill, cache)


def _with_golden_contents(cache: Cache, case: Case, config: ModelConfig) -> Cache:
    """The cache with the golden file's contents after prefill; open groups stay (no golden file has them)."""

    def stored(layer: int, key: str) -> jax.Array:
        return jnp.array(case.arrays[f"prefill/cache/L{layer}/{key}"])

    def filled(array: jax.Array, contents: jax.Array) -> jax.Array:
        return array.at[:, : contents.shape[1]].set(contents.astype(array.dtype))

    entries: list[jax.Array | PackedEntries] = []
    for source, own in zip(config.text.kv_source_layer_ids, cache.entries, strict=True):
        contents = stored(source, "compress_kv")
        if isinstance(own, PackedEntries):
            entries.append(PackedEntries(*map(filled, own, pack_fp4_kv(contents))))
        else:
            entries.append(filled(own, contents))
    return dataclasses.replace(
        cache,
        windows=tuple(stored(i, "window_kv").astype(w.dtype) for i, w in enumerate(cache.windows)),
        entries=tuple(entries),
        index_keys=tuple(
            filled(own, stored(layer, "index_k"))
            for layer, own in zip(config.text.kv_source_layer_ids, cache.index_keys, strict=True)
        ),
    )
