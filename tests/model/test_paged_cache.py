"""The paged cache says the same as the dense one, whatever its blocks and slots held before."""

import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax import forward, init_cache
from deepinfer_jax.cache.paged import PagedCache, paged_state, state_specs
from deepinfer_jax.cache.paged_view import PagedView
from deepinfer_jax.cache.pools import CacheShape, init_pools
from deepinfer_jax.config.model_config import parse_config
from deepinfer_jax.config.precision import precision_policy
from deepinfer_jax.kernels.choice import KernelChoice
from deepinfer_jax.kernels.formats import fake_quant_fp8, pack_fp8, unpack_fp8
from deepinfer_jax.model.backbone import hidden_states
from deepinfer_jax.model.forward import compute_logits
from deepinfer_jax.model.probe import Probe
from tests.support.paths import RELEASED_CONFIG
from tests.support.small_model import small_config, small_params

pytestmark = pytest.mark.real

TOKENS_PER_BLOCK, WIDTH, SLOTS, BLOCKS = 4, 12, 3, 30
PREFILL = 16  # tokens of the one prefill shape; decode steps have one
Steps = list[tuple[int, ...]]
RELEASED = parse_config(json.loads(RELEASED_CONFIG.read_text()))


@functools.partial(jax.jit, static_argnames=("precision", "time"))
def step(
    params: Any,
    cache: PagedCache,
    tokens: Any,
    tables: Any,
    slots: Any,
    starts: Any,
    lengths: Any,
    *,
    precision: str,
    time: int,
) -> tuple[jax.Array, PagedCache]:
    config = small_config()
    policy = precision_policy(config, precision)
    view = PagedView.of(cache, tables, slots, starts, lengths, time, config, policy)
    flat = tokens.reshape(-1, time)
    hidden, carry = hidden_states(params, flat, view, cache, config, policy, Probe(), KernelChoice())
    return compute_logits(params, hidden), carry.cache


def poisoned(cache: PagedCache) -> PagedCache:
    """Every number NaN, every byte 0xFF (an e4m3 NaN, the scale NaN), every id a live one."""

    def poison(array: jax.Array) -> jax.Array:
        if array.dtype == jnp.uint8:
            return jnp.full_like(array, 0xFF)
        return jnp.full_like(array, 7 if array.dtype == jnp.int32 else jnp.nan)

    return jax.tree.map(poison, cache)


def run_paged(
    precision: str, steps: Steps, *, data: int = 1, packed: bool = True, poison: bool = False, seed: int = 0
) -> list[np.ndarray]:
    """Logits of each sequence, float32 [tokens, vocab]. steps: new tokens of each sequence, 0 for an idle row.

    Sequence i is row i // data of dp rank i % data, in a slot and blocks drawn at random.
    """
    count = len(steps[0])
    rows = count // data
    rng = np.random.default_rng(seed)
    texts = token_rows(count)
    tables = np.stack([rng.permutation(BLOCKS)[: rows * WIDTH].reshape(rows, WIDTH) for _ in range(data)])
    slots = np.stack([rng.permutation(SLOTS)[:rows] for _ in range(data)])
    declared = paged_state(small_config(), precision, tokens_per_block=TOKENS_PER_BLOCK, packed=packed)
    cache = init_pools(declared, CacheShape(data, SLOTS, BLOCKS, TOKENS_PER_BLOCK))
    cache = poisoned(cache) if poison else cache
    done, found = np.zeros(count, np.int32), [[] for _ in range(count)]  # type: ignore[var-annotated]
    for new in steps:
        time = 1 if max(new) == 1 else PREFILL
        tokens = np.zeros((data, rows, time), np.int32)
        by_index = [(i % data, i // data) for i in range(count)]
        starts, lengths, own_slots = (np.zeros((data, rows), np.int32) for _ in range(3))
        for i, place in enumerate(by_index):
            tokens[place][: new[i]] = texts[i, done[i] : done[i] + new[i]]
            starts[place], lengths[place] = done[i], new[i]
            own_slots[place] = slots[place] if new[i] else SLOTS
        logits, cache = step(
            small_params(precision),
            cache,
            tokens,
            tables.astype(np.int32),
            own_slots,
            starts,
            lengths,
            precision=precision,
            time=time,
        )
        logits = np.asarray(logits).reshape(data, rows, time, -1)
        for i, place in enumerate(by_index):
            found[i].append(logits[place][: new[i]])
            done[i] += new[i]
    return [np.concatenate(parts) for parts in found]


def token_rows(count: int) -> np.ndarray:
    return np.random.default_rng(5).integers(3, 190, (count, WIDTH * TOKENS_PER_BLOCK)).astype(np.int32)


def run_dense(precision: str, steps: Steps) -> list[np.ndarray]:
    """The same on the dense cache, through `forward`."""
    count = len(steps[0])
    texts, params = token_rows(count), small_params(precision)
    cache = init_cache(small_config(), count, WIDTH * TOKENS_PER_BLOCK, precision=precision)
    done, found = np.zeros(count, np.int32), [[] for _ in range(count)]  # type: ignore[var-annotated]
    for new in steps:
        time = 1 if max(new) == 1 else PREFILL
        tokens = np.zeros((count, time), np.int32)
        for i in range(count):
            tokens[i, : new[i]] = texts[i, done[i] : done[i] + new[i]]
        output = forward(params, small_config(), tokens, cache=cache, lengths=np.asarray(new), precision=precision)
        assert output.cache is not None and output.logits is not None
        cache = output.cache
        for i in range(count):
            found[i].append(np.asarray(output.logits)[i, : new[i]])
            done[i] += new[i]
    return [np.concatenate(parts) for parts in found]


MIXED: Steps = [(7, 16), (16, 0), (1, 1), (1, 1), (0, 1), (3, 14), (1, 1), (13, 2)]


SLOW_REFERENCE = pytest.param("reference", marks=pytest.mark.slow)


@pytest.mark.parametrize("precision", ["float32_exact", SLOW_REFERENCE])
def test_pages_give_the_logits_of_the_dense_cache_bit_for_bit(precision: str) -> None:
    # The same rows go through the same shapes of every product; only where keys lie differs.
    for ours, dense in zip(run_paged(precision, MIXED), run_dense(precision, MIXED), strict=True):
        np.testing.assert_array_equal(ours, dense)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "reference"])
def test_packed_and_unpacked_pages_give_the_same_bits(precision: str) -> None:
    packed, unpacked = (run_paged(precision, MIXED, packed=packed) for packed in (True, False))
    for one, other in zip(packed, unpacked, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("precision", "packed"), [("float32_exact", True), pytest.param("reference", True, marks=pytest.mark.slow)]
)
def test_what_former_owners_left_is_never_read(precision: str, packed: bool) -> None:
    clean, dirty = (run_paged(precision, MIXED, packed=packed, poison=poison) for poison in (False, True))
    for one, other in zip(clean, dirty, strict=True):
        np.testing.assert_array_equal(one, other)


@settings(max_examples=15)
@given(
    steps=st.lists(st.tuples(st.integers(0, 16), st.integers(0, 16)), min_size=1, max_size=5), seed=st.integers(0, 99)
)
def test_any_chunks_in_any_blocks_equal_the_dense_cache(steps: Steps, seed: int) -> None:
    steps = [new for new in steps if max(new)]
    steps = [new for i, new in enumerate(steps) if max(map(sum, zip(*steps[: i + 1], strict=True))) <= 48] or [(1, 1)]
    paged = run_paged("float32_exact", steps, poison=True, seed=seed)
    for ours, dense in zip(paged, run_dense("float32_exact", steps), strict=True):
        np.testing.assert_array_equal(ours, dense)


@pytest.mark.slow
def test_each_data_index_has_pools_of_its_own() -> None:
    steps: Steps = [(7, 16, 3, 1), (1, 1, 1, 1), (16, 0, 2, 5)]
    for ours, other in zip(run_paged("float32_exact", steps, data=2), run_dense("float32_exact", steps), strict=True):
        np.testing.assert_array_equal(ours, other)


@given(st.integers(0, 2**32 - 1), st.sampled_from([1e-30, 1e-4, 1.0, 3e4]))
def test_packing_a_quantised_window_row_changes_nothing(seed: int, size: float) -> None:
    rows = np.random.default_rng(seed).standard_normal((4, 64)).astype(np.float32) * size
    rows[0, :32], rows[1, 3] = 0, 1000 * size  # a group of zeros, an outlier
    for dtype in (jnp.float32, jnp.bfloat16):
        quantised = fake_quant_fp8(jnp.asarray(rows, dtype))
        np.testing.assert_array_equal(unpack_fp8(*pack_fp8(quantised), dtype), quantised)


def test_released_sizes_are_those_of_the_formats() -> None:
    specs = state_specs(RELEASED, "reference", tokens_per_block=128)
    per_block = {spec.name: spec for spec in specs if spec.per == "block"}
    for ratio, source in ((2, 0), (2, 1), (2, 2), (1, 3)):
        for kind, entry_bytes in (("entries", 288), ("index_keys", 68)):
            parts = [per_block[f"{kind}.{source}.{part}"] for part in ("codes", "scales")]
            assert sum(part.nbytes() for part in parts) == 128 // ratio * entry_bytes
    assert sum(spec.nbytes() for spec in per_block.values()) == 890 * 128
    window = [spec for spec in specs if spec.name.startswith("windows.7.")]
    assert sum(spec.nbytes() for spec in window) == 128 * 528
    # 43 windows, three open groups of one token with two fp32 rows of 512, three n-gram ids.
    per_slot = sum(spec.nbytes() for spec in specs if spec.per == "slot")
    assert per_slot == 43 * 128 * 528 + 3 * 2 * 512 * 4 + (RELEASED.text.engram_max_ngram_size - 1) * 4


def test_a_block_must_hold_whole_groups() -> None:
    with pytest.raises(ValueError, match="tokens_per_block 3 must be a positive multiple of the ratio 2"):
        state_specs(small_config(), "float32", tokens_per_block=3)
