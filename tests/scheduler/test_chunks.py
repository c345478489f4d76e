"""Corners of the choice of chunks that traffic reaches rarely."""

import pytest

from deepinfer_jax.scheduler.chunks import PrefillPolicy, Room
from deepinfer_jax.scheduler.prefix_cache import NO_HIT
from tests.support.scheduler_twin import make_sequence

pytestmark = pytest.mark.pure


def test_a_whole_prompt_beyond_the_budget_leaves_nothing_for_what_is_behind_it() -> None:
    policy = PrefillPolicy(tokens_per_block=4, chunked_prefill=False, spare_tokens=2, for_snapshots=False)
    whole, again = make_sequence(0, 10), make_sequence(1, 10)
    again.num_preemptions = 1
    room = Room(tokens=[9], blocks=[20], slots=[2], load=[0], vacancies=2)
    _, chunks = policy.choose([(2, 16)], [], [whole, again], room, lambda *_: NO_HIT)
    assert [(chunk.sequence, chunk.num_tokens) for chunk in chunks] == [(whole, 10)]
    assert room.tokens == [9], "the room is the caller's"
