"""`vision_config`s for tests of images: plain objects with its fields."""

from types import SimpleNamespace


def rules(**changes):
    """The released ones (DB §4.8), with `changes`."""
    released = {
        "patch_size": 14,
        "downsample_ratio": 3,
        "max_image_tokens": 1024,
        "min_pixels": 544 * 544,
        "max_wh_ratio": None,
    }
    return SimpleNamespace(**released | changes)
