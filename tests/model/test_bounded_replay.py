"""Bounded replay: "mask" by brute force, "compact" by "mask", and both by the exact model where they may not differ."""

import dataclasses
import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import init_cache
from deepinfer_jax.cache.dense import DenseView
from deepinfer_jax.cache.pools import CacheShape, init_pools
from deepinfer_jax.config.model_config import TextConfig, parse_config
from deepinfer_jax.config.precision import precision_policy
from deepinfer_jax.kernels.choice import KernelChoice
from deepinfer_jax.model import attention
from deepinfer_jax.model.backbone import hidden_states
from deepinfer_jax.model.bounded_replay import Mode, Replay, first_consumer, replay_problem
from deepinfer_jax.model.embedding import END_PLACE, NEWLINE_PLACE, START_PLACE, TEXT_PLACE
from deepinfer_jax.model.probe import Probe
from deepinfer_jax.runtime.paged_model import Advanced, PagedModel, StepBatch
from tests.support.marks import slow
from tests.support.paths import RELEASED_CONFIG
from tests.support.small_model import small_config, small_params

pytestmark = pytest.mark.real

WINDOW = small_config().text.sliding_window
KEEP = WINDOW + 4
CHUNK = 32  # columns of the one prefill shape: more than are kept
DECODED = 3
SHAPE = CacheShape(data=2, slots=3, blocks=48, tokens_per_block=8)
WIDTH = 12
INVARIANT, PLAIN = KernelChoice(batch_invariant=True), KernelChoice()
# Of the sequences in one batch: around the window, the kept rows and the chunk, and far beyond all of them.
LENGTHS = (1, WINDOW, KEEP - 1, KEEP, KEEP + 1, CHUNK + KEEP)
LONGER = (KEEP + WINDOW - 1, KEEP + WINDOW, CHUNK, CHUNK + 1, 2 * CHUNK, 93)
WAYS = {"at once": CHUNK, "in chunks of 7": 7, f"in chunks of {WINDOW}": WINDOW, f"in chunks of {KEEP}": KEEP}
RELEASED = parse_config(json.loads(RELEASED_CONFIG.read_text())).text


@functools.partial(jax.jit, static_argnums=0)
def advance(model: PagedModel, params: Any, cache: Any, batch: StepBatch) -> Advanced:
    return model.advance(params, cache, batch)


@functools.cache
def tokens_of(row: int, length: int) -> np.ndarray:
    """A prompt and what is decoded after it, the same whatever the mode."""
    return np.random.default_rng(row).integers(3, 190, length + DECODED).astype(np.int32)


@functools.cache
def places_of(row: int, length: int) -> np.ndarray:
    """Of that prompt: in even rows an image stands across the first kept position, as far as it fits."""
    image = np.array([START_PLACE, 0, 3, NEWLINE_PLACE, 2, 1, NEWLINE_PLACE, END_PLACE], np.int32)
    places = np.full(length, TEXT_PLACE, np.int32)
    first = length - KEEP - 3
    if row % 2 == 0 and first > 0:
        places[first : first + len(image)] = image
    return places


def features(precision: str) -> jax.Array:
    """The rows that they name."""
    rows = np.random.default_rng(7).standard_normal((4, small_config().text.hidden_size))
    return jnp.asarray(rows, precision_policy(small_config(), precision).dtype)


def poisoned(array: jax.Array) -> jax.Array:
    """Every number NaN, every byte 0xFF (an e4m3 NaN, the scale NaN), every id a live one."""
    if array.dtype == jnp.uint8:
        return jnp.full_like(array, 0xFF)
    return jnp.full_like(array, 7 if array.dtype == jnp.int32 else jnp.nan)


@dataclasses.dataclass
class Run:
    """What came out of a batch of sequences.

    Attributes:
        hidden: by sequence, the final states by position.
        pools: the cache's entries, index keys and open groups at the end.
    """

    hidden: list[dict[int, np.ndarray]]
    pools: list[np.ndarray]


def run(
    mode: Mode | None,
    lengths: tuple[int, ...] = LENGTHS,
    *,
    chunk: int = CHUNK,
    keep: int = KEEP,
    precision: str = "reference",
    kernels: KernelChoice = INVARIANT,
    packed: bool = True,
) -> Run:
    """Feeds the prompts in chunks, some rows sitting steps out, then decodes; sequence i has dp rank i % 2.

    Some have an image.

    The pools are poisoned before: what consumers leave out of their windows is never read.
    """
    exact = PagedModel(small_config(), precision, kernels, packed=packed)
    model = dataclasses.replace(exact, replay=None if mode is None else Replay(mode, keep))
    count, rows = len(lengths), SHAPE.slots
    blocks = np.random.default_rng(1).permutation(SHAPE.blocks)[: rows * WIDTH].reshape(rows, WIDTH).astype(np.int32)
    cache = jax.tree.map(poisoned, init_pools(exact.state(SHAPE.tokens_per_block), SHAPE))
    done, found = np.zeros(count, int), [dict[int, np.ndarray]() for _ in lengths]
    idle = np.random.default_rng(2)
    while (done < np.asarray(lengths) + DECODED).any():
        decodes = bool((done >= lengths).all())
        time = 1 if decodes else CHUNK
        tokens = np.zeros((2, rows, time), np.int32)
        places = np.full((2, rows, time), TEXT_PLACE, np.int32)
        new, starts, kept_from = (np.zeros((2, rows), np.int32) for _ in range(3))
        slots = np.full((2, rows), SHAPE.slots, np.int32)
        for i, length in enumerate(lengths):
            place = i % 2, i // 2
            number = 1 if decodes else min(chunk, length - done[i])
            if number <= 0 or (not decodes and idle.random() < 0.3):
                continue
            tokens[place][:number] = tokens_of(i, length)[done[i] : done[i] + number]
            new[place], starts[place], slots[place] = number, done[i], i // 2
            kept_from[place] = max(length - keep, 0)
            if not decodes:
                places[place][:number] = places_of(i, length)[done[i] : done[i] + number]
        batch = StepBatch(
            *map(jnp.asarray, (tokens, new, starts, slots, np.stack([blocks, blocks]))),
            kept_from=None if decodes else jnp.asarray(kept_from),
            places=None if decodes else jnp.asarray(places),
            features=None if decodes else features(precision),
        )
        # One decode program for all: of it `replay` changes nothing.
        hidden, ends, cache = advance(exact if decodes else model, small_params(precision), cache, batch)
        assert np.isfinite(np.asarray(hidden, np.float32)).all()
        for i in range(count):
            row = i % 2 * rows + i // 2
            number = int(new[i % 2, i // 2])
            done[i] += number
            last = int(ends[row])
            assert last <= number
            for position, state in zip(range(done[i] - last, done[i]), np.asarray(hidden[row]), strict=False):
                found[i][position] = state
    return Run(
        found, [np.asarray(leaf) for leaf in jax.tree.leaves((cache.entries, cache.index_keys, cache.open_groups))]
    )


def kept_positions(length: int, keep: int = KEEP) -> range:
    return range(max(length - keep, 0), length + DECODED)


@functools.cache
def masked(lengths: tuple[int, ...]) -> Run:
    return run("mask", lengths)


def same_bits(ours: np.ndarray, wanted: np.ndarray) -> bool:
    return ours.tobytes() == wanted.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [LENGTHS, LONGER])
@pytest.mark.parametrize("way", list(WAYS))
def test_compact_gives_the_bits_of_mask_in_the_kept_rows_however_prompts_are_cut(
    way: str, lengths: tuple[int, ...]
) -> None:
    """Final states of the kept rows, and of the tokens that are decoded after them from the rings that they left."""
    compact = run("compact", lengths, chunk=WAYS[way])
    for length, ours, wanted in zip(lengths, compact.hidden, masked(lengths).hidden, strict=True):
        assert sorted(ours) == list(kept_positions(length))  # no other row was computed
        assert sorted(wanted) == list(range(length + DECODED))
        assert all(same_bits(ours[position], wanted[position]) for position in ours)


@pytest.mark.slow
def test_compact_gives_the_bits_of_mask_after_steps_in_which_few_rows_keep_anything() -> None:
    """Chunks of 32: at the start of both prompts nothing is kept, and on at most one of them from the second on."""
    lengths = (93, 2 * CHUNK)
    masked, compact = run("mask", lengths), run("compact", lengths)
    for length, ours, wanted in zip(lengths, compact.hidden, masked.hidden, strict=True):
        assert sorted(ours) == list(kept_positions(length))
        assert all(same_bits(ours[position], wanted[position]) for position in ours)
    assert all(same_bits(*pair) for pair in zip(compact.pools, masked.pools, strict=True))


def test_a_step_in_which_no_row_keeps_anything_runs_no_consumer_layer() -> None:
    """Whose weights are NaN here: those of the layers after P, and the final norm."""
    model = PagedModel(small_config(), "float32_exact", PLAIN, replay=Replay("compact", KEEP))
    params, first = small_params("float32_exact"), 2
    layers = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), params.layers[first + 1 :])
    broken = dataclasses.replace(
        params, layers=(*params.layers[: first + 1], *layers), norm=jnp.full_like(params.norm, jnp.nan)
    )
    cache = init_pools(model.state(SHAPE.tokens_per_block), SHAPE)

    def step(kept_from: list[int]) -> Advanced:
        """One row for each dp rank."""
        rows = np.zeros((2, 1), np.int32)
        tokens = tokens_of(0, CHUNK)[:CHUNK]
        tables = np.broadcast_to(np.arange(WIDTH, dtype=np.int32), (2, 1, WIDTH))
        arrays = np.stack([tokens, tokens])[:, None], rows + CHUNK, rows, rows, tables, np.array(kept_from)[:, None]
        return advance(model, broken, cache, StepBatch(*map(jnp.asarray, arrays)))

    nothing = step([CHUNK, CHUNK + 7])
    assert nothing.lengths.tolist() == [0, 0] and not np.asarray(nothing.hidden).any()
    assert np.asarray(nothing.cache.entries[1]).any()  # those of P are there all the same
    for before, after in zip(cache.windows[first:], nothing.cache.windows[first:], strict=True):
        assert same_bits(np.asarray(before), np.asarray(after))
    some = step([CHUNK, CHUNK - 1])
    assert some.lengths.tolist() == [0, 1] and np.isnan(some.hidden[1, 0]).all()


@pytest.mark.slow
def test_global_state_is_that_of_the_exact_model_bit_for_bit() -> None:
    """Entries and index keys of all positions come from producers and from the input of layer P."""
    exact = run(None)
    for replayed in (masked(LENGTHS), run("compact")):
        assert all(same_bits(*pair) for pair in zip(replayed.pools, exact.pools, strict=True))


@pytest.mark.slow
def test_what_is_approximate_differs_and_what_is_not_does_not() -> None:
    """Below P nothing is cut, so a prompt of `keep` tokens is exact; and so is one of a few more, but for rows whose
    window is cut."""
    exact, replayed = run(None), masked(LENGTHS)
    for length, ours, wanted in zip(LENGTHS, replayed.hidden, exact.hidden, strict=True):
        last = length - 1
        assert same_bits(ours[last], wanted[last]) == (length <= KEEP), length


@pytest.mark.parametrize("mode", [slow("mask"), slow("compact")])
def test_a_prompt_that_is_kept_whole_is_exact(mode: Mode) -> None:
    exact, replayed = run(None), run(mode, keep=max(LENGTHS))
    for ours, wanted in zip(replayed.hidden, exact.hidden, strict=True):
        assert ours.keys() == wanted.keys()
        assert all(same_bits(ours[position], wanted[position]) for position in wanted)


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "packed"), [("float32", True), ("reference", False), ("float32_exact", True)])
def test_compact_gives_the_bits_of_mask_in_every_precision_and_format(precision: str, packed: bool) -> None:
    masked, compact = (run(mode, precision=precision, packed=packed) for mode in ("mask", "compact"))
    for ours, wanted in zip(compact.hidden, masked.hidden, strict=True):
        assert all(same_bits(ours[position], wanted[position]) for position in ours)


@pytest.mark.slow
def test_without_batch_invariance_the_modes_differ_by_rounding_only() -> None:
    """Without quantisers, which turn a rounding into a step; 2e-5 is what two implementations are allowed
    (test_continuation.py)."""
    masked, compact = (run(mode, precision="float32_exact", kernels=PLAIN) for mode in ("mask", "compact"))
    for ours, wanted in zip(compact.hidden, masked.hidden, strict=True):
        for position, state in ours.items():
            assert np.abs(state - wanted[position]).max() < 2e-5 * np.abs(wanted[position]).max()


@pytest.mark.slow
def test_mask_is_the_model_whose_consumers_see_no_key_before_the_kept_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the rule of DB §9 for each row, with attention by brute force in float64."""
    text, params = small_config().text, small_params("float32_exact")
    length, layer = 2 * KEEP, 0
    tokens = tokens_of(0, length)[:length]

    def attend(query: Any, window: Any, positions: Any, entries: Any, picks: Any, *rest: Any, **options: Any) -> Any:
        """Of dense float32 entries and one sequence."""
        nonlocal layer
        horizon, sink = (np.asarray(value) for value in rest)
        consumer, layer, heads = layer >= 2, layer + 1, []
        for t, p in enumerate(horizon[0]):
            lowest = max(p - WINDOW + 1, length - KEEP) if consumer else p - WINDOW + 1
            lowest = min(max(lowest, 0), p + 1)
            keys = [key for key, at in zip(window[0], positions[0], strict=True) if lowest <= at <= p]
            assert len(keys) == p + 1 - lowest
            if picks is not None:
                keys += [entries[0, pick] for pick in picks[0, t] if pick >= 0]
            matrix = np.asarray(keys, np.float64).reshape(-1, query.shape[-1])
            logits = np.asarray(query[0, t], np.float64) @ matrix.T * options["scale"]
            highest = logits.max(axis=1, initial=-1e30)
            weights = np.exp(logits - highest[:, None])
            with np.errstate(over="ignore"):
                heads.append(weights @ matrix / (weights.sum(axis=1) + np.exp(sink - highest))[:, None])
        return jnp.asarray(np.stack(heads)[None], jnp.float32)

    monkeypatch.setattr(attention, "sparse_attention", attend)
    policy = precision_policy(small_config(), "float32_exact")
    cache = init_cache(small_config(), 1, length, precision="float32_exact")
    view = DenseView.of(cache, jnp.asarray([length]), length, small_config(), policy)
    images = {"places": jnp.asarray(places_of(0, length))[None], "features": features("float32_exact")}
    arguments = params, tokens[None], view, cache, small_config(), policy, Probe(), PLAIN
    wanted = np.asarray(hidden_states(*arguments, **images)[0])[0]
    monkeypatch.undo()
    assert layer == text.num_hidden_layers
    found = run("mask", (length,), precision="float32_exact", kernels=PLAIN).hidden[0]
    ours = np.stack([found[position] for position in range(length)])
    assert np.abs(ours - wanted).max() < 2e-5 * np.abs(wanted).max()


def test_the_first_consumer_of_the_released_model_is_layer_20() -> None:
    assert first_consumer(RELEASED) == 20
    assert replay_problem(RELEASED, Replay("compact", 134), rollback=6) is None


REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "too few tokens": (
        {},
        133,
        "133 tokens are kept, fewer than sliding_window + rollback = 128 + 6 = 134: the windows of the first decoded "
        "tokens would reach before them",
    ),
    "no layer of ratio 1": (
        {"compress_ratios": tuple(2 if ratio == 1 else ratio for ratio in RELEASED.compress_ratios)},
        140,
        "no layer has compression ratio 1, so there is no first consumer layer",
    ),
    "no producers": (
        {"compress_ratios": (1,) * 43, "kv_source_layer_ids": (0,), "index_source_layer_ids": (0,)},
        140,
        "layer 0 has compression ratio 1, so every layer is a consumer and nothing can be left out",
    ),
    "a late KV source": (
        {"kv_source_layer_ids": (*RELEASED.kv_source_layer_ids, 30)},
        140,
        "layers [30] are KV sources after layer 20: they would compress the kept tokens only",
    ),
    "a late Engram layer": (
        {"engram_layer_ids": (1, 20)},
        140,
        "Engram layers [20] are not before layer 20: they would remember the kept tokens only",
    ),
    "taps on both sides": (
        {"dspark_target_layer_ids": (19, 20, 39)},
        140,
        "the drafts' target layers [19, 20, 39] lie on both sides of layer 20: they would tap different rows",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_refused_with_a_sentence(what: str) -> None:
    changes, keep, sentence = REFUSED[what]
    text: TextConfig = dataclasses.replace(RELEASED, **changes)
    assert replay_problem(text, Replay("mask", keep), rollback=6) == sentence
