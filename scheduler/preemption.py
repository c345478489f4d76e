"""Who gives way for blocks that are needed now."""

from collections import Counter
from collections.abc import Iterable

from .block_manager import BlockManager
from .sequence import Sequence


def select_preemptions(missing: int, candidates: Iterable[Sequence], pool: BlockManager) -> list[Sequence]:
    """The sequences that give up all so that `missing` blocks are free; none if not even all candidates would do.

    A block is free when all that hold it have let it go, so what a sequence gives depends on who else gives way.
    They are taken in the given order until it is enough. Those are spared all of whose blocks others hold still, who
    would give way in vain.

    Arguments:
        missing: more than are free.
        candidates: sequences that hold blocks of the pool, the first to give way first.
        pool: where the blocks are.
    """
    num_free = pool.num_free
    let_go: Counter[int] = Counter()
    chosen: list[Sequence] = []

    def gain(sequence: Sequence) -> int:
        """Its blocks that nobody holds once all have let go that `let_go` counts."""
        return sum(let_go[block] == pool.num_references(block) for block in sequence.block_table)

    for sequence in candidates:
        if num_free >= missing:
            break
        let_go.update(sequence.block_table)
        chosen.append(sequence)
        num_free += gain(sequence)
    if num_free < missing:
        return []
    return [sequence for sequence in chosen if gain(sequence)]
