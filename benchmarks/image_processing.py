"""Images per second on the host, by tokens: decoding, fitting and hashing, and making patches of the pixels.

The images are noise on a gradient, stored as JPEG and as PNG, as large as their canvas; the last is a camera's. One
thread.
"""

import argparse
import io
import time
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
from PIL import Image

from deepinfer_jax.tokenization import ImageProcessor, open_image

RELEASED = SimpleNamespace(
    patch_size=14, downsample_ratio=3, max_image_tokens=1024, min_pixels=544 * 544, max_wh_ratio=None
)
SIZES = [(546, 546), (798, 840), (1512, 1134), (4000, 3000)]


def rate(function: Callable[[], object], rounds: int) -> float:
    """Calls per second, from the best round."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return 1 / min(times)


def picture(width: int, height: int, kind: str) -> bytes:
    shade = np.linspace(0, 200, width)[None, :, None] + np.random.default_rng(0).integers(0, 32, (height, width, 3))
    out = io.BytesIO()
    Image.fromarray(shade.astype(np.uint8)).save(out, kind)
    return out.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="a few seconds, to see that it runs")
    smoke: bool = parser.parse_args().smoke
    sizes, rounds = (SIZES[:1], 1) if smoke else (SIZES, 5)
    processor = ImageProcessor(RELEASED)
    print("tokens  file         pixels    open only    open, fit, hash    patches of it    all, images/s")
    for width, height in sizes:
        for kind in ("JPEG", "PNG"):
            file = picture(width, height, kind)
            image = processor.process(file)
            rates = [
                rate(lambda: open_image(file), rounds),  # noqa: B023
                rate(lambda: processor.process(file), rounds),  # noqa: B023
                rate(image.patches, rounds),
                rate(lambda: processor.patches(file), rounds),  # noqa: B023
            ]
            print(f"{image.layout.tokens:6}  {kind:4}  {f'{width} x {height}':>13}  {rates[0]:11.0f}", end="")
            print(f"  {rates[1]:17.0f}  {rates[2]:15.0f}  {rates[3]:16.0f}")


if __name__ == "__main__":
    main()
