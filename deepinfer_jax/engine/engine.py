"""`LLMEngine`: requests in, one output object per emitted token out (DB §1.4)."""

import dataclasses
import logging
import random
from collections.abc import Iterable
from typing import Any

import numpy as np

from deepinfer_jax.engine.args import EngineArgs
from deepinfer_jax.engine.loading import load_parts
from deepinfer_jax.engine.outputs import RequestOutput
from deepinfer_jax.engine.prompts import id_problem, length_problem, token_ids
from deepinfer_jax.engine.sampling_params import SamplingParams
from deepinfer_jax.engine.stats import StatsLogger
from deepinfer_jax.runtime.steps import StepOutput
from deepinfer_jax.scheduler import Scheduler, Sequence, SequenceStatus, StepPlan

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class _Request:
    """What the engine keeps of a request besides its sequence."""

    params: SamplingParams
    seed: int
    prompt_logprobs: list[float] = dataclasses.field(default_factory=list)


class LLMEngine:
    """Continuous batching of requests over one model (DB §1.4).

    engine = LLMEngine(EngineArgs(model="path"))
    engine.add_request("user", "request", SamplingParams(), [0, 5, 7])
    while engine.has_unfinished_requests():
        for output in engine.step():
            ...

    Arguments:
        args: what to load and how large.
    """

    def __init__(self, args: EngineArgs) -> None:
        self.args = args
        parts = load_parts(args)
        self.tokenizer = parts.tokenizer
        self.limits = parts.limits
        self.vocab_size = parts.vocab_size
        self._image_token_id = parts.image_token_id
        self._runner = parts.runner
        self._scheduler = Scheduler(buckets=parts.limits.buckets, max_model_len=parts.limits.max_model_len)
        self._requests: dict[int, _Request] = {}  # by sequence id
        self._open_ids: set[str] = set()
        self._next_seq_id = 0
        self._stats = None if args.disable_log_stats else StatsLogger()
        self._closed = False

    @property
    def compile_count(self) -> int:
        """How many step programs have been compiled."""
        return self._runner.compile_count

    def add_request(
        self,
        user_id: str,
        request_id: str,
        sampling_params: SamplingParams | dict[str, Any] | None,
        prompt_token_ids: Any,
        multi_modal_data: dict[str, Any] | None = None,
    ) -> Sequence | None:
        """Queues a request.

        Arguments:
            user_id: the caller's label; no rule depends on it.
            request_id: names the outputs; unique among unfinished requests.
            sampling_params: an object, or a dict of its fields (None values are dropped). The engine keeps a copy.
            prompt_token_ids: one list of integers; it may be as long as `limits.max_model_len`. A longer one is
                accepted and gives one output, "prompt_length_exceeded".
            multi_modal_data: None; this version's engine takes text (`forward` takes image embeddings).

        Returns the sequence, or None, with a log line, if an id is outside the vocabulary (DeepInfer's contract).
        Raises ValueError for an empty prompt, ids that are no integers, images, or a request id in use; TypeError for
        a request id that is no string.
        """
        self._check_open()
        if not isinstance(request_id, str):  # abort_request and the outputs name requests by string
            raise TypeError(f"request_id must be a string, got {request_id!r} of type {type(request_id).__name__}")
        if multi_modal_data is not None:
            raise ValueError(
                f"request {request_id}: the engine of this version takes text; pass multi_modal_data=None, or use "
                "forward(..., image_embeds=...)"
            )
        if request_id in self._open_ids:
            raise ValueError(f"request {request_id} is unfinished; give the new request another id")
        params = own_params(sampling_params)
        params.eos_id = self.tokenizer.eos_token_id
        try:
            ids = token_ids(prompt_token_ids)
        except ValueError as error:
            raise ValueError(f"request {request_id}: {error}") from None
        if problem := self.request_problem(ids, params):
            logger.info("request %s is dropped: %s", request_id, problem)
            return None
        if (ids == self._image_token_id).any():
            logger.warning(
                "request %s: token id %d stands for an image in a chat, but there is no image; it is ordinary text",
                request_id,
                self._image_token_id,
            )

        sequence = Sequence(
            seq_id=self._next_seq_id,
            request_id=request_id,
            prompt_token_ids=ids.astype(np.int32),
            max_tokens=params.max_tokens,
            eos_id=params.eos_id,
            max_model_len=self.limits.max_model_len,
            ignore_eos=params.ignore_eos,
        )
        self._next_seq_id += 1
        seed = random.getrandbits(64) if params.seq_seed is None else params.seq_seed
        self._requests[sequence.seq_id] = _Request(params, seed)
        self._open_ids.add(request_id)
        self._scheduler.add_sequence(sequence)
        return sequence

    def request_problem(self, ids: Any, params: SamplingParams) -> str | None:
        """Why `add_request` would drop a prompt with these ids, None if it would not."""
        if problem := id_problem(ids, self.vocab_size):
            return problem
        golden = np.asarray(params.golden_token_ids or [], np.int64)
        if problem := id_problem(np.maximum(golden, 0), self.vocab_size):
            return f"golden_token_ids: {problem}"
        return None

    def step(self) -> list[RequestOutput]:
        """Runs one step. Returns the tokens it gave, and the last words of requests that ended without running."""
        self._check_open()
        plan = self._scheduler.schedule()
        outputs = [self._output_without_token(sequence) for sequence in plan.ignored]
        if plan.sequences:
            try:
                outputs += self._book(plan, self._run(plan))
            except BaseException:
                # The cache was handed to the step and is gone, and with it the state of all that run.
                self._scheduler.abort({s.request_id for s in self._scheduler.running})
                for sequence in plan.sequences:
                    self._forget(sequence)
                raise
        return outputs

    def flush_inflight_reqs(self) -> list[RequestOutput]:
        """The outputs of a step that was launched and not yet read: none, this version reads each step at once."""
        self._check_open()
        return []

    def abort_request(self, request_id: str | Iterable[str]) -> tuple[int, int]:
        """Ends unfinished requests. Returns how many, and the sum of their lengths in tokens.

        A running one gives no further output, a waiting one gives one in the next step (DB §15.2 trap 3).
        """
        if isinstance(request_id, str):
            request_id = [request_id]
        elif not isinstance(request_id, (list, tuple, set, dict)):
            raise TypeError(f"request_id must be a string or a list, tuple, set or dict of them, got {request_id!r}")
        aborted = [s for s in self._scheduler.running if s.request_id in set(request_id)]
        result = self._scheduler.abort(set(request_id))
        for sequence in aborted:
            self._forget(sequence)
        return result

    def has_unfinished_requests(self) -> bool:
        """Whether a further `step` has something to give."""
        return self.get_num_unfinished_requests() > 0

    def get_num_unfinished_requests(self) -> int:
        """Requests that have not given their last output."""
        return self._scheduler.num_unfinished

    def close(self) -> None:
        """Frees parameters and cache; a closed engine refuses requests. May be called again."""
        self._closed = True
        self._runner.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the engine is closed; make a new one")

    def _run(self, plan: StepPlan) -> StepOutput:
        requests = [self._requests[s.seq_id] for s in plan.sequences]
        params = [request.params for request in requests]
        ends = [s.num_tokens + int(n) for s, n in zip(plan.sequences, plan.num_new_tokens, strict=True)]
        return self._runner.run(
            plan.slots,
            plan.tokens,
            cache_rows=plan.cache_rows,
            chunk=plan.chunk,
            num_top=max(p.top_logprobs for p in params),
            prompt_logprobs=any(
                p.prompt_logprobs and s.num_tokens < s.prompt_len for p, s in zip(params, plan.sequences, strict=True)
            ),
            num_new_tokens=plan.num_new_tokens,
            reset=plan.resets,
            next_token=[
                s.prompt_token_ids[end] if end < s.prompt_len else 0
                for s, end in zip(plan.sequences, ends, strict=True)
            ],
            temperature=[p.temperature for p in params],
            greedy=[p.greedy for p in params],
            top_p=[p.top_p for p in params],
            top_k=[p.top_k for p in params],
            seed_low=[request.seed & 0xFFFFFFFF for request in requests],
            seed_high=[request.seed >> 32 for request in requests],
            position=ends,
            banned=[
                p.eos_id if p.first_n_token_no_eos == 1 and s.output_len == 0 else -1
                for p, s in zip(params, plan.sequences, strict=True)
            ],
            forced=[p.forced_token(s.output_len) for p, s in zip(params, plan.sequences, strict=True)],
        )

    def _book(self, plan: StepPlan, result: StepOutput) -> list[RequestOutput]:
        """Takes the results of a step into the sequences; returns the outputs of those that got a token."""
        if result.prompt_logprobs is not None:
            for row, sequence in enumerate(plan.sequences):
                # The last prompt token predicts the first output, which has its own log-probability.
                count = min(int(plan.num_new_tokens[row]), sequence.prompt_len - 1 - sequence.num_tokens)
                request = self._requests[sequence.seq_id]
                if request.params.prompt_logprobs and count > 0:
                    request.prompt_logprobs += np.asarray(result.prompt_logprobs)[row, :count].tolist()

        sampled = result.sampled
        changed = set(self._scheduler.update(plan, np.asarray(sampled.tokens), np.asarray(sampled.finite)))
        outputs = [
            self._output_without_token(sequence)
            if sequence.status == SequenceStatus.FINISHED_FAILED
            else self._output(sequence, result, row)
            for row, sequence in enumerate(plan.sequences)
            if sequence in changed
        ]
        if self._stats:
            self._stats.record(
                prompt_tokens=int(plan.num_new_tokens.sum()) - int(plan.completes.sum()),
                output_tokens=len(outputs),
                running=len(self._scheduler.running),
                waiting=len(self._scheduler.waiting),
            )
        return outputs

    def _output(self, sequence: Sequence, result: StepOutput, row: int) -> RequestOutput:
        request = self._requests[sequence.seq_id]
        num_top = request.params.top_logprobs
        output = RequestOutput(
            request_id=sequence.request_id,
            prompt_len=sequence.prompt_len,
            token_id=sequence.last_token_id,
            finish_reason=sequence.finish_reason,
            finished=sequence.status.finished,
            max_num_batched_tokens=self.limits.max_num_batched_tokens,
            token_logprobs=float(result.sampled.logprobs[row]),
            top_logprobs=np.asarray(result.sampled.top_logprobs)[row, :num_top].tolist(),
            top_token_ids=np.asarray(result.sampled.top_tokens)[row, :num_top].tolist(),
            num_output_tokens=sequence.output_len,
            prompt_logprobs=request.prompt_logprobs if sequence.output_len == 1 else [],
            draft_tok=1,
            accept_tok=1,
        )
        if output.finished:
            self._forget(sequence)
        return output

    def _output_without_token(self, sequence: Sequence) -> RequestOutput:
        """The one output of a request that ended without a token (DB §1.6: ignored requests)."""
        self._forget(sequence)
        messages = {
            SequenceStatus.FINISHED_IGNORED: length_problem(sequence.prompt_len, self.limits.max_model_len),
            SequenceStatus.FINISHED_ABORTED: "the request was aborted while it waited",
            SequenceStatus.FINISHED_FAILED: (
                f"the model's logits after position {len(sequence) - 1} are not finite; "
                "look at the checkpoint's weights with forward(..., capture=...)"
            ),
        }
        return RequestOutput(
            request_id=sequence.request_id,
            prompt_len=sequence.prompt_len,
            token_id=sequence.last_token_id,
            finish_reason=sequence.finish_reason,
            finished=True,
            max_num_batched_tokens=self.limits.max_num_batched_tokens,
            num_output_tokens=sequence.output_len + 1,
            message=f"request {sequence.request_id}: {messages[sequence.status]}",
        )

    def _forget(self, sequence: Sequence) -> None:
        self._requests.pop(sequence.seq_id, None)  # a failed step may have got as far as forgetting it
        self._open_ids.discard(sequence.request_id)


def own_params(sampling_params: SamplingParams | dict[str, Any] | None) -> SamplingParams:
    """A private copy, so that neither side sees the other's later changes; checked, as fields may be set afterwards."""
    if isinstance(sampling_params, SamplingParams):
        return dataclasses.replace(sampling_params)
    if sampling_params is not None and not isinstance(sampling_params, dict):
        raise TypeError(f"sampling_params must be SamplingParams or a dict of its fields, got {sampling_params!r}")
    return SamplingParams(**{k: v for k, v in (sampling_params or {}).items() if v is not None})
