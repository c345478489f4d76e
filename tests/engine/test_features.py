"""Rows of image features against a brute-force twin, and what a prefill step gets of its images."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax.engine.images.features import FeatureCache, FeatureRows
from deepinfer_jax.engine.requests.request import Request
from deepinfer_jax.engine.requests.sampling_params import SamplingParams
from deepinfer_jax.model.embedding import END_PLACE, NEWLINE_PLACE, START_PLACE, TEXT_PLACE
from deepinfer_jax.tokenization import ImageInput, ImageLayout, ImagePrompt, ProcessedImage, TextLengthInput

pytestmark = pytest.mark.pure

SIZES = {bytes([number]): number + 1 for number in range(6)}
steps = st.lists(st.lists(st.sampled_from(sorted(SIZES)), unique=True), max_size=40)


@given(steps, st.integers(6, 24))
def test_rows_are_those_of_a_twin_that_keeps_images_in_order_of_use(steps: list[list[bytes]], num_rows: int) -> None:
    """The twin knows no rows: it keeps a list of images, and drops from its front what the step does not want."""
    rows, twin, written = FeatureRows(num_rows), list[bytes](), np.full(num_rows, -1)
    encoded = reused = 0
    for number, step in enumerate(steps):
        wanted = {digest: SIZES[digest] for digest in step}
        if sum(wanted.values()) > num_rows:
            with pytest.raises(RuntimeError, match="a step needs"):
                rows.take(wanted)
            continue
        new = [digest for digest in step if digest not in twin]
        encoded, reused = encoded + len(new), reused + len(step) - len(new)
        twin = [digest for digest in twin if digest not in step] + [d for d in step if d in twin] + new
        while sum(SIZES[digest] for digest in twin) > num_rows:
            assert twin.pop(0) not in step
        given, to_fill = rows.take(wanted)
        assert to_fill == new
        for digest in to_fill:  # as the device does
            written[given[digest]] = digest[0]
        for digest in step:
            assert len(given[digest]) == SIZES[digest] and (written[given[digest]] == digest[0]).all(), number
    assert (rows.num_encoded, rows.num_reused) == (encoded, reused)


class Encoder:
    """Notes what is to be encoded."""

    num_rows = 40

    def __init__(self) -> None:
        self.features = object()
        self.encoded: list[tuple[int, list[int]]] = []

    def encode(self, patches: np.ndarray, height: int, width: int, rows: np.ndarray) -> None:
        assert len(patches) == height * width
        self.encoded.append((len(patches), rows.tolist()))
        self.features = object()


def image_input(start: int, height: int, width: int, digest: bytes) -> ImageInput:
    """Of so many patches of one pixel, in cells of 2 x 2."""
    rows, columns = -(-height // 2), -(-width // 2)
    layout = ImageLayout(rows, columns, width, height, height, width, rows * (columns + 1) + 2)
    image = ProcessedImage(layout, np.zeros((height, width, 3), np.uint8), digest)
    return ImageInput(width, height, start, start + layout.tokens, image)


def prefill(*chunks: tuple[Request, int, int], time: int = 24) -> SimpleNamespace:
    """A prefill step of (request, start, tokens)."""
    requests, starts, counts = zip(*chunks, strict=True)
    return SimpleNamespace(
        sequences=[SimpleNamespace(request=request) for request in requests],
        starts=np.asarray(starts, np.int32),
        num_new_tokens=np.asarray(counts, np.int32),
        tokens=np.zeros((len(chunks), time), np.int32),
    )


def test_a_step_is_told_the_place_of_each_token_and_encodes_what_it_needs() -> None:
    text = Request(SamplingParams(), 0)
    # Two adjacent images: 2 x 3 cells at 2 … 11, 1 x 1 at 12 … 15; then text.
    first, second = image_input(2, 3, 6, b"a"), image_input(12, 2, 1, b"b")
    segments = (TextLengthInput(2), first, TextLengthInput(0), second, TextLengthInput(4))
    nothing = np.zeros(20, np.int32)
    both = Request(SamplingParams(), 0, image_prompt=ImagePrompt(nothing, nothing, segments))
    other = Request(
        SamplingParams(), 0, image_prompt=ImagePrompt(nothing[:16], nothing[:16], (image_input(0, 2, 1, b"b"),))
    )
    encoder = Encoder()
    cache = FeatureCache(encoder)  # type: ignore[arg-type]

    def places(*chunks: tuple[Request, int, int]) -> list[list[int]]:
        found, features = cache.for_step(prefill(*chunks))
        assert found.dtype == np.int32 and found.shape == (len(chunks), 24) and features is encoder.features
        return [row[:count].tolist() for row, (_, _, count) in zip(found, chunks, strict=True)]

    t, s, n, e = TEXT_PLACE, START_PLACE, NEWLINE_PLACE, END_PLACE
    assert places((text, 0, 5)) == [[t] * 5] and encoder.encoded == []
    # Up to the first delimiter nothing need be encoded.
    assert places((both, 0, 3)) == [[t, t, s]] and encoder.encoded == []
    (whole,) = places((both, 0, 20))
    (size_a, a), (size_b, b) = encoder.encoded
    assert (size_a, size_b) == (18, 2) and len({*a, *b}) == 7
    assert whole == [t, t, s, *a[:3], n, *a[3:], n, e, s, *b, n, e, t, t, t, t]
    for start in range(20):  # cut anywhere, and behind the prompt there is output
        for stop in range(start + 1, 23):
            assert places((both, start, stop - start)) == [(whole + [t] * 3)[start:stop]]
    assert places((text, 3, 2), (other, 0, 4), (both, 13, 2)) == [[t, t], [s, *b, n, e][:4], [*b, n]]
    assert len(encoder.encoded) == 2 and cache.rows.num_encoded == 2
    for prompt_of_failed in (None, other.image_prompt, other.image_prompt):  # which is `second` too
        cache.forget(prompt_of_failed)
    assert places((both, 0, 20)) == [whole]  # in the rows that it gave back
    assert encoder.encoded[2:] == [(size_b, b)] and cache.rows.num_encoded == 3
