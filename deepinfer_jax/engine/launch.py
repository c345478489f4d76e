"""A plan of the scheduler to the device, in the order in which the device is to run it."""

import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from deepinfer_jax.engine.config import EngineConfig
from deepinfer_jax.engine.grammars.masks import look_ahead, write_masks
from deepinfer_jax.engine.images.features import FeatureCache
from deepinfer_jax.engine.requests.adjustments import write_adjustments
from deepinfer_jax.engine.requests.columns import (
    forced_tokens,
    mask_bits,
    prefill_columns,
    sampling_columns,
    slot_places,
)
from deepinfer_jax.engine.requests.request import Request
from deepinfer_jax.runtime.runner import Runner
from deepinfer_jax.runtime.state_ops import PendingBytes
from deepinfer_jax.runtime.step_result import InFlight
from deepinfer_jax.scheduler import DecodeStep, PrefillStep, Restore, StepPlan, blocks_for

_POISON = 0xFF
"""A byte; as many of it as a number has are NaN in every kind of float."""


@dataclass(frozen=True)
class Launched:
    """A step that was launched and is not committed yet.

    Attributes:
        step: as it was planned.
        result: what it will give.
        states: the states that it leaves in the slots of `step.captures`, in their order; None if there are none.
        at: when; time.perf_counter().
    """

    step: PrefillStep[Request] | DecodeStep[Request]
    result: InFlight
    states: PendingBytes | None
    at: float = field(default_factory=time.perf_counter)

    def captured(self) -> list[npt.NDArray[np.uint8]]:
        """The states, each uint8 [bytes of a slot] of its own; waits for them."""
        return [] if self.states is None else self.states.rows()


def launch(
    runner: Runner,
    plan: StepPlan[Request],
    config: EngineConfig,
    features: FeatureCache | None = None,
) -> list[Launched]:
    """Launches a plan: what others left behind is poisoned, earlier state comes back, changes of logits and masks are
    written, then images that the prefill step needs are encoded; then the prefill step and the decode step. A snapshot
    is read before the next step can touch its slot.

    features: of the vision tower; None without one.
    """
    if config.poison_freed_state:
        runner.poison(plan.discarded_blocks, plan.discarded_slots)
        for snapshot in plan.discarded_snapshots:
            snapshot.fill(_POISON)
    if plan.restores:
        _restore(runner, plan.restores, config)
    write_adjustments(runner, plan, config.vocab_size)
    any_masked = write_masks(runner, plan)
    launched = []
    if plan.prefill is not None:
        images = None if features is None else features.for_step(plan.prefill)
        result = runner.prefill(plan.prefill, prefill_columns(plan.prefill, config.keep_tokens), images)
        launched.append(Launched(plan.prefill, result, _capture(runner, plan.prefill)))
    if plan.decode is not None:
        params = [sequence.request.params for sequence in plan.decode.sequences]
        forced = forced_tokens(plan.decode) if any(p.golden_token_ids for p in params) else None
        masked = mask_bits(plan.decode) if any_masked else None
        result = runner.decode(plan.decode, forced, masked, any(p.top_logprobs for p in params))
        launched.append(Launched(plan.decode, result, _capture(runner, plan.decode)))
    return launched


def _restore(runner: Runner, restores: tuple[Restore[Request], ...], config: EngineConfig) -> None:
    sequences = [restore.sequence for restore in restores]
    for sequence, restore in zip(sequences, restores, strict=True):
        if restore.blocks is not None:
            held = sequence.block_table[: blocks_for(restore.num_tokens, config.tokens_per_block)]
            runner.write_blocks(sequence.dp_rank, held, restore.blocks)
    runner.restore(
        **slot_places(sequences),
        lengths=np.asarray([restore.num_tokens for restore in restores], np.int32),
        last_tokens=np.asarray([sequence.last_token_id for sequence in sequences], np.int32),
        block_tables=[sequence.block_table for sequence in sequences],
        sampling=sampling_columns(sequences),
        states=np.stack([restore.state for restore in restores]),
    )
    # What another engine computed decodes next; drafts are no state of a sequence but a function of its text.
    decoding = [restore.sequence for restore in restores if restore.blocks is not None]
    if config.num_drafts and decoding:
        runner.draft(**slot_places(decoding))
        look_ahead(runner, decoding)


def _capture(runner: Runner, step: PrefillStep[Request] | DecodeStep[Request]) -> PendingBytes | None:
    if not step.captures:
        return None
    rows = np.asarray(step.captures)
    # As planned with this step as the newest: exact, since with drafts only prefill steps are captured.
    lengths = np.asarray([step.sequences[row].num_tokens for row in step.captures], np.int32)
    return runner.read_slots(step.dp_rank[rows], step.slots[rows], lengths)
