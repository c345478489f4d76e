"""The results of a step to outputs, one per token (DB §1.6, §5.7)."""

from deepinfer_jax.engine.requests.outputs import RequestOutput, token_output
from deepinfer_jax.engine.requests.request import Request
from deepinfer_jax.runtime.step_result import StepResult
from deepinfer_jax.scheduler import DecodeStep, PrefillStep, Sequence, SequenceStatus, confidences


def keep_prompt_logprobs(step: PrefillStep[Request], result: StepResult) -> None:
    """Moves a chunk's log-probabilities of prompt tokens into the requests; before the scheduler commits the chunk."""
    if result.prompt_logprobs is None:
        return
    for row, sequence in enumerate(step.sequences):
        request = sequence.request
        if request.params.prompt_logprobs and sequence not in step.dropped:
            start = int(step.starts[row])
            # The last prompt token predicts the first output, which has its own log-probability.
            count = max(min(int(step.num_new_tokens[row]), sequence.prompt_len - 1 - start), 0)
            request.take_prompt_logprobs(start, result.prompt_logprobs[row, :count].tolist())


def token_outputs(
    step: PrefillStep[Request] | DecodeStep[Request],
    result: StepResult,
    emitted: list[tuple[int, int]],
    max_num_batched_tokens: int,
    temperatures: tuple[float, ...],
) -> list[RequestOutput]:
    """The outputs of the rows that emitted tokens or failed, in the order of the step.

    A sequence that failed has one output behind its tokens; its request says why (`explain_failures`).

    Arguments:
        emitted: what `Scheduler.update` returned: row, and how many tokens its sequence has just emitted.
        temperatures: of the confidence head, one per draft.
    """
    sequences, running, failed = step.sequences, SequenceStatus.RUNNING, SequenceStatus.FINISHED_FAILED
    tokens, logprobs = result.tokens.tolist(), result.logprobs.tolist()
    accepted, verified = result.counts.tolist(), result.verified.tolist()
    scores = None if result.confidences is None else confidences(result.confidences, temperatures).tolist()
    extras = (result.top_tokens, result.sum_smaller_probs, result.draft_logprobs)
    has_extras = any(extra is not None for extra in extras)
    outputs: list[RequestOutput] = []
    append = outputs.append
    # A decode step of 256 sequences passes here in a fraction of a millisecond: no look-up twice, no list for a row.
    for row, count in emitted:
        sequence = sequences[row]
        status = sequence.status
        if count:
            request_id, prompt_len = sequence.request_id, len(sequence.prompt_token_ids)
            row_tokens, row_logprobs = tokens[row], logprobs[row]
            number = len(sequence.output_token_ids) - count
            for i in range(count):
                number += 1
                output = token_output(
                    request_id=request_id,
                    prompt_len=prompt_len,
                    token_id=row_tokens[i],
                    max_num_batched_tokens=max_num_batched_tokens,
                    token_logprobs=row_logprobs[i],
                    num_output_tokens=number,
                )
                append(output)
            output.draft_tok, output.accept_tok = verified[row], accepted[row]
            if scores is not None:
                output.confidence_score = scores[row][: verified[row] - 1]
            if status is not running and status is not failed:
                output.finish_reason, output.finished = sequence.finish_reason, True
                output.stop_reason = sequence.stop_reason
            if number == count:
                outputs[-count].prompt_logprobs = list(sequence.request.prompt_logprobs)
                outputs[-count].num_cached_tokens = sequence.num_cached_tokens
            if has_extras:
                _add_likely_tokens(outputs[-count:], result, row, sequence.request.params.top_logprobs)
                _add_probabilities(outputs[-count:], result, row)
        if not count or status is failed:
            append(output_without_token(sequence, max_num_batched_tokens))
    return outputs


def _add_likely_tokens(outputs: list[RequestOutput], result: StepResult, row: int, num_top: int) -> None:
    """The likeliest tokens of each output, and behind them its own if it is not among them."""
    if result.top_tokens is None or result.top_logprobs is None or not num_top:
        return
    for i, output in enumerate(outputs):
        output.top_token_ids = result.top_tokens[row, i, :num_top].tolist()
        output.top_logprobs = result.top_logprobs[row, i, :num_top].tolist()
        if output.token_id not in output.top_token_ids:
            output.top_token_ids.append(output.token_id)
            output.top_logprobs.append(output.token_logprobs)


def _add_probabilities(outputs: list[RequestOutput], result: StepResult, row: int) -> None:
    """What DEEPINFER_COMPUTE_SUM_SMALLER_PROBS adds: of each token, and of the drafts among them as drafts."""
    if result.sum_smaller_probs is not None:
        for i, output in enumerate(outputs):
            output.sum_smaller_probs = float(result.sum_smaller_probs[row, i])
    if result.draft_logprobs is not None:
        for i, output in enumerate(outputs[: int(result.counts[row]) - 1]):
            output.nextn_logprobs = float(result.draft_logprobs[row, i])


def output_without_token(sequence: Sequence[Request], max_num_batched_tokens: int) -> RequestOutput:
    """The one output of a request that ended without a token in this step (DB §1.6: ignored requests)."""
    return RequestOutput(
        request_id=sequence.request_id,
        prompt_len=sequence.prompt_len,
        token_id=sequence.last_token_id,
        finish_reason=sequence.finish_reason,
        finished=True,
        max_num_batched_tokens=max_num_batched_tokens,
        num_output_tokens=sequence.output_len + 1,
        message=f"request {sequence.request_id}: {sequence.request.error or _reason(sequence)}",
    )


def _reason(sequence: Sequence[Request]) -> str:
    if sequence.status is SequenceStatus.FINISHED_PREEMPTED:
        return (
            f"the request gave up its blocks after {sequence.output_len} tokens, because older requests needed them; "
            "with stop_preempted_request=False it would go on later"
        )
    return f"the request was aborted after {sequence.output_len} tokens"
