"""Sequences as an engine makes them, without an engine."""

from typing import Any

import numpy as np

from deepinfer_jax.engine.requests.request import Request
from deepinfer_jax.engine.requests.sampling_params import SamplingParams
from deepinfer_jax.scheduler import Sequence, SequenceStatus

EOS = 1


def running_sequence(name: str, output: list[int], **params: Any) -> Sequence:
    """Of a prompt of three tokens, and these output tokens."""
    sequence = Sequence(
        seq_id=0,
        request_id=name,
        prompt_token_ids=np.asarray([4, 5, 6], np.int32),
        max_tokens=9,
        eos_id=EOS,
        max_model_len=40,
        request=Request(SamplingParams(**params), seed=0),
    )
    sequence.status = SequenceStatus.RUNNING
    sequence.output_token_ids += output
    return sequence
