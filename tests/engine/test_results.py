"""Results of a step to outputs, also with several tokens per row, as verified drafts will give them (DB §1.6)."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from deepinfer_jax.engine.requests.outputs import RequestOutput, token_output
from deepinfer_jax.engine.requests.request import Request
from deepinfer_jax.engine.requests.results import keep_prompt_logprobs, token_outputs
from deepinfer_jax.engine.requests.sampling_params import SamplingParams
from deepinfer_jax.runtime.runner import StepResult
from deepinfer_jax.scheduler import Sequence, SequenceStatus

EOS = 1


def running(name: str, output: list[int], **params: Any) -> Sequence:
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


def results(tokens: list[list[int]], **kwargs: Any) -> StepResult:
    array = np.asarray(tokens, np.int32)
    arrays = {
        "counts": np.full(len(array), array.shape[1], np.int32),
        "logprobs": -array.astype(np.float32),
        "finite": np.ones(len(array), np.bool_),
        "verified": np.full(len(array), array.shape[1], np.int32),
    }
    return StepResult(tokens=array, **(arrays | kwargs))


def test_every_accepted_token_has_its_output_and_the_last_says_how_many() -> None:
    """Two verified drafts: all accepted; one rejected; cut short by EOS; not finite from the start; after one token."""
    sequences = [running(name, [7]) for name in ("all", "one", "ends", "bad", "late")]
    sequences[1].output_token_ids.append(7)
    tokens = [[11, 12, 13], [21, 22, 0], [31, EOS, 33], [0, 0, 0], [51, 0, 0]]
    emitted = [
        (row, sequence.append_tokens(tokens[row][:count]))
        for row, (sequence, count) in enumerate(zip(sequences[:3], (3, 2, 3), strict=True))
    ]
    emitted += [(3, 0), (4, sequences[4].append_tokens([51]))]
    for sequence in sequences[3:]:
        sequence.status = SequenceStatus.FINISHED_FAILED
        sequence.request.error = "no distribution"
    step: Any = SimpleNamespace(sequences=sequences)
    counts = np.asarray([3, 2, 3, 1, 2], np.int32)
    confidences = np.asarray([[0, 1], [-1, 90], [2, 3], [np.nan, 0], [0, 0]], np.float32)
    verified = np.asarray([3, 3, 2, 3, 3], np.int32)
    given = results(tokens, counts=counts, verified=verified, confidences=confidences)
    outputs = token_outputs(step, given, emitted, 64, (1.0, 2.0))

    def seen(output: RequestOutput) -> tuple[Any, ...]:
        return output.request_id, output.token_id, output.num_output_tokens, output.draft_tok, output.accept_tok

    assert [seen(output) for output in outputs[:7]] == [
        ("all", 11, 2, 0, 0),
        ("all", 12, 3, 0, 0),
        ("all", 13, 4, 3, 3),
        ("one", 21, 3, 0, 0),
        ("one", 22, 4, 3, 2),
        ("ends", 31, 2, 0, 0),
        ("ends", EOS, 3, 2, 3),
    ]
    # 1 / (1 + exp(-z / temperature)), of the drafts that were verified.
    assert [output.confidence_score for output in outputs[:7] if output.draft_tok] == [
        pytest.approx([0.5, 0.6224593]),
        pytest.approx([0.2689414, 1.0]),
        pytest.approx([0.8807971]),
    ]
    assert [output.confidence_score for output in outputs if not output.draft_tok] == [None] * 6
    assert [output.token_logprobs for output in outputs[:7]] == [-11, -12, -13, -21, -22, -31, -1]
    assert [(output.finished, output.finish_reason) for output in outputs[:7]] == [(False, "")] * 6 + [(True, "stop")]
    assert all(output.max_num_batched_tokens == 64 and output.prompt_len == 3 for output in outputs)
    assert [(*seen(output), output.finish_reason, output.message) for output in outputs[7:]] == [
        ("bad", 7, 2, 0, 0, "logits_not_finite", "request bad: no distribution"),
        ("late", 51, 2, 3, 2, "", ""),
        ("late", 51, 3, 0, 0, "logits_not_finite", "request late: no distribution"),
    ]


def test_the_quick_way_to_an_output_gives_what_the_constructor_gives() -> None:
    fields: dict[str, Any] = {
        "request_id": "r",
        "prompt_len": 3,
        "token_id": 5,
        "max_num_batched_tokens": 64,
        "token_logprobs": -0.5,
        "num_output_tokens": 7,
    }
    first, second = token_output(**fields), token_output(**fields)
    assert first == RequestOutput(**fields) and dataclasses.asdict(first) == dataclasses.asdict(RequestOutput(**fields))
    first.top_logprobs.append(1.0)
    assert second.top_logprobs == []  # nothing is shared


def test_each_request_has_its_own_length_of_the_list_of_likely_tokens() -> None:
    sequences = [running("two", [7], top_logprobs=2), running("none", [7])]
    emitted = [(row, sequence.append_tokens([5, 6])) for row, sequence in enumerate(sequences)]
    top = np.arange(2 * 2 * 8, dtype=np.int32).reshape(2, 2, 8)
    step: Any = SimpleNamespace(sequences=sequences)
    outputs = token_outputs(
        step, results([[5, 6], [5, 6]], top_tokens=top, top_logprobs=-top.astype(np.float32)), emitted, 64, ()
    )
    # Behind the likeliest comes the token itself, which is not among them.
    assert [output.top_token_ids for output in outputs] == [[0, 1, 5], [8, 9, 6], [], []]
    assert [output.top_logprobs for output in outputs] == [[0, -1, -5], [-8, -9, -6], [], []]


def test_log_probabilities_of_the_prompt_are_kept_once_whatever_is_computed_again() -> None:
    """Chunks of a prompt of 9: [0, 4), then preempted; [0, 3), [3, 6) again; the last one, [6, 9)."""
    sequence = running("r", [], prompt_logprobs=True)
    sequence.prompt_token_ids = np.arange(9, dtype=np.int32)
    other = running("other", [])

    def chunk(start: int, count: int, dropped: bool = False) -> None:
        logprobs = np.full((2, 4), np.nan, np.float32)
        logprobs[0, :count] = np.arange(start, start + count)
        step: Any = SimpleNamespace(
            sequences=[sequence, other],
            starts=np.asarray([start, 0]),
            num_new_tokens=np.asarray([count, 3]),
            dropped={sequence} if dropped else set(),
        )
        keep_prompt_logprobs(step, results([[0], [0]], prompt_logprobs=logprobs))

    chunk(0, 4)
    chunk(4, 4, dropped=True)
    chunk(0, 3)
    chunk(3, 3)
    chunk(6, 3)
    assert sequence.request.prompt_logprobs == [0, 1, 2, 3, 4, 5, 6, 7]  # the last token's is the first output's
    assert other.request.prompt_logprobs == []
