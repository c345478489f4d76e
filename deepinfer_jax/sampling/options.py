"""What the whole engine samples by; static, so that what is off is not in the programs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SamplerOptions:
    """For all rows.

    Attributes:
        blacklist: ids that are never sampled (DB §7.2); drafts and prompt log-probabilities know nothing of it.
        force_top_k: only so many largest logits exist, the lowest ids on ties (DB §7.9); 0: all.
        sum_smaller_probs: whether `Sampled` has the fields of DB §7.8.
        confidence_temperatures: of the draft model's confidence head, one per draft or one for all; by them the drafts
            are chosen that a step verifies if it has not room for all.
    """

    blacklist: tuple[int, ...] = ()
    force_top_k: int = 0
    sum_smaller_probs: bool = False
    confidence_temperatures: tuple[float, ...] = (1.0,)


NO_OPTIONS = SamplerOptions()
