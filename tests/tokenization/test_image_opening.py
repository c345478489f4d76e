"""Images from anywhere: the same pixels from every kind of source, and one error for everything else."""

import base64
import io
import urllib.parse
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

from deepinfer_jax.tokenization import ImageError, open_image

pytestmark = pytest.mark.pure

RGB = np.random.default_rng(0).integers(0, 256, (13, 17, 3), np.uint8)
LOSSLESS = {"PNG": {}, "WEBP": {"lossless": True}, "BMP": {}, "TIFF": {}}


def encoded(image, kind="PNG", **options):
    """The bytes of a file of `image`, an array or a Pillow image."""
    out = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(out, kind, **options)
    return out.getvalue()


def pixels(source):
    image = open_image(source)
    assert image.mode == "RGB"
    return np.asarray(image)


def test_every_kind_of_source_gives_the_same_pixels(tmp_path):
    png = encoded(RGB)
    path = tmp_path / "an image.png"
    path.write_bytes(png)
    base = base64.b64encode(png).decode()
    sources = [
        png,
        bytearray(png),
        memoryview(png),
        path,
        str(path),
        Image.fromarray(RGB),
        RGB,
        RGB[:, ::-1][:, ::-1],
        np.dstack([RGB, RGB[..., 0]]),
        RGB.astype(np.uint16) << 8,
        f"data:image/png;base64,{base}",
        f"DATA:;BASE64,{base[:40]}\n {base[40:]}",
        f"data:image/png,{urllib.parse.quote(png)}",
    ]
    for source in sources:
        np.testing.assert_array_equal(pixels(source), RGB)


@pytest.mark.parametrize("kind", LOSSLESS)
def test_lossless_formats_give_back_their_pixels(kind):
    np.testing.assert_array_equal(pixels(encoded(RGB, kind, **LOSSLESS[kind])), RGB)


def test_jpeg_is_decoded_as_pillow_does():
    jpeg = encoded(RGB, "JPEG", quality=80)
    np.testing.assert_array_equal(pixels(jpeg), np.asarray(Image.open(io.BytesIO(jpeg)).convert("RGB")))


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
@pytest.mark.parametrize("mode", ["1", "L", "P"])
def test_grey_and_palettes_become_rgb(mode, kind):
    image = Image.fromarray(RGB).convert(mode)
    np.testing.assert_array_equal(pixels(encoded(image, kind)), np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_transparency_is_dropped_and_the_colour_below_it_shows(mode):
    opaque = Image.fromarray(RGB).convert(mode)
    clear = opaque.copy()
    clear.putalpha(0)
    expected = np.asarray(opaque.convert("RGB"))
    np.testing.assert_array_equal(pixels(encoded(clear)), expected)
    np.testing.assert_array_equal(pixels(clear), expected)


def test_a_transparent_colour_of_a_palette_keeps_its_colour():
    palette = Image.fromarray(RGB).quantize(16)
    gif = encoded(palette, "GIF", transparency=3)
    np.testing.assert_array_equal(pixels(gif), np.asarray(palette.convert("RGB")))


def test_cmyk_becomes_rgb():
    cmyk = Image.fromarray(RGB).convert("CMYK")
    np.testing.assert_array_equal(pixels(encoded(cmyk, "TIFF")), RGB)
    jpeg = encoded(cmyk, "JPEG", quality=100, subsampling=0)
    assert Image.open(io.BytesIO(jpeg)).mode == "CMYK"
    assert np.abs(pixels(jpeg).astype(int) - RGB).max() < 12  # JPEG is lossy


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bits_keep_their_high_byte(kind):
    grey = np.arange(0, 65536, 257, np.uint16).reshape(16, 16)
    expected = np.repeat((grey >> 8).astype(np.uint8)[..., None], 3, axis=2)
    file = encoded(Image.fromarray(grey), kind)
    assert Image.open(io.BytesIO(file)).mode == "I;16"
    for source in (file, grey, grey[..., None], Image.fromarray(grey)):
        np.testing.assert_array_equal(pixels(source), expected)
    big_endian = Image.frombytes("I;16B", (16, 16), grey.astype(">u2").tobytes())
    np.testing.assert_array_equal(pixels(big_endian), expected)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_an_animation_shows_its_first_frame(kind):
    frames = [Image.fromarray(np.full((8, 8, 3), shade, np.uint8)) for shade in (0, 255)]
    file = encoded(frames[0], kind, save_all=True, append_images=frames[1:], **LOSSLESS.get(kind, {}))
    assert Image.open(io.BytesIO(file)).n_frames == 2
    assert pixels(file).max() == 0


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_exif_orientation_is_obeyed_once(kind, orientation):
    # The first row and the first column of the stored image are at these sides of the upright one (TIFF 6.0).
    upright = {
        1: RGB,
        2: RGB[:, ::-1],
        3: RGB[::-1, ::-1],
        4: RGB[::-1],
        5: RGB.transpose(1, 0, 2),
        6: RGB.transpose(1, 0, 2)[:, ::-1],
        7: RGB.transpose(1, 0, 2)[::-1, ::-1],
        8: RGB.transpose(1, 0, 2)[::-1],
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = encoded(RGB, kind, exif=exif, **LOSSLESS[kind])
    image = open_image(file)
    np.testing.assert_array_equal(image, upright)
    np.testing.assert_array_equal(pixels(image), upright)
    given = Image.open(io.BytesIO(file))
    np.testing.assert_array_equal(pixels(given), upright)
    np.testing.assert_array_equal(pixels(given), upright)  # and the caller's image is as it was


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_damaged_exif_data_do_not_cost_the_image():
    np.testing.assert_array_equal(pixels(encoded(RGB, exif=b"Exif\0\0MM\0*\0\0\xff\xff garbage")), RGB)


def png_of(width, height):
    """A PNG whose header promises so many pixels and that holds none of them."""

    def chunk(name, data):
        return len(data).to_bytes(4, "big") + name + data + zlib.crc32(name + data).to_bytes(4, "big")

    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 2, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize("side", [9_460, 20_000, 2**31 - 1])
@pytest.mark.parametrize("action", ["ignore", "error"])
def test_a_decompression_bomb_is_refused_before_it_is_decoded(side, action):
    with warnings.catch_warnings():
        warnings.simplefilter(action)
        with pytest.raises(ImageError, match="scale it down"):
            open_image(png_of(side, side))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_truncated_files_are_refused(kind):
    large = np.random.default_rng(1).integers(0, 256, (64, 64, 3), np.uint8)
    file = encoded(large, kind)
    for share in (0.02, 0.5, 0.9):
        with pytest.raises(ImageError):
            open_image(file[: int(len(file) * share)])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (b"", "0 bytes are not an image that can be read; expected one of PNG, JPEG"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "are not an image"),
        ("no/such/file.png", r"the image file 'no/such/file\.png' cannot be read: .*No such file"),
        ("a\0b", "cannot be read"),
        ("https://example.com/cat.png", r"nothing is downloaded: pass the bytes of https://example\.com/cat\.png"),
        ("data:image/png;base64", "the data URL has no comma"),
        ("data:image/png;base64,a*b", "says that it is base64, but it is not"),
        ("data:image/png;base64,aGVsbG8=", "5 bytes are not an image"),
        (np.zeros((4, 4, 3), np.float32), r"an image array is uint8 or uint16.*got float32 \[4, 4, 3\]"),
        (np.zeros((4, 4, 2), np.uint8), r"got uint8 \[4, 4, 2\]"),
        (np.zeros((4,), np.uint8), r"got uint8 \[4\]"),
        (np.zeros((0, 4, 3), np.uint8), r"the image array \[0, 4, 3\] has no pixels"),
        (Image.new("RGB", (0, 5)), "the image has no pixels: its size is 0 x 5"),
        (Image.new("I", (5, 5)), r"32-bit samples \(Pillow mode I\), whose range is not known"),
        (Image.new("F", (5, 5)), r"32-bit samples \(Pillow mode F\)"),
        (Image.new("La", (5, 5)), "cannot be decoded: conversion from La to L not supported"),
    ],
)
def test_what_is_no_image_says_why(source, message):
    with pytest.raises(ImageError, match=message):
        open_image(source)


def test_a_directory_is_no_image(tmp_path):
    with pytest.raises(ImageError, match="cannot be read"):
        open_image(tmp_path)


def test_another_type_of_source_is_a_type_error():
    with pytest.raises(TypeError, match=r"Pillow image or NumPy array, not as builtins\.int"):
        open_image(7)


def test_random_and_mutated_files_give_images_or_this_error():
    rng = np.random.default_rng(0)
    files = [encoded(RGB, kind) for kind in ("PNG", "JPEG", "WEBP", "GIF")]
    magic = [file[:16] for file in files]
    opened = refused = 0
    for number in range(2000):
        if number % 4 == 0:
            data = magic[number // 4 % 4][: int(rng.integers(17))] + rng.bytes(int(rng.integers(200)))
        else:
            mutated = bytearray(files[number % 4 if number % 8 < 4 else number // 8 % 4])
            for at in rng.integers(0, len(mutated), int(rng.integers(1, 8))):
                mutated[at] = rng.integers(256)
            cut = len(mutated) if rng.random() < 0.7 else int(rng.integers(len(mutated)))
            data = bytes(mutated[:cut])
        try:
            image = open_image(data)
        except ImageError as error:
            assert str(error)
            refused += 1
        else:
            assert image.mode == "RGB" and 0 not in image.size
            opened += 1
    # Both happen often, or the mutations prove nothing.
    assert opened > 200 and refused > 700


def test_threads_may_share_a_pillow_image_that_is_not_decoded_yet():
    noise = np.random.default_rng(0).integers(256, size=(300, 200, 3), dtype=np.uint8)
    for _ in range(5):
        lazy = Image.open(io.BytesIO(encoded(noise)))
        with ThreadPoolExecutor(4) as threads:
            for opened in threads.map(pixels, [lazy] * 4):
                assert np.array_equal(opened, noise)
