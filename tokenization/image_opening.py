"""Opens an image from a file, URL, bytes or object as upright RGB pixels, or raises `ImageError`."""

from __future__ import annotations

import base64
import contextlib
import io
import os
import threading
import urllib.parse
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image

ImageSource = bytes | bytearray | memoryview | str | os.PathLike[str] | Image.Image | npt.NDArray[Any]
"""Encoded bytes, a path, a `data:` URL, a Pillow image, or uint8/uint16 [height, width] or [height, width, 1|3|4]."""

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""What encoded images may be. Others of Pillow's are left out: some of them start programs (EPS)."""

MAX_PIXELS = 89_478_485
"""Larger encoded images are refused before they are decoded; a quarter of a GB as RGB, as Pillow's own limit."""

_KINDS = (bytes, bytearray, memoryview, str, os.PathLike, Image.Image, np.ndarray)
_DECODING = threading.Lock()
"""Held while a caller's Pillow image is decoded: that is lazy, and two requests may hold the same one."""

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class ImageError(ValueError):
    """An image that cannot be used; the message says which, why, and what to do."""


def check_source(source: object) -> None:
    """Raises TypeError unless `source` is of a type of ImageSource."""
    if not isinstance(source, _KINDS):
        raise TypeError(
            "an image is given as bytes, path, data URL, Pillow image or NumPy array, not as "
            f"{type(source).__module__}.{type(source).__qualname__}"
        )


def open_image(source: ImageSource) -> Image.Image:
    """Decodes an image to an upright Pillow image of mode RGB. `source` is not changed.

    Of several frames the first is taken. Transparency is dropped, as in the released code: the colour below it
    shows. 16-bit samples keep their high byte. The EXIF orientation is obeyed, which DeepInfer does not do (DB §4.4).

    Raises:
        ImageError: not an image, damaged, truncated, of more than MAX_PIXELS, in another format than FORMATS, or
            with samples whose range nobody knows (32-bit integers, floats).
        TypeError: `source` is none of ImageSource.
    """
    check_source(source)
    if isinstance(source, np.ndarray):
        return _from_array(source)
    if isinstance(source, Image.Image):
        return _upright_rgb(source, _DECODING)
    encoded = _encoded_bytes(source)
    try:
        image = Image.open(io.BytesIO(encoded), formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageError(f"the image is too large to be decoded safely ({error}): scale it down") from error
    except Exception as error:  # of damaged files Pillow's readers raise nearly anything
        raise ImageError(
            f"{len(encoded)} bytes are not an image that can be read; expected one of {', '.join(FORMATS)}"
        ) from error
    if image.width * image.height > MAX_PIXELS:
        raise ImageError(
            f"the image has {image.width} x {image.height} pixels, more than {MAX_PIXELS} in all: scale it down"
        )
    return _upright_rgb(image, contextlib.nullcontext())


def _encoded_bytes(source: bytes | bytearray | memoryview | str | os.PathLike[str]) -> bytes:
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source)
    if isinstance(source, str) and source[:5].lower() == "data:":
        return _data_url_bytes(source)
    if isinstance(source, str) and source[:8].lower().startswith(("http://", "https://")):
        raise ImageError(f"nothing is downloaded: pass the bytes of {source[:200]} instead of its address")
    try:
        return Path(source).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte
        raise ImageError(f"the image file {str(source)[:200]!r} cannot be read: {error}") from error


def _data_url_bytes(url: str) -> bytes:
    """RFC 2397: `data:[type][;parameters][;base64],data`."""
    header, comma, data = url.partition(",")
    if not comma:
        raise ImageError("the data URL has no comma between its type and its data")
    encoded = urllib.parse.unquote_to_bytes(data)
    if not header.lower().endswith(";base64"):
        return encoded
    try:
        return base64.b64decode(b"".join(encoded.split()), validate=True)
    except ValueError as error:
        raise ImageError(f"the data URL says that it is base64, but it is not: {error}") from error


def _from_array(array: npt.NDArray[Any]) -> Image.Image:
    channels = array.shape[2] if array.ndim == 3 else 1
    if array.ndim not in (2, 3) or channels not in (1, 3, 4) or array.dtype not in (np.uint8, np.uint16):
        raise ImageError(
            f"an image array is uint8 or uint16, [height, width] or [height, width, 1, 3 or 4]; got {array.dtype} "
            f"{list(array.shape)}"
        )
    if 0 in array.shape:
        raise ImageError(f"the image array {list(array.shape)} has no pixels")
    samples = _high_byte(array) if array.dtype == np.uint16 else array
    if channels == 1:
        samples = np.repeat(samples.reshape(*array.shape[:2], 1), 3, axis=2)
    return Image.fromarray(np.ascontiguousarray(samples[..., :3]), "RGB")


def _upright_rgb(image: Image.Image, decoding: AbstractContextManager[Any]) -> Image.Image:
    if image.mode in ("I", "F"):
        raise ImageError(
            f"the image has 32-bit samples (Pillow mode {image.mode}), whose range is not known: scale them to 8 bits"
        )
    try:
        with decoding:
            image.load()
            turn = _TURNS.get(_orientation(image))
        # Pillow would clip the samples of I;16 instead of scaling them.
        deep = image.mode.startswith("I;16")
        rgb = _from_array(np.asarray(image).astype(np.uint16)) if deep else image.convert("RGB")
        upright = rgb if turn is None else rgb.transpose(turn)
        upright.info = {}  # nor is it turned again when it is opened once more
    except ImageError:
        raise
    except Exception as error:  # of damaged files Pillow's readers raise nearly anything
        raise ImageError(f"the image cannot be decoded: {error}") from error
    if 0 in upright.size:
        raise ImageError(f"the image has no pixels: its size is {upright.width} x {upright.height}")
    return upright


def _orientation(image: Image.Image) -> Any:
    """The EXIF orientation. Pixels are worth having without it, so none is read from damaged EXIF data."""
    try:
        return image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # as above
        return None


def _high_byte(samples: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return (samples >> 8).astype(np.uint8)
