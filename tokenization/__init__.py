"""Text and images -> int32 ids and roles, and back; what models derive from ids (model.md §7, DB §3–4). No jax.

- loading: a tokenizer from a folder, by release_policy (rules and repairs) and text_guard (refused text), against
  raw_tokenizer.
- multimodal_processor: a prompt with images to ids. image_spans finds the images among ids, image_layout counts their
  tokens, image_opening reads files, image_processor makes patches, image_tokens has the constants.
- compressed_vocabulary, engram_hash: Engram's ids and rows.
"""

from .compressed_vocabulary import (
    CompressedTokenizer,
    CompressedVocabulary,
    compress_vocabulary,
    encode_compressed,
)
from .engram_hash import (
    DEAD,
    engram_multipliers,
    engram_offsets,
    engram_primes,
    ngram_rows,
    ngram_windows,
)
from .image_layout import ImageLayout
from .image_opening import ImageError, ImageSource, open_image
from .image_processor import ImageProcessor, ProcessedImage
from .image_tokens import IMAGE_PLACEHOLDERS, ImageTokenOffset, TokenType, find_image_placeholder
from .loading import get_hf_tokenizer, load_unrepaired_tokenizer, tokenizer_compatibility
from .multimodal_processor import ImageInput, ImagePrompt, MultimodalProcessor, TextLengthInput, images_of
from .release_policy import SPAN_TOKENS, apply_release_policy, release_rules

__all__ = [
    "DEAD",
    "IMAGE_PLACEHOLDERS",
    "SPAN_TOKENS",
    "CompressedTokenizer",
    "CompressedVocabulary",
    "ImageError",
    "ImageInput",
    "ImageLayout",
    "ImageProcessor",
    "ImagePrompt",
    "ImageSource",
    "ImageTokenOffset",
    "MultimodalProcessor",
    "ProcessedImage",
    "TextLengthInput",
    "TokenType",
    "apply_release_policy",
    "compress_vocabulary",
    "encode_compressed",
    "engram_multipliers",
    "engram_offsets",
    "engram_primes",
    "find_image_placeholder",
    "get_hf_tokenizer",
    "images_of",
    "load_unrepaired_tokenizer",
    "ngram_rows",
    "ngram_windows",
    "open_image",
    "release_rules",
    "tokenizer_compatibility",
]
