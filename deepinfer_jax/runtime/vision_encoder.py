"""Encodes images into rows of features on the device: one compiled program per size class of images."""

import functools
import logging
import math
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from deepinfer_jax.config.model_config import ModelConfig, VisionConfig
from deepinfer_jax.config.precision import precision_policy
from deepinfer_jax.model.vision import align, feature_count, vision_tower
from deepinfer_jax.runtime.abstract_tree import AbstractTree, abstract_tree
from deepinfer_jax.weights.params import Vision

logger = logging.getLogger(__name__)

_LEAST_PATCHES = 512
"""No smaller class is worth a program."""
_ROUNDED_TO = 64


def most_features(settings: VisionConfig) -> int:
    """Rows of the image with most of them: of n rows and m columns, n·(m + 1) + 2 tokens."""
    return settings.max_image_tokens - 3


def patch_buckets(settings: VisionConfig) -> tuple[int, ...]:
    """Patches of each size class, ascending, at most three; the last holds every image that the token limit allows.

    The first holds images scaled up to `min_pixels`, to which a tenth is added since sides are rounded up to patches;
    one between them is their geometric mean. One that is more than half of the last is left out. Released: 1664, 3968,
    9216 patches.
    """
    largest = most_features(settings) * settings.downsample_ratio**2
    smallest = max(_LEAST_PATCHES, 1.1 * settings.min_pixels / settings.patch_size**2)
    smaller, middle, top = (
        math.ceil(size / _ROUNDED_TO) * _ROUNDED_TO for size in (smallest, math.sqrt(smallest * largest), largest)
    )
    return (*(size for size in (smaller, middle) if size <= top / 2), top)


def bucket_features(patches: int, settings: VisionConfig) -> int:
    """Rows that hold the features of every image of so many patches, however thin."""
    return min(math.ceil(patches / settings.downsample_ratio), most_features(settings))


def vision_encode(
    config: ModelConfig,
    precision: str,
    vision: Vision,
    features: Array,
    patches: Array,
    grid: Array,
    rows: Array,
) -> Array:
    """The program of a size class: `features` with those of one image written into it.

    Args:
        features: [num_rows, hidden], to be donated.
        patches: float32 [patches of the class, 3 · patch²]; see `vision_tower`.
        grid: rows and columns of patches, int32 [2].
        rows: where each feature goes; outside 0 … num_rows − 1 those that the image has not. int32 [features of the
            class].
    """
    policy = precision_policy(config, precision)
    vit = vision_tower(vision, patches, grid[0], grid[1], config.vision, policy)
    made = align(vision, vit, grid[0], grid[1], rows.shape[0], config.vision, policy)
    return features.at[rows].set(made, mode="drop")


def vision_inputs(patches: int, settings: VisionConfig) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The inputs of a size class's program for an image: patches, grid and rows of `vision_encode`."""
    return (
        jax.ShapeDtypeStruct((patches, 3 * settings.patch_size**2), np.float32),
        jax.ShapeDtypeStruct((2,), np.int32),
        jax.ShapeDtypeStruct((bucket_features(patches, settings),), np.int32),
    )


@functools.lru_cache(maxsize=32)
def compile_vision_encode(
    config: ModelConfig, precision: str, vision: AbstractTree, features: AbstractTree, inputs: AbstractTree
) -> Any:
    """The compiled `vision_encode`, which takes (vision, features, *inputs) and donates the features.

    Engines of one process share programs, as those of `compiled_programs.compile_step`.
    """
    logger.info("compiling the vision program of %d patches", inputs.leaves[0].shape[0])
    encode = functools.partial(vision_encode, config, precision)
    program = jax.jit(encode, donate_argnums=1, out_shardings=features.leaves[0].sharding)
    return program.lower(vision.tree(), features.tree(), *inputs.tree()).compile()


class VisionEncoder:
    """Encodes images into one array of features, on every device of the mesh.

    Encoding happens on the device in the order of the calls, and of the steps launched between them: a row may be
    overwritten as soon as the last step that reads it is launched.

    Arguments:
        vision: vision tower, placed as the mesh asks.
        num_rows: of the features; at least `most_features`, so that every image fits.
        mesh: what `vision` lies on.

    Attributes:
        num_rows: as given.
        features: the array as the last call leaves it, [num_rows, hidden] in the precision's activation type; each
            call of `encode` ends the life of the one before.

    Raises ValueError if num_rows is too small.
    """

    def __init__(
        self, vision: Vision, config: ModelConfig, *, precision: str, num_rows: int, mesh: Mesh | None = None
    ) -> None:
        if num_rows < most_features(config.vision):
            raise ValueError(
                f"{num_rows} rows of image features do not hold one image of vision_config.max_image_tokens = "
                f"{config.vision.max_image_tokens}, which may have {most_features(config.vision)}"
            )
        self.num_rows = num_rows
        self._vision = vision
        self._config = config
        self._precision = precision
        self._placement = None if mesh is None else NamedSharding(mesh, PartitionSpec())
        self._buckets = patch_buckets(config.vision)
        self._programs: dict[int, Any] = {}
        self.features: Array
        self.reset()

    @property
    def compile_count(self) -> int:
        """How many programs there are; `warm_up` makes all, `encode` never one."""
        return len(self._programs)

    def warm_up(self) -> None:
        """Compiles every program ahead of time; nothing is run."""
        vision, features = abstract_tree(self._vision), abstract_tree(self.features)

        def compiled(patches: int) -> Any:
            described = vision_inputs(patches, self._config.vision)
            inputs = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._placement) for x in described)
            return compile_vision_encode(self._config, self._precision, vision, features, abstract_tree(inputs))

        with ThreadPoolExecutor(min(len(self._buckets), os.cpu_count() or 1)) as pool:
            self._programs = dict(zip(self._buckets, pool.map(compiled, self._buckets), strict=True))

    def encode(
        self, patches: npt.NDArray[np.float32], vit_height: int, vit_width: int, rows: npt.NDArray[np.int32]
    ) -> None:
        """Launches the encoding of an image into some rows of the features.

        Args:
            patches: float32 [vit_height · vit_width, 3 · patch²], as `ProcessedImage.patches` makes them.
            vit_height, vit_width: its grid.
            rows: where its features go, in reading order, each row once.

        Raises:
            ValueError: patches or rows of another number, a row out of range.
            RuntimeError: no program was compiled for so many patches.
        """
        settings = self._config.vision
        wanted = (vit_height * vit_width, 3 * settings.patch_size**2)
        if patches.shape != wanted:
            raise ValueError(
                f"patches of a grid of {vit_height} x {vit_width} have shape {list(patches.shape)}, expected "
                f"{list(wanted)}"
            )
        if rows.shape != (count := (feature_count(vit_height, vit_width, settings),)):
            raise ValueError(f"rows has shape {list(rows.shape)}, but the image has {count[0]} features")
        if rows.min() < 0 or rows.max() >= self.num_rows:
            raise ValueError(f"rows {rows.min()} … {rows.max()} are not all in 0 … {self.num_rows - 1}")
        bucket = self.bucket(len(patches))
        room = np.zeros((bucket, wanted[1]), np.float32)
        room[: len(patches)] = patches
        feature_rows = np.full(bucket_features(bucket, settings), self.num_rows, np.int32)
        feature_rows[: len(rows)] = rows
        inputs = (room, np.asarray([vit_height, vit_width], np.int32), feature_rows)
        features = self.features
        self.features = self._programs[bucket](self._vision, features, *jax.device_put(inputs, self._placement))

    def bucket(self, patches: int) -> int:
        """Patches of the smallest program for so many; RuntimeError if none was compiled."""
        bucket = next((bucket for bucket in self._programs if bucket >= patches), None)
        if bucket is None:
            known = ", ".join(map(str, self._programs)) or "none"
            raise RuntimeError(f"no vision program was compiled for {patches} patches; there are: {known}")
        return bucket

    def reset(self) -> None:
        """Empties the features, after a call that failed too: it may have taken them with it."""
        dtype = precision_policy(self._config, self._precision).dtype
        self.features = jnp.zeros((self.num_rows, self._config.text.hidden_size), dtype, device=self._placement)

    def close(self) -> None:
        """Frees parameters, features and programs; what was launched still runs. May be called again."""
        for name in ("_vision", "features"):
            self.__dict__.pop(name, None)
        self._programs.clear()
