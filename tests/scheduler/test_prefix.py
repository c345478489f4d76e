"""The names of blocks: equal exactly when all that the state of their tokens depends on is equal."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax.scheduler import ImageContent, Sequence
from deepinfer_jax.scheduler.prefix import block_key
from tests.support.scheduler_twin import EOS

pytestmark = pytest.mark.pure


def sequence_of(tokens: list[int], images: tuple[ImageContent, ...] = ()) -> Sequence:
    return Sequence(0, "0", np.asarray(tokens, np.int32), 100, EOS, 1000, images=images)


def keys_of(sequence: Sequence, tokens_per_block: int = 2) -> list[bytes]:
    return [block_key(sequence, i, tokens_per_block) for i in range(len(sequence) // tokens_per_block)]


def test_a_key_is_the_sha256_of_the_key_before_and_the_token_ids() -> None:
    first = hashlib.sha256(np.asarray([7, 8], "<i4").tobytes()).digest()
    second = hashlib.sha256(first + np.asarray([-9, 10], "<i4").tobytes()).digest()
    assert keys_of(sequence_of([7, 8, -9, 10, 11])) == [first, second]


@given(*[st.lists(st.integers(0, 1), min_size=1, max_size=8)] * 2, st.sampled_from([1, 2, 3]))
def test_two_blocks_have_the_same_key_exactly_if_they_begin_alike(a: list[int], b: list[int], size: int) -> None:
    keys = [keys_of(sequence_of(tokens), size) for tokens in (a, b)]
    for i, key in enumerate(keys[0]):
        for j, other in enumerate(keys[1]):
            assert (key == other) == (a[: (i + 1) * size] == b[: (j + 1) * size])


def test_prompt_and_output_have_the_same_keys_as_a_prompt_of_both() -> None:
    sequence = sequence_of([1, 2, 3])
    assert len(keys_of(sequence)) == 1
    sequence.append_tokens([4, 5, 6])
    assert keys_of(sequence) == keys_of(sequence_of([1, 2, 3, 4, 5, 6]))


def test_keys_are_computed_as_far_as_they_are_asked_for_and_kept() -> None:
    sequence = sequence_of([1, 2, 3, 4, 5, 6])
    second = block_key(sequence, 1, 2)
    assert sequence.block_keys == [block_key(sequence, 0, 2), second]
    sequence.prompt_token_ids = np.zeros(6, np.int32)
    assert block_key(sequence, 1, 2) is second


def test_an_image_is_in_the_keys_of_its_blocks_and_of_all_behind_them() -> None:
    plain = keys_of(sequence_of([1] * 10))

    def changed(*images: ImageContent) -> list[bool]:
        return [key != other for key, other in zip(keys_of(sequence_of([1] * 10, images)), plain, strict=True)]

    assert changed(ImageContent(3, 4, b"cat")) == [False, True, True, True, True]
    assert changed(ImageContent(4, 6, b"cat")) == [False, False, True, True, True]
    assert changed(ImageContent(8, 9, b"cat")) == [False] * 4 + [True]
    images = [
        (ImageContent(3, 7, b"cat"),),
        (ImageContent(3, 7, b"dog"),),
        (ImageContent(2, 7, b"cat"),),
        (ImageContent(2, 3, b"cat"), ImageContent(3, 7, b"cat")),
        (ImageContent(2, 3, b"cat"), ImageContent(3, 7, b"dog")),
    ]
    # One whose digest spells out the last two.
    images.append((ImageContent(2, 7, b"cat" + (3).to_bytes(8, "little") + b"dog"),))
    assert len({keys_of(sequence_of([1] * 10, some))[1] for some in images}) == len(images)
    # An image that goes on has its say in every block that it reaches: here nothing but it differs.
    first, second = (keys_of(sequence_of([1] * 10, (ImageContent(0, stop, b"cat"),))) for stop in (2, 4))
    assert first[0] == second[0] and first[1] != second[1]
