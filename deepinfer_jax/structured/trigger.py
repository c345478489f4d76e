"""Follows a request's trigger text token by token; the grammar holds from its end on (DB §8.4)."""

from dataclasses import dataclass, replace


class Trigger:
    """The trigger's ids, and by how much of it a text that broke off after some of them still ends.

    Arguments:
        ids: the trigger; () if there is none.
        bound: the id after which it must come at once; None if there is none.
    """

    def __init__(self, ids: tuple[int, ...], bound: int | None) -> None:
        self.ids = ids
        self.bound = bound
        # border[n]: the longest proper beginning of ids[:n] that is also its end (Knuth, Morris and Pratt).
        self.border = [0] * (len(ids) + 1)
        for n in range(1, len(ids)):
            self.border[n + 1] = self.longer(self.border[n], ids[n])

    def longer(self, matched: int, token: int) -> int:
        """How many ids of the trigger a text ends with after `token`, which ended with `matched` of them before."""
        while self.ids[matched] != token:
            if matched == 0:
                return 0
            matched = self.border[matched]
        return matched + 1


@dataclass(frozen=True)
class Progress:
    """
    Attributes:
        matched: ids of the trigger that the text ends with; all of them once they were there.
        bound: whether the bound token has come: the rest of the trigger must come now.
    """

    matched: int = 0
    bound: bool = False

    def pending(self, trigger: Trigger) -> bool:
        """Whether the text is not yet the grammar's."""
        return self.matched < len(trigger.ids)

    def forced(self, trigger: Trigger) -> int | None:
        """The one id that may come; None if any may."""
        return trigger.ids[self.matched] if self.bound and self.pending(trigger) else None

    def after(self, token: int, trigger: Trigger) -> "Progress":
        """With one more token, one that may come, while the trigger is pending.

        The bound token itself may belong to the trigger.
        """
        return replace(self, matched=trigger.longer(self.matched, token), bound=self.bound or token == trigger.bound)
