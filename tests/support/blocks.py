"""Each sublayer of each block on golden inputs, so that nothing accumulates from block to block."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from deepinfer_jax import Cache, ModelConfig, Params, init_cache
from deepinfer_jax.cache.dense import CacheView
from deepinfer_jax.config.layer_plan import layer_plans
from deepinfer_jax.config.precision import precision_policy
from deepinfer_jax.kernels.choice import KernelChoice
from deepinfer_jax.kernels.formats import pack_fp4_kv
from deepinfer_jax.kernels.sparse_attention import PackedEntries
from deepinfer_jax.model.attention import ForwardContext, attention
from deepinfer_jax.model.block import block, initial_streams
from deepinfer_jax.model.engram import engram
from deepinfer_jax.model.probe import Probe
from tests.support.golden import LAYER_KEYS, MODES, Array, Case, model


class GoldenProbe(Probe):
    """Records what was computed and goes on with the golden value, so that each step is judged by itself."""

    def __init__(self, golden: dict[str, jax.Array]) -> None:
        super().__init__((), ())
        self._golden = {_capture_name(key): value for key, value in golden.items() if key.startswith("L")}

    def watches(self, name: str) -> bool:
        return True

    def __call__(self, name: str, value: jax.Array) -> jax.Array:
        self.captured[name] = value
        known = self._golden.get(name, value).astype(value.dtype)
        if name.endswith(("index_scores", "candidates")):  # the cache has room for entries that do not exist yet
            nothing = False if known.dtype == bool else -jnp.inf
            room = value.shape[-1] - known.shape[-1]
            known = jnp.pad(known, [(0, 0), (0, 0), (0, room)], constant_values=nothing)
        return jnp.asarray(known)


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
    view = CacheView(cache, jnp.full(batch, time, jnp.int32), time, config, policy)
    probe = GoldenProbe(golden)
    step = ForwardContext.start(text, policy, view, probe, KernelChoice())
    image_mask = golden["token_types"] >= 0 if "token_types" in golden else None
    streams, pre = initial_streams(embedded, text)
    for plan, layer in zip(layer_plans(text), params.layers, strict=True):
        if plan.engram is not None and layer.engram is not None:
            rows = golden["engram_ids"][:, :, plan.engram].astype(jnp.int32)
            remembered = engram(streams, rows, layer.engram, image_mask, text, policy)
            streams = probe(f"layers.{plan.index}.engram.streams", remembered)
        block(
            streams,
            pre,
            layer,
            functools.partial(attention, params=layer.attn, plan=plan, step=step),
            name=f"layers.{plan.index}",
            experts_per_token=text.num_experts_per_tok,
            image_mask=image_mask,
            valid=jnp.ones((batch, time), bool),
            text=text,
            policy=policy,
            mesh=params.mesh,
            probe=probe,
            kernels=KernelChoice(),
        )
        streams = golden[f"L{plan.index}/out"].astype(policy.dtype)
        pre = golden[f"L{plan.index}/pre_mix"]
    return probe.captured, view.finish()


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
    for layer, own in zip(config.text.kv_source_layer_ids, cache.entries, strict=True):
        contents = stored(layer, "compress_kv")
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
