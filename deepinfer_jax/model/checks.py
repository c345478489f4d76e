"""Input checks of the research API: shapes and dtypes always, values when they are concrete."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from deepinfer_jax.cache.dense import Cache
from deepinfer_jax.config.model_config import ModelConfig, check_precision
from deepinfer_jax.model.embedding import IMAGE
from deepinfer_jax.tokenization import ImageTokenOffset
from deepinfer_jax.weights.params import Params, Vision

IntArray = jax.Array | npt.NDArray[Any]


def check_inputs(
    params: Params,
    config: ModelConfig,
    tokens: IntArray,
    cache: Cache | None,
    lengths: IntArray | None,
    token_types: IntArray | None,
    image_embeds: jax.Array | None,
    precision: str,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Checks the arguments of `forward`; returns tokens, lengths and token types as int32 arrays.

    Raises:
        ValueError: see `forward`.
    """
    check_precision(precision)
    _check_made_for("parameters", params.precision, precision)
    _check_params(params, config)
    if config.text.engram_layer_ids and params.token_map is None:
        raise ValueError(
            "this model has Engram layers, but its parameters hold no token map: the checkpoint folder had no "
            "tokenizer.json; load again with tokenizer=FOLDER"
        )
    tokens = _integers("tokens", tokens, 2)
    batch, time = tokens.shape
    if batch == 0 or time == 0:
        raise ValueError(f"tokens is {batch} x {time}; at least one row and one token are needed")
    if cache is not None:
        _check_made_for("a cache", cache.precision, precision)
        _check_cache(cache, config)
        if cache.lengths.shape[0] != batch:
            raise ValueError(f"the cache has {cache.lengths.shape[0]} rows, tokens has {batch}")
    if lengths is not None:
        lengths = _integers("lengths", lengths, 1)
        _check_shape("lengths", lengths, (batch,))
        _check_range("lengths", lengths, 0, time)
    if token_types is not None:
        token_types = _integers("token_types", token_types, 2)
        _check_shape("token_types", token_types, (batch, time))
        _check_range("token_types", token_types, -1, 3)
    if image_embeds is not None:
        _check_shape("image_embeds", image_embeds, (image_embeds.shape[0], config.text.hidden_size))
        if token_types is None:
            raise ValueError("image_embeds needs token_types, which say where the images stand")
    inside = _inside(lengths, batch, time)
    if inside is not None:
        _check_ids(tokens, token_types, inside, config)
        _check_images(token_types, image_embeds, inside, params)
        _check_room(cache, inside)
    return (
        jnp.asarray(tokens, jnp.int32),
        None if lengths is None else jnp.asarray(lengths, jnp.int32),
        None if token_types is None else jnp.asarray(token_types, jnp.int32),
    )


def check_drafting(params: Params, config: ModelConfig, cache: Cache, tokens: IntArray, precision: str) -> jax.Array:
    """Checks the arguments of `draft`; returns the tokens as int32.

    Raises:
        ValueError: see `draft`.
    """
    if params.draft is None:
        raise ValueError("this model has no draft layers (num_nextn_predict_layers is 0)")
    check_precision(precision)
    _check_made_for("parameters", params.precision, precision)
    _check_made_for("a cache", cache.precision, precision)
    _check_params(params, config)
    _check_cache(cache, config)
    tokens = _integers("tokens", tokens, 1)
    _check_shape("tokens", tokens, (cache.lengths.shape[0],))
    _check_range("tokens", tokens, 0, config.text.vocab_size - 1)
    if is_concrete(cache.lengths) and (np.asarray(cache.lengths) == 0).any():
        raise ValueError("a draft needs at least one target token in every row of the cache")
    return jnp.asarray(tokens, jnp.int32)


def check_patches(
    params: Params, config: ModelConfig, patches: jax.Array, vit_height: int, vit_width: int, precision: str
) -> Vision:
    """Checks the arguments of `encode_image`; returns the vision tower.

    Raises:
        ValueError: see `encode_image`.
    """
    check_precision(precision)
    _check_made_for("parameters", params.precision, precision)
    _check_params(params, config)
    if params.vision is None:
        raise ValueError("this model has no vision tower (vision_config.num_hidden_layers is 0)")
    if not jnp.issubdtype(patches.dtype, jnp.floating):
        raise ValueError(f"patches must hold floats, found {patches.dtype}: ImageProcessor.patches makes them")
    if min(vit_height, vit_width) < 1:
        raise ValueError(f"a grid of {vit_height} x {vit_width} patches has none; vit_height, vit_width are at least 1")
    _check_shape("patches", patches, (vit_height * vit_width, 3 * config.vision.patch_size**2))
    return params.vision


def is_concrete(array: object) -> bool:
    """Whether the values can be looked at (not under tracing)."""
    return not isinstance(array, jax.core.Tracer)


def _check_made_for(what: str, found: str, wanted: str) -> None:
    if found != wanted:
        raise ValueError(
            f"{what} made for precision {found!r} cannot run in {wanted!r}: pass precision={found!r} or make new ones"
        )


def _check_params(params: Params, config: ModelConfig) -> None:
    text, drafts = config.text, 0 if params.draft is None else len(params.draft.layers)
    found = (len(params.layers), drafts, *params.embed.shape)
    wanted = (text.num_hidden_layers, text.num_nextn_predict_layers, text.vocab_size, text.hidden_size)
    if found != wanted:
        raise ValueError(_other_model("the parameters", "layers, draft layers, vocabulary, hidden size", found, wanted))


def _check_cache(cache: Cache, config: ModelConfig) -> None:
    text = config.text
    found = (len(cache.windows), len(cache.index_keys), *cache.windows[0].shape[1:])
    wanted = (text.num_hidden_layers, len(text.kv_source_layer_ids), text.sliding_window, text.head_dim)
    if found != wanted:
        raise ValueError(_other_model("the cache", "layers, KV sources, window, head size", found, wanted))


def _other_model(what: str, sizes: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    return f"{what} and the configuration belong to different models ({sizes}: {found} and {wanted})"


def _integers(name: str, array: IntArray, ndim: int) -> IntArray:
    if not isinstance(array, jax.Array):
        array = np.asarray(array)
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{name} must hold integers, found {array.dtype}")
    if array.ndim != ndim:
        axes = "one axis" if ndim == 1 else f"{ndim} axes"
        raise ValueError(f"{name} must have {axes}, found shape {list(array.shape)}")
    return array


def _check_shape(name: str, array: IntArray, wanted: tuple[int, ...]) -> None:
    if array.shape != wanted:
        raise ValueError(f"{name} has shape {list(array.shape)}, expected {list(wanted)}")


def _check_range(name: str, array: IntArray, low: int, high: int) -> None:
    if not is_concrete(array):
        return
    values = np.asarray(array)
    wrong = np.argwhere((values < low) | (values > high))
    if len(wrong):
        where = tuple(int(i) for i in wrong[0])
        raise ValueError(f"{name}{list(where)} is {values[where]}, outside {low}…{high}")


def _inside(lengths: IntArray | None, batch: int, time: int) -> npt.NDArray[np.bool_] | None:
    """Which positions are real, bool [batch, time]; None when that is not known at trace time."""
    if lengths is None:
        return np.ones((batch, time), bool)
    if not is_concrete(lengths):
        return None
    return np.arange(time) < np.asarray(lengths)[:, None]


def _check_ids(tokens: IntArray, roles: IntArray | None, inside: npt.NDArray[np.bool_], config: ModelConfig) -> None:
    if not is_concrete(tokens) or not is_concrete(roles):
        return
    ids, vocab = np.asarray(tokens), config.text.vocab_size
    image = np.zeros(ids.shape, bool) if roles is None else np.asarray(roles) >= 0
    wrong = np.argwhere(inside & ((ids < 0) | (ids >= np.where(image, vocab + ImageTokenOffset.NUM_SPECIAL, vocab))))
    if len(wrong):
        row, time = (int(i) for i in wrong[0])
        raise ValueError(
            f"tokens[{row}, {time}] is {ids[row, time]}, outside the vocabulary 0…{vocab - 1}"
            + ("" if image[row, time] else " (ids above it need an image role in token_types)")
        )


def _check_images(
    roles: IntArray | None, features: jax.Array | None, inside: npt.NDArray[np.bool_], params: Params
) -> None:
    if roles is None or not is_concrete(roles):
        return
    kinds = np.where(inside, np.asarray(roles), -1)
    if (kinds >= 0).any() and params.vision is None:
        raise ValueError("token_types marks image positions, but this model has no vision tower")
    wanted, given = int((kinds == IMAGE).sum()), 0 if features is None else features.shape[0]
    if wanted != given:
        raise ValueError(f"token_types marks {wanted} image positions, image_embeds has {given} rows")


def _check_room(cache: Cache | None, inside: npt.NDArray[np.bool_]) -> None:
    if cache is None or not is_concrete(cache.lengths):
        return
    held, new = np.asarray(cache.lengths), inside.sum(axis=1)
    full = np.flatnonzero(held + new > cache.max_length)
    if len(full):
        row = int(full[0])
        raise ValueError(
            f"row {row} of the cache holds {held[row]} tokens and cannot take {new[row]} more: "
            f"max_length is {cache.max_length}"
        )
