"""`LLMEngine`: requests in, one output object per emitted token out (DB §1.4)."""

import logging
import math
import random
import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer_jax.engine.args import EngineArgs, EngineType
from deepinfer_jax.engine.core import EngineCore
from deepinfer_jax.engine.handover.sequence_state import SequenceState, check_state, computed_state
from deepinfer_jax.engine.images.request_images import RequestImages, image_contents
from deepinfer_jax.engine.loading import load_parts
from deepinfer_jax.engine.metrics.stats import log_line
from deepinfer_jax.engine.requests.outputs import RequestOutput
from deepinfer_jax.engine.requests.preparation import Prepared, Refusal, RequestRules, prepare
from deepinfer_jax.engine.requests.request import Request, check_request_id, copy_params
from deepinfer_jax.engine.requests.sampling_params import SamplingParams
from deepinfer_jax.engine.requests.stop_texts import StopTexts
from deepinfer_jax.engine.validation import number
from deepinfer_jax.scheduler import Imported, Sequence
from deepinfer_jax.structured import StructuredArgs
from deepinfer_jax.tokenization import ImagePrompt

logger = logging.getLogger(__name__)


class LLMEngine:
    """Continuous batching of requests over one model (DB §1.4).

    engine = LLMEngine(EngineArgs(model="path"))
    engine.add_request("user", "request", SamplingParams(), [0, 5, 7])
    while engine.has_unfinished_requests():
        for output in engine.step():
            ...

    Every step program is compiled here. Later only a row whose logits are no distribution has one compiled, which finds
    the cause and is none of a step (see `engine/diagnosis.py`).

    With zero-overhead scheduling (on unless DEEPINFER_ZERO_OVERHEAD_SCHEDULING=0) a `step` launches the next step
    before it reads the one before, so tokens come one call later; they are the same.

    Arguments:
        args: what to load and how large.

    Attributes:
        tokenizer, vocab_size: as loaded.
        limits: what `args`, model, environment and devices resolved to.
        rules: what `prepare` checks requests by.
        images: opens images, and knows what stands for one in a text.
    """

    def __init__(self, args: EngineArgs) -> None:
        self.args = args
        parts = load_parts(args)
        self.tokenizer = parts.tokens.tokenizer
        self.limits = parts.config
        self.vocab_size = parts.config.vocab_size
        self._image_token_id = parts.tokens.image_token_id
        self._identity = parts.model.identity
        self._core = EngineCore(parts)
        self.images = self._core.images
        self.rules = RequestRules(
            vocab_size=self.vocab_size,
            lengths=self._core.scheduler.limits,
            has_vision_tower=self.images.has_vision_tower,
            keep_tokens=self.limits.keep_tokens,
        )
        self._next_seq_id = 0
        self._closed = False

    @property
    def core(self) -> EngineCore:
        """The engine step by step: its scheduler, runner and caches, and the requests that are unfinished."""
        return self._core

    @property
    def compile_count(self) -> int:
        """How many step programs have been compiled; constant from the end of construction on."""
        return self._core.runner.compile_count

    def add_request(
        self,
        user_id: str,
        request_id: str,
        sampling_params: SamplingParams | dict[str, Any] | None,
        prompt_token_ids: Any,
        multi_modal_data: Mapping[str, Any] | ImagePrompt | None = None,
        arrival_time: float | None = None,
    ) -> Sequence[Request] | None:
        """Queues a request.

        DeepInfer's further parameters are left out: `extra` and `enqueue` serve its image and grammar workers, and
        a prompt cut at `chunk_checkpoints` gives the same tokens as one cut anywhere else.

        Arguments:
            user_id: the caller's label; no rule depends on it.
            request_id: names the outputs; unique among unfinished requests.
            sampling_params: an object, or a dict of its fields (None values are dropped). The engine keeps a copy.
            prompt_token_ids: one list of integers; it may be as long as `limits.prompt_limit`. A longer one is
                accepted and gives one output, "prompt_length_exceeded". The place of an image is one placeholder, or
                it is expanded already (see `MultimodalProcessor.overwrite_prompt`).
            multi_modal_data: `image_bytes`, a list of `tokenization.ImageSource`, and maybe `image_sizes`, a list of
                their (width, height); or what `images.open_all` made of that and the prompt, which is then not
                looked at. None, or no image: text. Images are opened beside the step loop, and must not be changed
                until the first output. One that cannot be used ends the request with finish reason "ve_error",
                placeholders that are not as many as the images with "invalid_prompt".
            arrival_time: seconds of `time.perf_counter()`, from which queue time and time to the first token count;
                None: now.

        Returns the sequence, or None, with a log line, if an id is outside the vocabulary (DeepInfer's contract).
        Raises ValueError for an empty prompt, ids that are no integers, images without a vision tower or in another
        form, parameters that the engine cannot serve, or a request id in use; TypeError for a request id that is no
        string or an arrival_time that is no number.
        """
        self._check_can_take(request_id)
        if arrival_time is not None and not math.isfinite(number("arrival_time", arrival_time)):
            raise ValueError(f"request {request_id}: arrival_time must be finite, got {arrival_time}")
        params = copy_params(sampling_params, self.tokenizer.eos_token_id)
        prepared = prepare(prompt_token_ids, params, multi_modal_data, self.rules)
        if isinstance(prepared, Refusal) and prepared.drops:
            logger.info("request %s is dropped: %s", request_id, prepared.sentence)
            return None
        return self._queue(user_id, request_id, prepared, arrival_time)

    def add_prepared(self, user_id: str, request_id: str, prepared: Prepared | Refusal) -> Sequence[Request]:
        """Queues what `prepare` gave by the engine's `rules`: `add_request` for who has checked a request already.

        Raises ValueError for a refused one, unless it is too long: it is accepted then and gives its one output. Raises
        what `add_request` does for a request id.
        """
        self._check_can_take(request_id)
        return self._queue(user_id, request_id, prepared, None)

    def computed_requests(self) -> list[str]:
        """Requests of a PROMPT engine whose prompt is computed, in that order.

        They hold slot and blocks until they are exported or aborted, and others may wait for these: export between two
        steps, not after the last one.
        """
        return list(self._core.computed)

    def export_sequence(self, request_id: str) -> SequenceState:
        """Takes a computed prompt out of a PROMPT engine, for the `import_sequence` of a COMPLETION engine.

        Raises ValueError if the engine is not a PROMPT engine, or there is no such computed prompt.
        """
        self._check_open()
        if self.args.engine_type is not EngineType.PROMPT:
            raise ValueError(
                f"a {self.args.engine_type.name} engine hands nothing over; make one with engine_type=EngineType.PROMPT"
            )
        if request_id not in self._core.computed:
            raise ValueError(
                f"request {request_id} is not a computed prompt; there are: {', '.join(self._core.computed) or 'none'}"
            )
        sequence = self._core.computed[request_id]
        assert self._identity is not None
        with self._core.losing_all_on_failure():
            state = computed_state(self._core.runner, sequence, self._identity, self.limits.tokens_per_block)
            self._core.leave(sequence)
        return state

    def import_sequence(self, state: SequenceState) -> Sequence[Request]:
        """Goes on with a prompt that another engine computed; its next output is the second token.

        Nothing is computed again, unless the sequence is preempted later.

        Raises ValueError if the engine is not a COMPLETION engine, the request id is in use, the state comes from
        another model, precision or layout of the cache, is not whole, or leaves nothing to generate, with the reason.
        """
        self._check_open()
        if self.args.engine_type is not EngineType.COMPLETION:
            raise ValueError(
                f"a {self.args.engine_type.name} engine takes no computed prompts; make one with "
                "engine_type=EngineType.COMPLETION"
            )
        assert self._identity is not None
        check_request_id(state.request_id)
        self._identity.require(state.identity, f"request {state.request_id}")
        self._check_unused(state.request_id)
        params = copy_params(state.params, self.tokenizer.eos_token_id)
        # What is wrong with one request must not reach the scheduler: a failure there ends all that run.
        check_state(state, self._core.runner, self.limits, params.max_tokens)
        return self._submit(
            user_id=state.user_id,
            request_id=state.request_id,
            params=params,
            seed=state.seed,
            arrival_time=time.perf_counter(),
            prompt_token_ids=state.prompt_token_ids,
            output_token_ids=state.output_token_ids.tolist(),
            imported=Imported(num_tokens=state.num_tokens, state=state.slot, blocks=state.blocks),
            structured=params.structured(),
            image_prompt=state.image_prompt,
        )

    def _queue(
        self, user_id: str, request_id: str, prepared: Prepared | Refusal, arrival_time: float | None
    ) -> Sequence[Request]:
        if isinstance(prepared, Refusal):
            if not prepared.is_too_long:
                raise ValueError(f"request {request_id}: {prepared.sentence}")
            prepared = Prepared(params=prepared.params, token_ids=prepared.token_ids.astype(np.int32))
        params, ids = prepared.params, prepared.token_ids
        if not prepared.with_images and (ids == self._image_token_id).any():
            logger.warning(
                "request %s: token id %d stands for an image in a chat, but there is no image; it is ordinary text",
                request_id,
                self._image_token_id,
            )
        return self._submit(
            user_id=user_id,
            request_id=request_id,
            params=params,
            seed=random.getrandbits(64) if params.seq_seed is None else params.seq_seed,
            arrival_time=time.perf_counter() if arrival_time is None else float(arrival_time),
            prompt_token_ids=ids,
            # What was restored has no log-probabilities.
            reuse=not params.prompt_logprobs,
            structured=prepared.structured,
            image_prompt=prepared.image_prompt,
            unopened=prepared.unopened,
        )

    def _submit(
        self,
        *,
        params: SamplingParams,
        seed: int,
        prompt_token_ids: npt.NDArray[np.int32],
        structured: StructuredArgs | None = None,
        image_prompt: ImagePrompt | None = None,
        unopened: RequestImages | None = None,
        **fields: Any,
    ) -> Sequence[Request]:
        """Hands the core a sequence with these fields; unopened: images that are not in the prompt yet."""
        constraint = None if structured is None else self._core.grammars.constraint(structured)
        work = {self._core.grammars.name: constraint, self._core.images.name: unopened}
        awaits = {name for name, value in work.items() if value is not None}
        sequence = Sequence(
            seq_id=self._next_seq_id,
            prompt_token_ids=prompt_token_ids,
            max_tokens=params.max_tokens,
            eos_id=params.eos_id,
            max_model_len=self.limits.max_model_len,
            ignore_eos=params.ignore_eos,
            stop_token_ids=frozenset(params.stop_token_ids or ()),
            stop_text=StopTexts(self.tokenizer.decode, tuple(params.stop), params.min_tokens) if params.stop else None,
            most_cached_tokens=self._core.most_cached_tokens(len(prompt_token_ids)),
            schedulable=not awaits,
            # With drafts it depends on the results in flight which outputs a step gives, so which ids it is forced to.
            waits_for_results=constraint is not None
            or (self.limits.num_drafts > 0 and params.golden_token_ids is not None),
            images=image_contents(image_prompt),
            request=Request(params, seed=seed, constraint=constraint, image_prompt=image_prompt, awaits=awaits),
            **fields,
        )
        self._next_seq_id += 1
        self._core.add(sequence, unopened)
        return sequence

    def step(self) -> list[RequestOutput]:
        """Launches a prefill chunk and a decode step where there is work, and reads the results that are due.

        Returns the tokens that came, and the last words of requests that ended without one. The objects belong to the
        caller.
        """
        self._check_open()
        if self._core.step():
            self._core.stats.end_step()
            interval = self.limits.logging_interval
            if interval > 0 and self._core.stats.steps % interval == 0:
                logger.info("%s", log_line(self.stats()))
        return self._core.hand_out()

    def flush_inflight_reqs(self) -> list[RequestOutput]:
        """Reads all steps that were launched and not yet read; launches none."""
        self._check_open()
        self._core.flush()
        return self._core.hand_out()

    def abort_request(self, request_id: str | Iterable[str]) -> tuple[int, int]:
        """Ends unfinished requests. Returns how many, and the sum of their lengths in tokens.

        Whether it waited or ran, each gives one more output in the next step, with finish reason "abort" (DeepInfer
        gives none for a running one, DB §15.2 trap 3). Unknown ids are no error; the log names them.
        """
        if isinstance(request_id, str):
            request_id = [request_id]
        elif not isinstance(request_id, (list, tuple, set, dict)):
            raise TypeError(f"request_id must be a string or a list, tuple, set or dict of them, got {request_id!r}")
        request_ids = set(request_id)
        if unknown := [name for name in request_ids if name not in self._core.open]:
            logger.info("nothing to abort: %s not unfinished", ", ".join(map(str, unknown)))
        return self._core.abort(request_ids)

    def has_unfinished_requests(self) -> bool:
        """Whether a further `step` has something to give. A PROMPT engine has nothing to add to a computed prompt."""
        return bool(self.get_num_unfinished_requests() or self._core.ready)

    def get_num_unfinished_requests(self) -> int:
        """Requests that have not given their last output, computed prompts of a PROMPT engine not counted."""
        return self._core.num_unfinished

    def stats(self) -> dict[str, Any]:
        """What the engine is doing and has done; may be called at any time.

        Keys: num_waiting, num_running (requests without and with a slot); num_preemptions; num_cached_tokens
        (tokens whose state was restored instead of computed); num_snapshots, snapshot_bytes (what is kept for
        that in host memory); num_decode_rows, num_wasted_rows (rows of decode steps, and those of rejected
        drafts); mean_accepted_length (tokens that a sequence got of a decode step); num_drafts_verified,
        num_drafts_accepted (by the draft's place in its block); free_blocks, total_blocks, free_slots,
        total_slots (over all dp ranks); compile_count; num_steps; num_finished (by finish reason);
        prompt_tokens, generation_tokens and, per second over the latest iterations, prompt_throughput,
        generation_throughput; queue_time_* (arrival to first launch) and ttft_* (arrival to first token) in
        seconds, mean and max of the latest requests, sum and count of all; schedule_seconds, launch_seconds,
        wait_seconds, process_seconds, where the time went since the start; num_requests_awaiting_images (they count as
        waiting too), num_images_opened, image_bytes_waiting (pixels of requests that have not started),
        num_images_encoded, num_images_reused (how often a prefill step found what was encoded before). With
        DEEPINFER_ENABLE_MTP_VARLEN also predicted_acceptance, real_acceptance (of drafts that were judged, by their
        place), num_steps_by_size (decode steps by the tokens of their program), verification_slope_ms (what a row took
        beyond what was measured at the start).
        """
        scheduler = self._core.scheduler
        return {
            "num_waiting": scheduler.num_waiting,
            "num_running": scheduler.num_running,
            "num_preemptions": scheduler.num_preemptions,
            "num_snapshots": len(scheduler.snapshots),
            "snapshot_bytes": scheduler.snapshots.used,
            "free_blocks": scheduler.free_blocks,
            "total_blocks": scheduler.total_blocks,
            "free_slots": scheduler.free_slots,
            "total_slots": scheduler.total_slots,
            "compile_count": self.compile_count,
            **self.images.snapshot(),
            "num_images_encoded": 0 if self._core.features is None else self._core.features.rows.num_encoded,
            "num_images_reused": 0 if self._core.features is None else self._core.features.rows.num_reused,
            **({} if scheduler.verification is None else scheduler.verification.snapshot()),
        } | self._core.stats.snapshot()

    def close(self) -> None:
        """Frees parameters, cache and requests; a closed engine refuses new ones. May be called again."""
        self._closed = True
        self._core.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the engine is closed; make a new one")

    def _check_can_take(self, request_id: str) -> None:
        """Raises an error unless the engine runs prompts and has no unfinished request of this name."""
        self._check_open()
        if self.args.engine_type is EngineType.COMPLETION:
            raise ValueError("a COMPLETION engine computes no prompts: give it requests by import_sequence()")
        check_request_id(request_id)
        self._check_unused(request_id)

    def _check_unused(self, request_id: str) -> None:
        if request_id in self._core.open or any(output.request_id == request_id for output in self._core.ready):
            raise ValueError(f"request {request_id} is unfinished; give the new request another id")
