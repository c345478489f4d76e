"""Logits to tokens and log-probabilities, on the device (DB §7).

Randomness is counter-based: a draw depends on the row's seed, position and purpose and on the row's
distribution, and on nothing else; never on neighbours, slot, bucket or chunking.

Probability mass is counted in integers, units of 2^-31 (as DB §7.3 and §7.5): sums of integers do
not depend on the order of summation. Tokens below half a unit are therefore never drawn.

- sample: one token per row, by adjust (biases, penalties, masks), filters (temperature, top-p, …), mass and draw.
- drafts: drawn and judged. lists: log-probabilities that are reported. randomness: the counter-based numbers.
- rows: parameters per row. options: parameters of the whole engine. fields: the table that declares a request's.
- research: sampling as a function of plain arrays.
"""

from deepinfer_jax.sampling.adjust import MAX_EDITS, Adjustments
from deepinfer_jax.sampling.drafts import DraftRows, draw_draft
from deepinfer_jax.sampling.filters import processed_logprobs
from deepinfer_jax.sampling.lists import MIN_LOGPROB, prompt_logprobs, token_logprobs
from deepinfer_jax.sampling.options import NO_OPTIONS, SamplerOptions
from deepinfer_jax.sampling.randomness import random_words
from deepinfer_jax.sampling.research import SampleFn, SamplerState, sample_fn
from deepinfer_jax.sampling.rows import GREEDY_TEMPERATURE, SamplingRows, plain_rows
from deepinfer_jax.sampling.sample import Sampled, sample

__all__ = [
    "GREEDY_TEMPERATURE",
    "MAX_EDITS",
    "MIN_LOGPROB",
    "NO_OPTIONS",
    "Adjustments",
    "DraftRows",
    "SampleFn",
    "Sampled",
    "SamplerOptions",
    "SamplerState",
    "SamplingRows",
    "draw_draft",
    "plain_rows",
    "processed_logprobs",
    "prompt_logprobs",
    "random_words",
    "sample",
    "sample_fn",
    "token_logprobs",
]
