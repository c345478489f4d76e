"""What the environment asks of the sampler, and of how drafts are judged, for all requests (DB §2)."""

import math
import re

from deepinfer_jax.engine.environ import env
from deepinfer_jax.sampling import SamplerOptions

_BLACKLIST, _FORCE_TOP_K = "DEEPINFER_DECODE_TOKEN_BLACKLIST", "DEEPINFER_SAMPLER_FORCE_TOPK"
_TEMPERATURE, _COLDEST = "DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE", 1e-5
_RANGE = re.compile(r"\s*(\d+)\s*(?:\.\.\s*(\d+)\s*)?")


def sampler_options(vocab_size: int, confidence_temperatures: tuple[float, ...] = (1.0,)) -> SamplerOptions:
    """confidence_temperatures: used, and so part of the options, only with DEEPINFER_ENABLE_MTP_VARLEN.

    Raises ValueError, starting with the variable's name, for a value that cannot be."""
    force_top_k = env.SAMPLER_FORCE_TOPK
    if force_top_k < 0:
        raise ValueError(f"{_FORCE_TOP_K} is {force_top_k}; expected 0 (off) or how many logits are kept")
    return SamplerOptions(
        blacklist=_ids(env.DECODE_TOKEN_BLACKLIST, vocab_size),
        force_top_k=force_top_k,
        sum_smaller_probs=env.COMPUTE_SUM_SMALLER_PROBS,
        confidence_temperatures=confidence_temperatures if env.ENABLE_MTP_VARLEN else (1.0,),
    )


def confidence_temperatures(num_drafts: int) -> tuple[float, ...]:
    """DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE, one for each draft, at least 1e-5.

    Raises ValueError, starting with the variable's name, for a value that cannot be.
    """
    text = env.DFLASH_CONFIDENCE_HEAD_TEMPERATURE
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(0 < value < math.inf for value in values):
        raise ValueError(
            f"{_TEMPERATURE} is {text!r}; expected a positive number, or a comma list of one for each draft"
        )
    if len(values) == 1:
        values *= num_drafts
    if num_drafts and len(values) != num_drafts:
        raise ValueError(
            f"{_TEMPERATURE} is {text!r}, {len(values)} temperatures, but {num_drafts} tokens are drafted per step"
        )
    return tuple(max(value, _COLDEST) for value in values)


def _ids(text: str, vocab_size: int) -> tuple[int, ...]:
    """The ids of a list such as 0..3,7,10..12: inclusive ranges, strictly increasing, within the vocabulary."""
    ids: list[int] = []
    for part in text.split(",") if text.strip() else []:
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"{_BLACKLIST} is {text!r}; {part.strip()!r} is neither an id nor a range such as 0..3")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or (ids and first <= ids[-1]):
            raise ValueError(f"{_BLACKLIST} is {text!r}; ids must increase, but {part.strip()!r} does not")
        if last >= vocab_size:
            raise ValueError(f"{_BLACKLIST} is {text!r}; {last} is not among the model's ids 0..{vocab_size - 1}")
        ids += range(first, last + 1)
    if len(ids) == vocab_size:
        raise ValueError(f"{_BLACKLIST} is {text!r}; that leaves no id to generate")
    return tuple(ids)
