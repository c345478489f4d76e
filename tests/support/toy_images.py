"""The toy model with images: their ids are part of the history that every distribution depends on."""

import dataclasses
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from deepinfer_jax.engine.args import EngineArgs
from deepinfer_jax.engine.llm_engine import LLMEngine
from deepinfer_jax.engine.loading import EngineParts, TokenParts
from deepinfer_jax.tokenization import MultimodalProcessor
from tests.support.toy import IMAGE, VOCAB, ToyTokenizer, toy_parts

RULES = SimpleNamespace(patch_size=4, downsample_ratio=1, max_image_tokens=20, min_pixels=0, max_wh_ratio=None)
TOKENS = {(4, 4): 4, (8, 4): 5, (4, 8): 6, (8, 12): 11}
"""By (width, height): one patch is one cell."""


def toy_image(size: tuple[int, int] = (4, 4), shade: int = 0) -> np.ndarray:
    return np.full((size[1], size[0], 3), shade, np.uint8)


def expanded(size: tuple[int, int] = (4, 4)) -> list[int]:
    """The ids that stand for an image of this size."""
    return [VOCAB + 2] + [VOCAB + 1] * (TOKENS[size] - 1)


class ImageTokenizer(ToyTokenizer):
    """Of the toy, and the id IMAGE is `<image>`."""

    def encode(self, text: str) -> list[int]:
        return super().encode(text.replace("<image>", chr(48 + IMAGE)))

    def get_vocab(self) -> dict[str, int]:
        return {"<image>": IMAGE}

    def convert_ids_to_tokens(self, token: int) -> str:
        return "<image>" if token == IMAGE else chr(48 + token)


class HeldProcessor(MultimodalProcessor):
    """Opens images once it may."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.may, self.num_begun = threading.Event(), 0
        self.may.set()

    def overwrite_prompt(self, *arguments: Any) -> Any:
        self.num_begun += 1
        assert self.may.wait(60)
        return super().overwrite_prompt(*arguments)


def image_parts(args: EngineArgs, tokenizer: Any = None) -> EngineParts:
    """Stands in for `load_parts`."""
    names = ImageTokenizer()
    tokenizer = tokenizer or names
    processor = HeldProcessor(
        RULES, names, image_token_id=IMAGE, vocab_size=VOCAB, on_image_mismatch=args.on_image_mismatch
    )
    return dataclasses.replace(toy_parts(args), tokens=TokenParts(tokenizer, IMAGE, processor))


def image_engine(*, tokenizer: Any = None, **kwargs: Any) -> LLMEngine:
    defaults = {"model": "toy", "disable_log_stats": True, "max_num_seqs": 6, "tokens_per_block": 4}
    with mock.patch("deepinfer_jax.engine.llm_engine.load_parts", partial(image_parts, tokenizer=tokenizer)):
        return LLMEngine(EngineArgs(**(defaults | kwargs)))
