"""The results of a step to outputs, one per token (DB §1.6, §5.7)."""

from deepinfer_jax.engine.requests.outputs import RequestOutput
from deepinfer_jax.engine.requests.request import Request
from deepinfer_jax.runtime.step_result import StepResult
from deepinfer_jax.scheduler import DecodeStep, PrefillStep, Sequence, SequenceStatus, confidences


def keep_prompt_logprobs(step: PrefillStep, result: StepResult) -> None:
    """Moves a chunk's log-probabilities of prompt tokens into the requests; before the scheduler commits the chunk."""
    if result.prompt_logprobs is None:
        return
    for row, sequence in enumerate(step.sequences):
        request: Request = sequence.request
        if request.params.prompt_logprobs and sequence not in step.dropped:
            start = int(step.starts[row])
            # The last prompt token predicts the first output, which has its own log-probability.
            count = max(min(int(step.num_new_tokens[row]), sequence.prompt_len - 1 - start), 0)
            request.take_prompt_logprobs(start, result.prompt_logprobs[row, :count].tolist())


def token_outputs(
    step: PrefillStep | DecodeStep,
    result: StepResult,
    pushed: list[tuple[int, int]],
    max_num_batched_tokens: int,
    temperatures: tuple[float, ...],
) -> list[RequestOutput]:
    """The outputs of the rows that took tokens or failed, in the order of the step.

    A sequence that failed has one output behind its tokens; its request says why (`explain_failures`).

    Arguments:
        pushed: what `Scheduler.update` returned: row, and how many tokens its sequence has just taken.
        temperatures: of the confidence head, one per draft.
    """
    running = SequenceStatus.RUNNING
    sequences, budget = step.sequences, max_num_batched_tokens
    tokens, logprobs, accepted = result.tokens.tolist(), result.logprobs.tolist(), result.counts.tolist()
    verified, scores = result.verified.tolist(), None
    if result.confidences is not None:
        scores = confidences(result.confidences, temperatures).tolist()
    outputs: list[RequestOutput] = []
    append = outputs.append
    # A decode step of 256 sequences passes here in a fraction of a millisecond: positional arguments, no look-ups.
    for row, count in pushed:
        sequence = sequences[row]
        failed = sequence.status is SequenceStatus.FINISHED_FAILED
        if count == 0:
            append(output_without_token(sequence, budget))
            continue
        request_id, prompt_len = sequence.request_id, len(sequence.prompt_token_ids)
        row_tokens, row_logprobs = tokens[row], logprobs[row]
        number = len(sequence.output_token_ids) - count
        for i in range(count):
            number += 1
            token, logprob = row_tokens[i], row_logprobs[i]
            append(
                RequestOutput(request_id, prompt_len, token, "", False, budget, logprob, 1.0, -1.0, [], [], number, [])
            )
        last = outputs[-1]
        last.draft_tok, last.accept_tok = verified[row], accepted[row]
        if scores is not None:
            last.confidence_score = scores[row][: verified[row] - 1]
        if sequence.status is not running and not failed:
            last.finish_reason, last.finished, last.stop_reason = sequence.finish_reason, True, sequence.stop_reason
        if number == count:
            outputs[-count].prompt_logprobs = list(sequence.request.prompt_logprobs)
            outputs[-count].num_cached_tokens = sequence.num_cached_tokens
        if result.top_tokens is not None and result.top_logprobs is not None:
            num_top = sequence.request.params.top_logprobs
            for i, output in enumerate(outputs[-count:]):
                output.top_token_ids = result.top_tokens[row, i, :num_top].tolist()
                output.top_logprobs = result.top_logprobs[row, i, :num_top].tolist()
                if num_top and output.token_id not in output.top_token_ids:
                    output.top_token_ids.append(output.token_id)
                    output.top_logprobs.append(output.token_logprobs)
        if result.sum_smaller_probs is not None:
            for i, output in enumerate(outputs[-count:]):
                output.sum_smaller_probs = float(result.sum_smaller_probs[row, i])
        if result.draft_logprobs is not None:
            for i, output in enumerate(outputs[-count:][: accepted[row] - 1]):
                output.nextn_logprobs = float(result.draft_logprobs[row, i])
        if failed:
            append(output_without_token(sequence, budget))
    return outputs


def output_without_token(sequence: Sequence, max_num_batched_tokens: int) -> RequestOutput:
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


def _reason(sequence: Sequence) -> str:
    if sequence.status is SequenceStatus.FINISHED_PREEMPTED:
        return (
            f"the request gave up its blocks after {sequence.output_len} tokens, because older requests needed them; "
            "with stop_preempted_request=False it would go on later"
        )
    return f"the request was aborted after {sequence.output_len} tokens"
