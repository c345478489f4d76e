"""Selects the sequences that are preempted for blocks that are needed now and not free.

Of the sequences of the same dp rank that hold blocks the one that arrived last is preempted, the one that decodes
itself if it is that one. (DeepInfer takes the one with most output, and also when no block is needed: DB §5.5, §15.2
trap 22.) A sequence whose blocks older ones hold too would free nothing, and is passed over. A started prompt that
finds no younger one waits; a new one never preempts.

The preempted one gives all up and is computed again (`Sequence.prefill_len`), from its place in the order of arrival,
as soon as all blocks for that are free; the results of its steps in flight are dropped. It finds again what is still
cached of it. With `stop_preempted_request` it finishes instead.
"""

from collections import Counter
from collections.abc import Iterable

from .block_manager import BlockManager
from .sequence import Sequence


def select_preemptions(missing: int, candidates: Iterable[Sequence], pool: BlockManager) -> list[Sequence]:
    """The sequences to preempt so that `missing` blocks are free; none if not even all candidates would do.

    A block is free when all that hold it have let it go, so what a sequence frees depends on who else is preempted.
    They are chosen in the given order until it is enough. Those are spared all of whose blocks others still hold: they
    would be preempted in vain.

    Arguments:
        missing: more than are free.
        candidates: sequences that hold blocks of the pool, the first to be preempted first.
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
