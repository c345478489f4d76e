"""The steps and state ops that an engine will ask of its runner, and so the programs that this compiles."""

from dataclasses import dataclass

from deepinfer_jax.runtime.state_ops import StateOp
from deepinfer_jax.runtime.step_program import Kind


@dataclass(frozen=True, kw_only=True)
class RunnerDuties:
    """What will be asked of a runner.

    Attributes:
        prefills, decodes: whether such steps will run.
        moves_slots: whether `read_slots` and `restore` will run.
        moves_blocks: whether `read_blocks` and `write_blocks` will run.
        drafts: whether `draft` will run.
        poisons: whether `poison` will run.
    """

    prefills: bool = True
    decodes: bool = True
    moves_slots: bool = False
    moves_blocks: bool = False
    drafts: bool = False
    poisons: bool = False

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Of steps that will run."""
        wanted: dict[Kind, bool] = {"prefill": self.prefills, "decode": self.decodes}
        return tuple(kind for kind in wanted if wanted[kind])

    @property
    def state_ops(self) -> tuple[StateOp, ...]:
        """State ops that will run."""
        wanted: dict[StateOp, bool] = {
            "read_slots": self.moves_slots,
            "restore": self.moves_slots,
            "read_blocks": self.moves_blocks,
            "write_blocks": self.moves_blocks,
            "draft": self.drafts,
            "poison": self.poisons,
            "write_adjustments": True,
        }
        return tuple(op for op in wanted if wanted[op])


STEPS_ALONE = RunnerDuties()
