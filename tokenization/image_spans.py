"""Finds the images among a prompt's ids, in any of the spellings that a prompt may use (DB §4.2)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .image_tokens import ImageTokenOffset

Span = tuple[int, int]
"""(start, stop) in the ids as given: one placeholder, or all positions of an image that is expanded already."""


def find_spans(
    ids: npt.NDArray[np.int32], counts: Sequence[int], *, image_token_id: int, vocab_size: int
) -> list[Span]:
    """The span of each image in `ids`, in order.

    Three spellings: one `image_token_id` for each image; `image_token_id` repeated for all its positions, as in
    the released code; IMAGE and then IMAGE_PADs beyond the vocabulary, as in DeepInfer. Two images side by side
    may share a run.

    Args:
        ids: int32 [n].
        counts: positions of each image, all at least 4.

    Raises:
        ValueError: the prompt has more or fewer images than `counts`, or of other lengths.
    """
    sentinels = _find_sentinels(ids, vocab_size)
    placeholders = np.flatnonzero(ids == image_token_id).tolist()
    if sentinels and placeholders:
        raise ValueError(
            f"the prompt has single placeholders (id {image_token_id}, {len(placeholders)} of them) and expanded "
            f"images (id {vocab_size + ImageTokenOffset.IMAGE}, {len(sentinels)} of them): use one spelling"
        )
    if sentinels:
        _refuse_other_lengths([stop - start for start, stop in sentinels], counts)
        return sentinels
    if len(placeholders) == len(counts):
        return [(at, at + 1) for at in placeholders]
    return _split_runs(_runs(placeholders), counts)


def _find_sentinels(ids: npt.NDArray[np.int32], vocab_size: int) -> list[Span]:
    """The spans spelled IMAGE, IMAGE_PAD, …"""
    offsets = ids.astype(np.int64) - vocab_size
    found = np.flatnonzero((offsets >= 0) & (offsets < ImageTokenOffset.NUM_SPECIAL)).tolist()
    spans: list[Span] = []
    for at in found:
        if offsets[at] == ImageTokenOffset.IMAGE:
            spans.append((at, at + 1))
        elif offsets[at] == ImageTokenOffset.IMAGE_PAD and spans and spans[-1][1] == at:
            spans[-1] = (spans[-1][0], at + 1)
        else:
            raise ValueError(
                f"the id {ids[at]} at position {at} of the prompt is no part of an image: an expanded image is one "
                f"{vocab_size + ImageTokenOffset.IMAGE}, then {vocab_size + ImageTokenOffset.IMAGE_PAD}s"
            )
    return spans


def _runs(positions: list[int]) -> list[Span]:
    """Neighbouring positions as one span each."""
    runs: list[Span] = []
    for at in positions:
        if runs and runs[-1][1] == at:
            runs[-1] = (runs[-1][0], at + 1)
        else:
            runs.append((at, at + 1))
    return runs


def _split_runs(runs: list[Span], counts: Sequence[int]) -> list[Span]:
    """Cuts runs into images of `counts` positions, in order; each run must be used up by whole images."""
    spans: list[Span] = []
    for start, stop in runs:
        while start < stop and len(spans) < len(counts):
            spans.append((start, start + counts[len(spans)]))
            start = spans[-1][1]
        if start != stop:
            _refuse_other_lengths([stop - start for start, stop in runs], counts)
    if len(spans) != len(counts):
        _refuse_other_lengths([stop - start for start, stop in runs], counts)
    return spans


def _refuse_other_lengths(lengths: list[int], counts: Sequence[int]) -> None:
    """Raises ValueError if a prompt's runs are not as long as its images."""
    if lengths == list(counts):
        return
    raise ValueError(
        f"the prompt has {len(lengths)} runs of image tokens ({sum(lengths)} tokens: {_listed(lengths)}), but "
        f"{len(counts)} images came with it (which take {_listed(counts)} tokens): write one placeholder for each "
        "image, or as many tokens as it takes"
    )


def _listed(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8])) or "none"
    return shown + (", …" if len(numbers) > 8 else "")
