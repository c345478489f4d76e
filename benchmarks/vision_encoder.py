"""Images per second through the vision tower and the aligner, by tokens, and how near that is to plain products.

The time of an image is compared with that of one float32 matrix product, measured in the same run, of as many
operations as the image needs without padding and masks. Weights are random; the tower is the released one with width,
MLP, heads, layers and hidden size divided by --scale (8 by default, which a small CPU runs in half a minute). There
attention takes most of the operations, which in the released size takes about half.
"""

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from deepinfer_jax import init_params
from deepinfer_jax.checkpoint.tiny_config import TINY
from deepinfer_jax.config.model_config import ModelConfig, VisionConfig, parse_config
from deepinfer_jax.runtime.vision_encoder import VisionEncoder, most_features
from deepinfer_jax.tokenization import ImageLayout, ImageProcessor
from deepinfer_jax.weights.params import Vision

SIZES = [(546, 546), (798, 840), (1512, 1134)]
PRODUCT = 2048


def scaled_config(scale: int) -> ModelConfig:
    """The released vision section, with all that makes it wide or deep divided by `scale`."""
    vision = VisionConfig(
        num_hidden_layers=32 // scale,
        hidden_size=1024 // scale,
        num_attention_heads=16 // scale,
        intermediate_size=2816 // scale,
        patch_size=14,
        rope_theta=10000.0,
        downsample_ratio=3,
        max_image_tokens=1024,
        min_pixels=544 * 544,
        max_wh_ratio=None,
    )
    tiny = parse_config(TINY)
    return dataclasses.replace(tiny, vision=vision, text=dataclasses.replace(tiny.text, hidden_size=5120 // scale))


def random_vision(config: ModelConfig, precision: str) -> Vision:
    draw = functools.partial(init_params, config, precision=precision, platform=jax.default_backend())
    shapes, rng = jax.eval_shape(draw, jax.random.key(0)).vision, np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape, np.float32) / 32, x.dtype), shapes)


def operations(layout: ImageLayout, config: ModelConfig) -> int:
    """Multiplications and additions of one image."""
    vision, hidden = config.vision, config.text.hidden_size
    patches, features = layout.vit_height * layout.vit_width, layout.llm_height * layout.llm_width
    width = vision.hidden_size
    block = 4 * width**2 + 3 * width * vision.intermediate_size + 2 * patches * width
    tower = patches * (3 * vision.patch_size**2 * width + vision.num_hidden_layers * block)
    return 2 * (tower + features * hidden * (width * vision.downsample_ratio**2 + hidden))


def seconds(function: Callable[[], object], rounds: int) -> float:
    """Of the best round; a first one is not counted."""
    times = []
    for _ in range(1 + rounds):
        start = time.perf_counter()
        jax.block_until_ready(function())
        times.append(time.perf_counter() - start)
    return min(times[1:])


def encoded(
    encoder: VisionEncoder, patches: npt.NDArray[np.float32], grid: tuple[int, int], rows: npt.NDArray[np.int32]
) -> jax.Array:
    encoder.encode(patches, *grid, rows)
    return encoder.features


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--scale", type=int, default=8, choices=(1, 2, 4, 8, 16))
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--smoke", action="store_true", help="a few seconds, to see that it runs")
    options = parser.parse_args()
    if options.smoke:
        options.scale = 16
    sizes, side, rounds = (SIZES[:1], 256, 1) if options.smoke else (SIZES, PRODUCT, 3)
    config = scaled_config(options.scale)
    encoder = VisionEncoder(
        random_vision(config, options.precision),
        config,
        precision=options.precision,
        num_rows=most_features(config.vision),
    )
    encoder.warm_up()
    square = jnp.asarray(np.random.default_rng(0).standard_normal((side, side), np.float32))
    product = jax.jit(functools.partial(jnp.matmul, precision="highest"))
    rate = 2 * side**3 / seconds(lambda: product(square, square), rounds)
    print(
        f"{jax.devices()[0].device_kind}, tower / {options.scale}, {options.precision}; products {rate / 1e9:.0f} Gop/s"
    )
    print("tokens  patches  padded to     Gop  images/s  time / that of products")
    rng, processor = np.random.default_rng(0), ImageProcessor(config.vision)
    for width, height in sizes:
        layout = processor.layout(width, height)
        grid = layout.vit_height, layout.vit_width
        patches = rng.uniform(-1, 1, (grid[0] * grid[1], 3 * config.vision.patch_size**2)).astype(np.float32)
        rows = np.arange(layout.llm_height * layout.llm_width, dtype=np.int32)
        encode = functools.partial(encoded, encoder, patches, grid, rows)
        taken, needed = seconds(encode, rounds), operations(layout, config)
        padded = encoder.bucket(len(patches))
        print(f"{layout.tokens:6}  {len(patches):7}  {padded:9}  {needed / 1e9:6.1f}  {1 / taken:8.2f}", end="")
        print(f"  {taken / (needed / rate):23.2f}")


if __name__ == "__main__":
    main()
