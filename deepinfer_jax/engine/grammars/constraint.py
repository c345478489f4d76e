"""The grammar of one request, while the engine holds it."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deepinfer_jax.structured import Matcher, StructuredArgs


@dataclass(slots=True)
class Constraint:
    """What the next step of a sequence may produce; a function of its output and of the drafts behind it.

    Attributes:
        args: what was asked for.
        masks: uint32 [rows, words], which tokens the rows of the next step may give (`Matcher.fill_masks`); row 0 is
            that of the next token, row j the one after draft j − 1.
        masked: bool [rows], which of them are written; in the others everything may come.
        matcher: None until the grammar is compiled.
        num_accepted: output tokens that the matcher knows.
    """

    args: StructuredArgs
    masks: npt.NDArray[np.uint32]
    masked: npt.NDArray[np.bool_]
    matcher: Matcher | None = None
    num_accepted: int = 0

    def advance(self, output_token_ids: list[int], drafts: list[int]) -> None:
        """Takes what is new in the output, and makes the masks of the next step.

        Raises GrammarError for what the grammar does not allow; only tokens that were forced can be so.
        """
        assert self.matcher is not None
        self.matcher.accept(output_token_ids[self.num_accepted :])
        self.num_accepted = len(output_token_ids)
        self.masked = self.matcher.fill_masks(drafts, self.masks)

    def bits(self) -> int:
        """`masked` as an integer: bit j is row j."""
        return int(self.masked @ (1 << np.arange(len(self.masked))))
