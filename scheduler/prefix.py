"""Keys of blocks: two blocks with the same key hold the same state."""

import hashlib
from collections.abc import Iterable

from .sequence import ImageContent, Sequence


def block_key(sequence: Sequence, index: int, tokens_per_block: int) -> bytes:
    """The key of the sequence's block `index`, whose tokens must all be known.

    SHA-256 of all that the state of these tokens depends on: the key of the block before, the token ids, and the
    images that have a token in the block, with their position. The keys up to it are kept with the sequence, so each
    is computed once.
    """
    keys = sequence.block_keys
    while len(keys) <= index:
        start = len(keys) * tokens_per_block
        block = hashlib.sha256(keys[-1] if keys else b"")
        block.update(sequence.token_ids(start, tokens_per_block).tobytes())
        for image in _within(sequence.images, start, start + tokens_per_block):
            # Lengths first: no two lists of images give the same bytes.
            block.update(image.start.to_bytes(8, "little") + len(image.digest).to_bytes(8, "little") + image.digest)
        keys.append(block.digest())
    return keys[index]


def _within(images: Iterable[ImageContent], start: int, stop: int) -> list[ImageContent]:
    return [image for image in images if image.start < stop and image.stop > start]
