"""A golden case run through the public entry points, once per session: prefill, teacher-forced steps, drafts."""

import dataclasses
import functools

import numpy as np

from deepinfer_jax import Cache, ModelConfig, draft, forward, init_cache
from deepinfer_jax.kernels.sparse_attention import PackedEntries
from deepinfer_jax.kernels.sparse_attention.entries import unpack_entries
from deepinfer_jax.model.dspark import DraftOutput
from tests.support.golden import LAYER_KEYS, MODES, Array, Case, as_float32, model

# Holds the longest case. Cases of one batch size share one compiled step, and short ones leave slots unused.
CACHE_LENGTH = 80


@dataclasses.dataclass(frozen=True)
class Replay:
    """What came out of a case.

    Attributes:
        results: of the prefill, then of each decode step: captures by name, and "logits". [batch, time, ...].
        drafts: after each decode step; empty without draft layers.
        after_prefill, at_end: the cache.
    """

    results: list[dict[str, Array]]
    drafts: list[DraftOutput]
    after_prefill: Cache
    at_end: Cache

    def get(self, key: str, step: int | None = None) -> Array:
        """The counterpart of `Case.get`."""
        results = self.results[0 if step is None else step + 1]
        if key.startswith("L"):
            layer, name = key[1:].split("/")
            return results[f"layers.{layer}.{LAYER_KEYS[name]}"]
        if key == "engram_ids":  # captures come in layer order
            return np.stack([rows for name, rows in results.items() if name.endswith("engram.rows")], axis=2)
        return results["taps" if key == "main_hidden" else key]


@functools.cache
def replay(case: Case) -> Replay:
    """Runs a case in its precision with every tensor captured."""
    precision = next(ours for ours, mode in MODES.items() if mode == case.mode)
    config, params = model(case.folder, precision)
    tokens, prompt = case.tokens, case.prefill_length
    cache = init_cache(config, len(tokens), CACHE_LENGTH, precision=precision)
    results, drafts, caches = [], [], []
    for step in range(-1, case.steps):
        start, end = (0, prompt) if step < 0 else (prompt + step, prompt + step + 1)
        output = forward(
            params,
            config,
            tokens[:, start:end],
            cache=cache,
            token_types=case.token_types if step < 0 else None,
            image_embeds=case.image_embeds if step < 0 else None,
            precision=precision,
            capture="*",
        )
        assert output.cache is not None and output.logits is not None
        cache = output.cache
        caches.append(cache)
        results.append({name: np.asarray(x) for name, x in (output.captured | {"logits": output.logits}).items()})
        if step >= 0 and params.draft is not None:
            drafts.append(draft(params, config, cache, case.get("out_ids", step), precision=precision))
    return Replay(results, drafts, caches[0], caches[-1])


def cache_array(cache: Cache, config: ModelConfig, layer: int, key: str) -> Array:
    """`window_kv`, `compress_kv` or `index_k` of a layer as float32, [batch, slots, dim]."""
    if key == "window_kv":
        return as_float32(cache.windows[layer])
    source = config.text.kv_source_layer_ids.index(layer)
    if key == "index_k":
        return as_float32(cache.index_keys[source])
    entries = cache.entries[source]
    return as_float32(unpack_entries(entries, np.float32) if isinstance(entries, PackedEntries) else entries)
