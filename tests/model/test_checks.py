"""What `forward` and `draft` refuse, each with a sentence that says where and what to do."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import Cache, ForwardOutput, draft, forward, init_cache
from deepinfer_jax.model.checks import check_inputs
from tests.support.golden import Array, model
from tests.support.small_model import small_config, small_params

pytestmark = [pytest.mark.real, pytest.mark.unoptimised]

EXACT = "float32_exact"
VOCAB = small_config().text.vocab_size
HIDDEN = small_config().text.hidden_size
TOKENS = np.random.default_rng(1).integers(3, 180, (2, 12))
TEXT = np.full(TOKENS.shape, -1)


def changed(array: Array, row: int, time: int, value: int) -> Array:
    """A copy with one element replaced."""
    copy = array.copy()
    copy[row, time] = value
    return copy


def cache(rows: int = 2, precision: str = EXACT, held: tuple[int, ...] = (0, 0)) -> Cache:
    empty = init_cache(small_config(), rows, 16, precision=precision)
    return dataclasses.replace(empty, lengths=jnp.array(held[:rows], jnp.int32))


def features(count: int) -> jax.Array:
    return jnp.ones((count, HIDDEN))


IMAGE = changed(TEXT, 1, 5, 1)  # one image position

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "float ids": ({"tokens": TOKENS.astype(np.float32)}, "tokens must hold integers, found float32"),
    "boolean ids": ({"tokens": TOKENS > 5}, "tokens must hold integers, found bool"),
    "one row without its axis": ({"tokens": TOKENS[0]}, r"tokens must have 2 axes, found shape \[12\]"),
    "an empty prompt": ({"tokens": TOKENS[:, :0]}, "tokens is 2 x 0; at least one row and one token"),
    "no rows": ({"tokens": TOKENS[:0]}, "tokens is 0 x 12; at least one row and one token"),
    "a negative id": ({"tokens": changed(TOKENS, 1, 3, -1)}, r"tokens\[1, 3\] is -1, outside the vocabulary 0…191"),
    "an id above the vocabulary": (
        {"tokens": changed(TOKENS, 0, 11, VOCAB)},
        r"tokens\[0, 11\] is 192, outside the vocabulary 0…191 \(ids above it need an image role in token_types\)",
    ),
    "an image sentinel at a text position": (
        {"tokens": changed(TOKENS, 1, 4, VOCAB + 1), "token_types": IMAGE, "image_embeds": features(1)},
        r"tokens\[1, 4\] is 193, outside the vocabulary",
    ),
    "an id above the image sentinels": (
        {"tokens": changed(TOKENS, 1, 5, VOCAB + 5), "token_types": IMAGE, "image_embeds": features(1)},
        r"tokens\[1, 5\] is 197, outside the vocabulary 0…191$",
    ),
    "float lengths": ({"lengths": np.array([1.0, 2.0])}, "lengths must hold integers, found float64"),
    "lengths of another batch": ({"lengths": np.array([1, 2, 3])}, r"lengths has shape \[3\], expected \[2\]"),
    "a negative length": ({"lengths": np.array([3, -1])}, r"lengths\[1\] is -1, outside 0…12"),
    "a length beyond the columns": ({"lengths": np.array([13, 1])}, r"lengths\[0\] is 13, outside 0…12"),
    "roles of another shape": ({"token_types": TEXT[:, :3]}, r"token_types has shape \[2, 3\], expected \[2, 12\]"),
    "an unknown role": ({"token_types": changed(TEXT, 0, 2, 4)}, r"token_types\[0, 2\] is 4, outside -1…3"),
    "an image position without its row": (
        {"token_types": IMAGE},
        "token_types marks 1 image positions, image_embeds has 0 rows",
    ),
    "more image rows than positions": (
        {"token_types": IMAGE, "image_embeds": features(2)},
        "token_types marks 1 image positions, image_embeds has 2 rows",
    ),
    "an image position in the padding": (
        {"token_types": IMAGE, "image_embeds": features(1), "lengths": np.array([12, 5])},
        "token_types marks 0 image positions, image_embeds has 1 rows",
    ),
    "image rows without roles": ({"image_embeds": features(1)}, "image_embeds needs token_types"),
    "image rows of another width": (
        {"token_types": IMAGE, "image_embeds": jnp.ones((1, HIDDEN + 1))},
        r"image_embeds has shape \[1, 65\], expected \[1, 64\]",
    ),
    "a cache of another batch": ({"cache": cache(1)}, "the cache has 1 rows, tokens has 2"),
    "a cache that would overflow": (
        {"cache": cache(held=(4, 5))},
        "row 1 of the cache holds 5 tokens and cannot take 12 more: max_length is 16",
    ),
    "a cache of another precision": (
        {"cache": cache(precision="bf16")},
        "a cache made for precision 'bf16' cannot run in 'float32_exact': pass precision='bf16' or make new ones",
    ),
    "parameters of another precision": (
        {"precision": "reference"},
        "parameters made for precision 'float32_exact' cannot run in 'reference'",
    ),
    "an unknown precision": ({"precision": "fp16"}, "precision 'fp16' does not exist; choose one of reference, bf16"),
    "parameters without a token map": (
        {"params": dataclasses.replace(small_params(EXACT), token_map=None)},
        "hold no token map: .* load again with tokenizer=FOLDER",
    ),
    "a misspelt capture": ({"capture": ["final_nrom"]}, "'final_nrom' matches nothing.*nearest names are final_norm"),
    "a capture beyond the layers": ({"capture": ["layers.4.streams"]}, r"'layers.4.streams'.*layers\.3\.streams"),
}


@pytest.mark.parametrize(("options", "sentence"), REFUSED.values(), ids=REFUSED)
def test_bad_input_is_refused(options: dict[str, Any], sentence: str) -> None:
    arguments: dict[str, Any] = {"params": small_params(EXACT), "tokens": TOKENS, "precision": EXACT} | options
    with pytest.raises(ValueError, match=sentence):
        forward(config=small_config(), **arguments)


def test_shapes_and_dtypes_are_refused_under_tracing_too() -> None:
    config = small_config()
    trace = jax.jit(lambda tokens: forward(small_params(EXACT), config, tokens, precision=EXACT).logits)
    with pytest.raises(ValueError, match="tokens must hold integers, found float32"):
        trace(jnp.ones((2, 12)))


def test_an_image_in_a_model_without_a_vision_tower_is_refused() -> None:
    config, params = model("B_s15", EXACT)
    roles, rows = np.array([[-1, 1, -1]]), jnp.ones((1, config.text.hidden_size))
    with pytest.raises(ValueError, match="marks image positions, but this model has no vision tower"):
        forward(params, config, np.array([[5, 6, 7]]), token_types=roles, image_embeds=rows, precision=EXACT)


@pytest.mark.parametrize("sentinel", range(VOCAB, VOCAB + 5))
def test_image_sentinels_are_accepted_where_an_image_stands(sentinel: int) -> None:
    tokens = changed(TOKENS, 1, 5, sentinel)
    accepted, lengths, roles = check_inputs(
        small_params(EXACT), small_config(), tokens, None, None, IMAGE, features(1), EXACT
    )
    assert accepted.dtype == jnp.int32 and np.array_equal(accepted, tokens)
    assert lengths is None and roles is not None and np.array_equal(roles, IMAGE)


DRAFT_REFUSED: dict[str, tuple[Callable[[], tuple[Cache, Array]], str]] = {
    "an empty row": (lambda: (cache(held=(3, 0)), np.array([5, 6])), "at least one target token in every row"),
    "an id above the vocabulary": (lambda: (cache(held=(3, 3)), np.array([5, VOCAB])), r"tokens\[1\] is 192, outside"),
    "two axes": (lambda: (cache(held=(3, 3)), TOKENS), r"tokens must have one axis, found shape \[2, 12\]"),
    "another batch": (lambda: (cache(held=(3, 3)), np.array([5])), r"tokens has shape \[1\], expected \[2\]"),
    "floats": (lambda: (cache(held=(3, 3)), np.array([5.0, 6.0])), "tokens must hold integers"),
    "another precision": (
        lambda: (cache(precision="float32", held=(3, 3)), np.array([5, 6])),
        "a cache made for precision 'float32' cannot run in 'float32_exact'",
    ),
}


@pytest.mark.parametrize(("arguments", "sentence"), DRAFT_REFUSED.values(), ids=DRAFT_REFUSED)
def test_a_draft_of_bad_input_is_refused(arguments: Callable[[], tuple[Cache, Array]], sentence: str) -> None:
    held, tokens = arguments()
    with pytest.raises(ValueError, match=sentence):
        draft(small_params(EXACT), small_config(), held, tokens, precision=EXACT)


def test_a_model_without_draft_layers_has_no_draft() -> None:
    params = dataclasses.replace(small_params(EXACT), draft=None)
    with pytest.raises(ValueError, match="this model has no draft layers"):
        draft(params, small_config(), cache(held=(3, 3)), np.array([5, 6]), precision=EXACT)


@jax.jit
def traced(held: Cache, tokens: jax.Array, lengths: jax.Array) -> ForwardOutput:
    return forward(small_params(EXACT), small_config(), tokens, cache=held, lengths=lengths, precision=EXACT)


def test_under_tracing_exactly_the_rows_that_overflow_are_nan() -> None:
    """Row 0 would need 22 of 16 places; row 1 fills its cache to the last place."""
    output = traced(cache(held=(10, 4)), jnp.array(TOKENS), jnp.array([12, 12]))
    assert output.logits is not None and output.cache is not None
    assert np.isnan(output.logits[0]).all() and np.isnan(output.hidden[0]).all()
    assert np.isfinite(output.logits[1]).all() and np.isfinite(output.hidden[1]).all()
    assert output.cache.lengths.tolist() == [16, 16]


def test_what_stands_in_the_padding_does_not_matter() -> None:
    """Ids in the padding are not checked and change no result and no cache."""
    lengths = jnp.array([12, 7])
    clean = traced(cache(), jnp.array(TOKENS), lengths)
    dirty = traced(cache(), jnp.array(np.where(np.arange(12) < lengths[:, None], TOKENS, 10**6)), lengths)
    assert clean.logits is not None and dirty.logits is not None
    assert np.array_equal(clean.logits[0], dirty.logits[0]) and np.array_equal(clean.logits[1, :7], dirty.logits[1, :7])
    for mine, theirs in zip(jax.tree.leaves(clean.cache), jax.tree.leaves(dirty.cache), strict=True):
        assert np.array_equal(mine, theirs)


def test_a_chunk_without_images_takes_no_image_rows() -> None:
    """A chunked prompt slices its features; most chunks get none."""
    output = forward(
        small_params(EXACT), small_config(), TOKENS, token_types=TEXT, image_embeds=features(0), precision=EXACT
    )
    plain = forward(small_params(EXACT), small_config(), TOKENS, precision=EXACT)
    assert output.logits is not None and plain.logits is not None
    assert float(jnp.abs(output.logits - plain.logits).max()) < 1e-5  # two programs: fp32 sums in another order
