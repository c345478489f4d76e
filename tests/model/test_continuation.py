"""One token at a time, in chunks or all at once: the same numbers (model.md §5.10), at every length 1…40.

Row n − 1 of a batch of forty holds the first n tokens of a golden prompt, so that all lengths run in one program and
rows of all ages share each call. Everything is float32_exact, where only the order of fp32 sums may differ.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import Cache, ForwardOutput, ModelConfig, Params, forward, init_cache
from deepinfer_jax.kernels.sparse_attention import PackedEntries
from tests.support.golden import LAYER_KEYS, Array, Case, as_float32, model, same_picks, worst
from tests.support.marks import slow

pytestmark = pytest.mark.real

LONGEST = 40
ROWS = np.arange(1, LONGEST + 1)  # length of each row
CASES = {"A_s28": Case("A_s28", "long", "f32nq"), "B_s15": Case("B_s15", "blong", "f32nq")}
IMAGES = Case("A_s28", "img", "f32nq")
CAPTURE = ("layers.*.index_picks", "layers.*.expert_ids")
# Two implementations differ by 7.3e-6 and chunks of one by 5.5e-6 (golden README); another order of the same sums.
TOLERANCE = 2e-5
# Cached keys and latents are of size 1 to 10 and are made from streams, which differ more than logits do.
CACHE_TOLERANCE = 1e-4


@dataclasses.dataclass
class Fed:
    """A batch after some calls: logits float32 [rows, LONGEST + 1, vocab] and picks by name, at the positions fed."""

    cache: Cache
    logits: Array
    picks: dict[str, Array]

    def record(self, output: ForwardOutput, start: Array, lengths: Array) -> None:
        assert output.cache is not None and output.logits is not None
        self.cache = output.cache
        rows, times = np.nonzero(np.arange(output.logits.shape[1]) < lengths[:, None])
        positions = start[rows] + times
        self.logits[rows, positions] = np.asarray(output.logits)[rows, times]
        for name, value in output.captured.items():
            if name not in self.picks:
                self.picks[name] = np.full((len(lengths), LONGEST + 1, value.shape[-1]), -1, np.int32)
            self.picks[name][rows, positions] = np.asarray(value)[rows, times]


def empty(folder: str) -> Fed:
    config, _ = model(folder, "float32_exact")
    cache = init_cache(config, LONGEST, LONGEST + 1, precision="float32_exact")
    return Fed(cache, np.zeros((LONGEST, LONGEST + 1, config.text.vocab_size), np.float32), {})


def feed(folder: str, fed: Fed, lengths: Array, width: int) -> None:
    """The next `lengths` tokens of each row's prompt, as a call of `width` columns."""
    config, params = model(folder, "float32_exact")
    prompt = CASES[folder].tokens[0]
    start = np.asarray(fed.cache.lengths)
    columns = np.minimum(start[:, None] + np.arange(width), len(prompt) - 1)  # what lies beyond `lengths` is padding
    output = forward(
        params,
        config,
        prompt[columns],
        cache=fed.cache,
        lengths=lengths,
        precision="float32_exact",
        capture=CAPTURE,
    )
    fed.record(output, start, lengths)


@functools.cache
def prefilled(folder: str) -> Fed:
    """Every row's prompt in one call."""
    fed = empty(folder)
    feed(folder, fed, ROWS, LONGEST)
    return fed


@functools.cache
def chunked(folder: str, chunk: int, width: int) -> Fed:
    """Every row's prompt in chunks; rows that are complete wait with length 0."""
    fed = empty(folder)
    for done in range(0, LONGEST, chunk):
        feed(folder, fed, np.clip(ROWS - done, 0, chunk), width)
    return fed


def given() -> Array:
    """Which (row, position) pairs hold a token of the prompt."""
    return np.arange(LONGEST + 1) < ROWS[:, None]


def assert_same(found: Fed, wanted: Fed, where: Array) -> None:
    assert worst(found.logits[where], wanted.logits[where]) < TOLERANCE
    for name in wanted.picks:
        assert same_picks(found.picks[name][where], wanted.picks[name][where]), name


def as_array(entries: jax.Array | PackedEntries) -> jax.Array:
    assert isinstance(entries, jax.Array)  # only the low precisions pack them
    return entries


def assert_same_cache(found: Cache, wanted: Cache, config: ModelConfig) -> None:
    """Equal wherever a later step looks; slots beyond a row's length mean nothing."""
    lengths = np.asarray(wanted.lengths)
    assert np.array_equal(found.lengths, lengths)
    assert found.ngrams is not None and wanted.ngrams is not None
    assert np.array_equal(found.ngrams, wanted.ngrams)

    def compare(name: str, mine: jax.Array, theirs: jax.Array, used: Array) -> None:
        assert worst(as_float32(mine)[used], as_float32(theirs)[used]) < CACHE_TOLERANCE, name

    ring = np.arange(config.text.sliding_window) < lengths[:, None]
    for kind in ("windows", "draft_windows"):
        for layer, (mine, theirs) in enumerate(zip(getattr(found, kind), getattr(wanted, kind), strict=True)):
            compare(f"{kind}[{layer}]", mine, theirs, ring)
    for source, layer in enumerate(config.text.kv_source_layer_ids):
        ratio = config.text.compress_ratios[layer]
        used = np.arange(wanted.index_keys[source].shape[1]) < (lengths // ratio)[:, None]
        compare(f"entries[{source}]", as_array(found.entries[source]), as_array(wanted.entries[source]), used)
        compare(f"index_keys[{source}]", found.index_keys[source], wanted.index_keys[source], used)
        mine, theirs = found.open_groups[source], wanted.open_groups[source]
        if mine is not None and theirs is not None:
            # Slot i holds the token ratio − 1 − i places back; only the tokens of the unfinished group count.
            open_slots = np.arange(ratio - 1) >= (ratio - 1 - lengths % ratio)[:, None]
            compare(f"open_groups[{source}].kv", mine.kv, theirs.kv, open_slots)
            compare(f"open_groups[{source}].gate", mine.gate, theirs.gate, open_slots)


# B's schedule differs (reindexing at ratio 2, padded candidate blocks), its programs cost as much again.
folders = pytest.mark.parametrize("folder", ["A_s28", slow("B_s15")])


@folders
def test_a_prefix_has_the_golden_logits_of_the_whole_prompt(folder: str) -> None:
    golden = CASES[folder].get("logits")[0, : LONGEST + 1]
    where = given()
    assert worst(prefilled(folder).logits[where], np.broadcast_to(golden, (LONGEST, *golden.shape))[where]) < 1e-4


@folders
@pytest.mark.parametrize(("chunk", "width"), [slow(1, 1), (1, 8), (2, 8), (3, 8), (8, 8)])
def test_chunks_equal_one_prefill_at_every_length(folder: str, chunk: int, width: int) -> None:
    """Width 8 with fewer tokens is padding on the right; width 1 is decode."""
    config, _ = model(folder, "float32_exact")
    fed, wanted = chunked(folder, chunk, width), prefilled(folder)
    assert_same(fed, wanted, given())
    assert_same_cache(fed.cache, wanted.cache, config)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [2, 3])
def test_chunks_of_exactly_their_width_equal_one_prefill(chunk: int) -> None:
    fed = chunked("A_s28", chunk, chunk)
    assert_same(fed, prefilled("A_s28"), given())


@folders
def test_a_decode_step_after_a_prefill_of_every_length_gives_the_golden_logits(folder: str) -> None:
    before = prefilled(folder)
    fed = Fed(before.cache, before.logits.copy(), {})
    feed(folder, fed, np.ones(LONGEST, np.int32), 1)
    golden = CASES[folder].get("logits")[0]
    assert worst(fed.logits[np.arange(LONGEST), ROWS], golden[ROWS]) < 1e-4


def test_rows_of_length_zero_stay_as_they_are() -> None:
    """Every leaf of a waiting row is bit-equal afterwards, on the decode path and on the chunk path."""
    before = prefilled("A_s28").cache
    waiting = np.arange(LONGEST) % 3 == 0
    for width in (1, 8):
        fed = Fed(before, prefilled("A_s28").logits.copy(), {})
        feed("A_s28", fed, np.where(waiting, 0, 1), width)
        assert np.array_equal(fed.cache.lengths, ROWS + ~waiting)
        for mine, theirs in zip(jax.tree.leaves(fed.cache), jax.tree.leaves(before), strict=True):
            assert np.array_equal(np.asarray(mine)[waiting], np.asarray(theirs)[waiting])


@functools.partial(jax.jit, static_argnames="config")
def image_chunk(
    params: Params,
    cache: Cache,
    tokens: jax.Array,
    roles: jax.Array,
    features: jax.Array,
    lengths: jax.Array,
    config: ModelConfig,
) -> ForwardOutput:
    """Traced, so that one program serves chunks with any number of image rows: the rest of `features` is unused."""
    return forward(
        params,
        config,
        tokens,
        cache=cache,
        lengths=lengths,
        token_types=roles,
        image_embeds=features,
        precision="float32_exact",
        capture=CAPTURE,
    )


@pytest.mark.parametrize(("chunk", "width"), [slow(1, 1), slow(5, 8), (8, 8)])
def test_chunk_borders_inside_images_change_nothing(chunk: int, width: int) -> None:
    """The spans stand at 5…12 and 22…25 (golden README), so that chunks of 1, 5 and 8 cut both."""
    config, params = model("A_s28", "float32_exact")
    assert IMAGES.token_types is not None and IMAGES.image_embeds is not None
    tokens, roles, prompt = IMAGES.tokens[0], IMAGES.token_types[0], IMAGES.prefill_length
    cache = init_cache(config, 1, prompt, precision="float32_exact")
    for start in range(0, prompt, chunk):
        length = min(chunk, prompt - start)
        positions = np.arange(start, start + length)
        padded = np.minimum(start + np.arange(width), prompt - 1)
        features = jnp.roll(IMAGES.image_embeds, -int((roles[:start] == 1).sum()), axis=0)
        output = image_chunk(
            params, cache, tokens[None, padded], roles[None, padded], features, np.array([length]), config=config
        )
        assert output.cache is not None
        cache = output.cache
        assert output.logits is not None
        assert worst(output.logits[0, :length], IMAGES.get("logits")[0, positions]) < 1e-4
        for layer, key, wanted in IMAGES.layer_arrays():
            if key in ("index_picks", "router_idx"):
                found = np.asarray(output.captured[f"layers.{layer}.{LAYER_KEYS[key]}"])
                assert same_picks(found[0, :length], wanted[0, positions]), (layer, key)
