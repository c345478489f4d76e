"""The steps behind `LLMEngine`: plan one, launch it, read the one before, and say what became of each request."""

import contextlib
import sys
import time
from collections.abc import Iterator

from deepinfer_jax.engine.args import EngineType
from deepinfer_jax.engine.commit import (
    Arrived,
    commit_results,
    forget_failed_images,
    learn_from_drafts,
    wait_for_results,
)
from deepinfer_jax.engine.diagnosis import explain_failures
from deepinfer_jax.engine.drafts.scheduled_verification import StepClock, draft_policy
from deepinfer_jax.engine.gc_pause import collector_paused
from deepinfer_jax.engine.grammars.compiler import GrammarCompiler
from deepinfer_jax.engine.grammars.masks import follow_grammars
from deepinfer_jax.engine.images.opener import ImageOpener
from deepinfer_jax.engine.images.request_images import RequestImages, image_contents
from deepinfer_jax.engine.launch import Launched, launch
from deepinfer_jax.engine.loading import EngineParts
from deepinfer_jax.engine.metrics.stats import EngineStats
from deepinfer_jax.engine.requests.background import Failure
from deepinfer_jax.engine.requests.outputs import RequestOutput
from deepinfer_jax.engine.requests.request import Request
from deepinfer_jax.engine.requests.results import output_without_token, token_outputs
from deepinfer_jax.scheduler import PrefillStep, Scheduler, Sequence, SequenceStatus, StepPlan
from deepinfer_jax.tokenization import ImagePrompt

_WAIT = 0.01
"""Seconds that a step waits for a grammar or an image if there is nothing else to do; new requests come in between two
steps."""


class EngineCore:
    """Runs the sequences of one engine, from submission to their last output: the interface of its steps.

    Whoever looks at an engine from outside finds here what it consists of, and between two steps where it stands.

    Arguments:
        parts: what it works with.

    Attributes:
        scheduler: plans the steps.
        runner: runs them.
        features: what the vision tower made of images; None without one.
        grammars, images: work beside the steps.
        open: sequences by request id, of requests that have not given their last output.
        computed: those of them that wait for their export.
        ready: outputs that are not handed out yet.
        launched: steps that were launched and are not committed, in the order of the device.
        stats: what has been done.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._config = config = parts.config
        self._diagnose = parts.model.diagnose
        self._clock = StepClock()
        self.runner = parts.model.runner
        self.features = parts.model.features
        self.scheduler: Scheduler[Request] = Scheduler(config.scheduler_limits, parts.model.buckets)
        self.grammars = GrammarCompiler(
            parts.tokens.tokenizer, config.vocab_size, 1 + config.num_drafts, config.grammars
        )
        self.images = ImageOpener(parts.tokens.processor, config.images)
        self.open: dict[str, Sequence[Request]] = {}
        self.computed: dict[str, Sequence[Request]] = {}
        self.ready: list[RequestOutput] = []
        self.launched: list[Launched] = []
        self.stats = EngineStats(config.num_drafts)
        self.runner.warm_up(progress=sys.stderr.isatty())
        if self.features is not None:
            self.features.warm_up()
        if config.verifies_by_confidence:
            self.scheduler.verification = draft_policy(self.runner, parts.model.buckets, config, parts.model.key)

    def add(self, sequence: Sequence[Request], unopened: RequestImages | None) -> None:
        """Takes a new sequence; unopened: images that are not in its prompt yet."""
        with self.losing_all_on_failure():
            self.open[sequence.request_id] = sequence
            sequence.request.error = self.scheduler.add_sequence(sequence) or ""
            if sequence.request.error:
                return
            if sequence.request.constraint is not None:
                self.grammars.submit(sequence)
            if unopened is not None:
                self.images.submit(sequence, unopened)

    def step(self) -> bool:
        """Launches a prefill chunk and a decode step where there is work, and reads the results that are due.

        Returns whether there was anything to do.
        """
        with self.losing_all_on_failure(), collector_paused():
            num_due = len(self.launched)
            self._act_on_background_work()
            if not num_due:
                self._wait_for_a_start()
            self._launch(self._plan())
            if not self._config.zero_overhead_scheduling:
                num_due = len(self.launched)
            self._read(num_due)
            if not self.open:
                self.scheduler.check_idle()
        return bool(num_due or self.launched)

    def flush(self) -> None:
        """Reads all steps that were launched and not yet read; launches none."""
        with self.losing_all_on_failure():
            self._read(len(self.launched))

    def abort(self, request_ids: set[str]) -> tuple[int, int]:
        """Ends requests; see `Scheduler.abort`."""
        with self.losing_all_on_failure():
            for name in request_ids:
                self.computed.pop(name, None)
            return self.scheduler.abort(request_ids)

    def leave(self, sequence: Sequence[Request]) -> None:
        """Gives up a computed prompt, which another engine goes on with."""
        self.scheduler.hand_over(sequence)
        del self.open[sequence.request_id], self.computed[sequence.request_id]
        self.stats.finished["handed_over"] += 1

    @property
    def num_unfinished(self) -> int:
        """Requests that have not given their last output, computed prompts not counted."""
        return len(self.open) - len(self.computed)

    def most_cached_tokens(self, prompt_len: int) -> int | None:
        """How much of a prompt may be restored: of earlier tokens bounded replay leaves no windows in the consumers."""
        keep = self._config.keep_tokens
        return None if keep is None else max(prompt_len - keep, 0)

    def hand_out(self) -> list[RequestOutput]:
        """The outputs that came since the last call."""
        outputs, self.ready = self.ready, []
        return outputs

    @contextlib.contextmanager
    def losing_all_on_failure(self) -> Iterator[None]:
        """What fails or is interrupted within ends all that ran; those that wait are not touched.

        The cache was handed to a step that broke, and with it went their state. Each gives one output, handed out by
        the next step.
        """
        try:
            yield
        except BaseException as error:  # Ctrl-C too, which may come anywhere: no account that was open is relied on
            self.launched.clear()
            waiting = self.scheduler.reset()
            reported = {output.request_id for output in self.ready if output.finished}
            self.open = {name: sequence for name, sequence in self.open.items() if name not in reported}
            work = (self.grammars, self.images)
            forgotten = [sequence for sequence in waiting if any(one.is_lost(sequence) for one in work)]
            self.scheduler.abort([sequence.request_id for sequence in forgotten])
            lost = [sequence for sequence in self.open.values() if sequence not in waiting]
            for sequence in lost:
                if sequence.status < SequenceStatus.FINISHED_ABORTED:  # it ran, or its last token is lost
                    sequence.status = SequenceStatus.FINISHED_ABORTED
                sequence.request.error = (
                    sequence.request.error
                    or f"a step of the engine failed ({type(error).__name__}: {error}); the request can be sent again"
                )
            self._emit([output_without_token(sequence, self._config.max_num_batched_tokens) for sequence in lost])
            self.runner.reset()
            if self.features is not None:
                self.features.reset()
            raise

    def close(self) -> None:
        """Frees parameters, cache and requests. May be called again."""
        for kept in (self.open, self.computed, self.ready, self.launched):
            kept.clear()
        self.grammars.close()
        self.images.close()
        self._diagnose = None  # it holds the parameters
        self.runner.close()
        if self.features is not None:
            self.features.close()

    def _plan(self) -> StepPlan[Request]:
        """The next plan; requests that ended without a token have their outputs."""
        start = time.perf_counter()
        plan = self.scheduler.schedule()
        self._emit([output_without_token(sequence, self._config.max_num_batched_tokens) for sequence in plan.ignored])
        self.stats.seconds["schedule"] += time.perf_counter() - start
        return plan

    def _launch(self, plan: StepPlan[Request]) -> None:
        start = time.perf_counter()
        self.launched += launch(self.runner, plan, self._config, self.features)
        self.stats.add_launch(plan)
        self._note_starts(plan, start)
        self.stats.seconds["launch"] += time.perf_counter() - start

    def _note_starts(self, plan: StepPlan[Request], at: float) -> None:
        starting = [restore.sequence for restore in plan.restores]
        for sequence in starting + (plan.prefill.sequences if plan.prefill is not None else []):
            if not sequence.request.launched:
                sequence.request.launched = True
                self.stats.queue.add(at - sequence.arrival_time)

    def _read(self, count: int) -> None:
        """Waits for the first `count` launched steps and commits what they gave."""
        for _ in range(count):
            arrived = wait_for_results(self.launched.pop(0), self._clock)
            self._commit(arrived)
            self.stats.seconds["wait"] += arrived.at - arrived.asked
            self.stats.seconds["process"] += time.perf_counter() - arrived.at

    def _commit(self, arrived: Arrived) -> None:
        """Results to sequences, to outputs, and to what later steps go by."""
        step, result = arrived.step, arrived.result
        emitted = commit_results(self.scheduler, arrived)
        if not result.finite.all():
            explain_failures(step, emitted, self._diagnose)
            forget_failed_images(step, emitted, self.features)
        outputs = token_outputs(
            step, result, emitted, self._config.max_num_batched_tokens, self._config.confidence_temperatures
        )
        self.stats.add_results(step, result, emitted)
        learn_from_drafts(self.scheduler.verification, arrived)
        if isinstance(step, PrefillStep):
            self._note_first_tokens(outputs, arrived.at)
        self._emit(outputs)
        if self.grammars.in_use:
            for failure in follow_grammars(step, result):
                self._fail(failure)

    def _note_first_tokens(self, outputs: list[RequestOutput], at: float) -> None:
        """Of the outputs of a prefill step: how long each first token took, and which prompts wait for their export."""
        for output in outputs:
            if output.num_output_tokens == 1 and not output.message:
                sequence = self.open[output.request_id]
                self.stats.first_token.add(at - sequence.arrival_time)
                if self._config.engine_type is EngineType.PROMPT and not output.finished:
                    self.computed[output.request_id] = sequence

    def _act_on_background_work(self) -> None:
        """Lets the requests start whose grammar is compiled or whose images are opened; ends those that failed."""
        for grammar in self.grammars.poll():
            if isinstance(grammar, Failure):
                self._fail(grammar)
            self.grammars.settle(grammar.sequence)
        for images in self.images.poll():
            failure = images if isinstance(images, Failure) else self._place_images(images.sequence, images.value)
            if failure is not None:
                self._fail(failure)
            self.images.settle(images.sequence)

    def _place_images(self, sequence: Sequence[Request], prompt: ImagePrompt) -> Failure | None:
        """Gives a waiting sequence its prompt with the images in place; a failure if that is too long."""
        sequence.replace_prompt(prompt.token_ids, image_contents(prompt))
        sequence.most_cached_tokens = self.most_cached_tokens(sequence.prompt_len)
        if refusal := self.scheduler.refusal(sequence.prompt_len, sequence.max_tokens):
            return Failure(sequence, refusal, SequenceStatus.FINISHED_IGNORED)
        sequence.request.image_prompt = prompt
        return None

    def _wait_for_a_start(self) -> None:
        """Waits a little if no request can run before its grammar or its images are there."""
        grammars, images = self.grammars.pending, self.images.pending
        if len(grammars | images) == self.num_unfinished > 0:
            (self.grammars if grammars else self.images).wait(_WAIT)

    def _fail(self, failure: Failure) -> None:
        """Ends a sequence; the next plan reports it."""
        failure.sequence.request.error = failure.reason
        self.scheduler.abort([failure.sequence.request_id], failure.status)

    def _emit(self, outputs: list[RequestOutput]) -> None:
        self.ready += outputs
        for output in outputs:
            if output.finished:
                del self.open[output.request_id]
                self.computed.pop(output.request_id, None)
                self.stats.finished[output.finish_reason] += 1
