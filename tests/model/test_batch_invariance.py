"""With `batch_invariant` a row's hidden states, logits and cached bytes do not depend on anything but its own tokens.

One prompt is fed in several ways: as any row of any batch whose other rows have other tokens and lengths, at once, in
chunks or token by token, into caches of any size, dense or paged. Equality is of bits.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from deepinfer_jax import Cache, ModelConfig, Params, draft, forward, init_cache
from deepinfer_jax.cache.pools import CacheShape, init_pools
from deepinfer_jax.kernels.choice import KernelChoice
from deepinfer_jax.runtime.paged_model import PagedModel, StepBatch
from tests.support.golden import model
from tests.support.small_model import small_config, small_params

pytestmark = pytest.mark.real

Array = npt.NDArray[Any]

INVARIANT = KernelChoice(batch_invariant=True)
LENGTH = 31  # two windows of golden A less one, at every ratio with an unfinished group
# What all quantisers do, and what none does; the others are between them.
ENDS = ("reference", "float32_exact")


@dataclass(frozen=True)
class Way:
    """How the prompt is fed: as `row` of `batch`, in calls of `chunk` columns, into a cache for `capacity` tokens."""

    batch: int
    row: int
    chunk: int
    capacity: int

    def __str__(self) -> str:
        return f"row {self.row} of {self.batch}, chunks of {self.chunk}, capacity {self.capacity}"


ALONE = Way(1, 0, 31, 32)
FEW_WAYS = (Way(17, 9, 31, 128), Way(2, 1, 7, 512), Way(5, 4, 1, 128))
MORE_WAYS = (
    *(Way(batch, batch // 2, 31, 32) for batch in (2, 5, 16, 17)),
    *(Way(1, 0, chunk, 64) for chunk in (1, 3, 7, 16)),
    Way(1, 0, 31, 512),
    Way(16, 15, 1, 512),
    Way(17, 16, 16, 128),
)


def weights(name: str, precision: str) -> tuple[ModelConfig, Params]:
    return (small_config(), small_params(precision)) if name == "small" else model(name, precision)


@functools.cache
def prompts(vocabulary: int) -> Array:
    """The prompt, and those of its neighbours. int32 [18, LENGTH]."""
    return np.random.default_rng(0).integers(0, vocabulary, (18, LENGTH)).astype(np.int32)


def fed(name: str, precision: str, way: Way, kernels: KernelChoice = INVARIANT) -> tuple[dict[str, Array], Cache]:
    """Hidden states and logits at every position, and the cache after them."""
    config, params = weights(name, precision)
    tokens = prompts(config.text.vocab_size)[1 : way.batch + 1].copy()
    tokens[way.row] = prompts(config.text.vocab_size)[0]
    rng = np.random.default_rng(1)
    cache = init_cache(config, way.batch, way.capacity, precision=precision)
    hidden, logits = [], []
    for start in range(0, LENGTH, way.chunk):
        part = tokens[:, start : start + way.chunk]
        lengths = rng.integers(0, part.shape[1] + 1, way.batch)  # of the neighbours: some rows sit a call out
        lengths[way.row] = part.shape[1]
        part = np.pad(part, [(0, 0), (0, way.chunk - part.shape[1])])
        out = forward(params, config, part, cache=cache, lengths=lengths, precision=precision, kernels=kernels)
        assert out.logits is not None and out.cache is not None
        cache = out.cache
        hidden.append(np.asarray(out.hidden)[way.row, : lengths[way.row]])
        logits.append(np.asarray(out.logits)[way.row, : lengths[way.row]])
    return {"hidden": np.concatenate(hidden), "logits": np.concatenate(logits)}, cache


def state(config: ModelConfig, cache: Cache, row: int) -> dict[str, Array]:
    """All that a later step of a row may read of its cache, by name."""
    text = config.text
    length = int(cache.lengths[row])
    found: dict[str, Any] = {"lengths": cache.lengths[row], "ngrams": cache.ngrams}
    assert cache.ngrams is not None and length >= text.sliding_window
    found["ngrams"] = cache.ngrams[row]
    for kind in ("windows", "draft_windows"):
        found |= {f"{kind}[{i}]": ring[row] for i, ring in enumerate(getattr(cache, kind))}
    for i, owner in enumerate(text.kv_source_layer_ids):
        ratio = text.compress_ratios[owner]
        for kind in ("entries", "index_keys"):
            for j, leaf in enumerate(jax.tree.leaves(getattr(cache, kind)[i])):
                found[f"{kind}[{i}][{j}]"] = leaf[row, : length // ratio]
        group = cache.open_groups[i]
        if group is not None and length % ratio:
            found[f"open_groups[{i}].kv"] = group.kv[row, -(length % ratio) :]
            found[f"open_groups[{i}].gate"] = group.gate[row, -(length % ratio) :]
    return {name: np.asarray(value) for name, value in found.items()}


def differences(found: dict[str, Array], wanted: dict[str, Array]) -> list[str]:
    """Names of the arrays whose bytes differ."""
    assert found.keys() == wanted.keys()
    return [name for name in wanted if found[name].tobytes() != wanted[name].tobytes()]


@functools.cache
def alone(name: str, precision: str) -> dict[str, Array]:
    outputs, cache = fed(name, precision, ALONE)
    return outputs | state(weights(name, precision)[0], cache, 0)


def check(name: str, precision: str, way: Way) -> None:
    config, _ = weights(name, precision)
    outputs, cache = fed(name, precision, way)
    assert differences(outputs | state(config, cache, way.row), alone(name, precision)) == []


@pytest.mark.parametrize(
    "precision",
    ["reference", *(pytest.param(other, marks=pytest.mark.slow) for other in ("float32", "float32_exact", "bf16"))],
)
@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.slow if way == FEW_WAYS[1] else []) for way in FEW_WAYS], ids=str
)
def test_a_row_has_the_same_bits_however_it_is_fed(way: Way, precision: str) -> None:
    check("small", precision, way)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ENDS)
@pytest.mark.parametrize("way", MORE_WAYS, ids=str)
def test_a_row_has_the_same_bits_in_every_batch_chunk_and_capacity(way: Way, precision: str) -> None:
    check("small", precision, way)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ENDS)
@pytest.mark.parametrize("way", FEW_WAYS, ids=str)
def test_a_row_of_golden_a_has_the_same_bits_however_it_is_fed(way: Way, precision: str) -> None:
    check("A_s28", precision, way)


@pytest.mark.slow
def test_batch_invariance_changes_results_by_rounding_only() -> None:
    """Without quantisers, which turn a rounding into a step. The same sums in other orders differ by 2e-6 here; 2e-5 is
    what two implementations are allowed (test_continuation.py)."""
    plain, _ = fed("small", "float32_exact", ALONE, KernelChoice())
    outputs, _ = fed("small", "float32_exact", ALONE)
    for name, wanted in plain.items():
        assert np.abs(outputs[name] - wanted).max() < 2e-5 * np.abs(wanted).max(), name


@pytest.mark.slow
def test_drafts_have_the_same_bits_in_any_batch() -> None:
    config, params = weights("small", "reference")
    found = []
    for way in (ALONE, Way(17, 9, 31, 128)):
        _, cache = fed("small", "reference", way)
        tokens = np.arange(way.batch) + 1
        tokens[way.row] = 5
        block = draft(params, config, cache, tokens, precision="reference", kernels=INVARIANT)
        fields = ("tokens", "logits", "confidence")
        found.append({name: np.asarray(getattr(block, name))[way.row] for name in fields})
    assert differences(found[1], found[0]) == []


@pytest.mark.slow
@pytest.mark.parametrize("packed", [True, False])
def test_a_paged_cache_gives_the_bits_of_a_dense_one_at_any_table_width(packed: bool) -> None:
    """Blocks of 8 tokens in no order, between those of a neighbour; chunks of 16 and then tokens one by one."""
    config, params = weights("small", "reference")
    text_model = PagedModel(config, "reference", INVARIANT, packed=packed)
    shape = CacheShape(data=1, slots=3, blocks=24, tokens_per_block=8)
    mine, other = prompts(config.text.vocab_size)[:2]
    order = np.random.default_rng(2).permutation(24).astype(np.int32)

    @jax.jit
    def advance(params: Params, cache: Any, batch: StepBatch) -> tuple[jax.Array, jax.Array, Any]:
        hidden, _, cache = text_model.advance(params, cache, batch)
        return hidden, text_model.logits(params, hidden), cache

    cache = init_pools(text_model.state(8), shape)
    rows: dict[str, list[Array]] = {"hidden": [], "logits": []}
    for start, time, width in [(0, 16, 4), *((start, 1, 12) for start in range(16, LENGTH))]:
        tables = np.full((1, 2, width), shape.blocks, np.int32)
        tables[0, :, :4] = order[:8].reshape(2, 4)
        batch = StepBatch(
            tokens=jnp.asarray(np.stack([other, mine])[None, :, start : start + time]),
            lengths=jnp.full((1, 2), time, jnp.int32),
            starts=jnp.full((1, 2), start, jnp.int32),
            slots=jnp.asarray([[2, 0]], jnp.int32),
            tables=jnp.asarray(tables),
        )
        hidden, logits, cache = advance(params, cache, batch)
        rows["hidden"].append(np.asarray(hidden)[1])
        rows["logits"].append(np.asarray(logits)[1])
    wanted = {name: alone("small", "reference")[name] for name in rows}
    assert differences({name: np.concatenate(parts) for name, parts in rows.items()}, wanted) == []
