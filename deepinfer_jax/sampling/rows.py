"""What each row of a step asks for."""

from typing import NamedTuple

from jax import Array

GREEDY_TEMPERATURE = 1e-5


class SamplingRows(NamedTuple):
    """Parameters of the rows. All arrays are `[rows]` unless said otherwise.

    Attributes:
        temperature: float32, > 0; greedy rows hold GREEDY_TEMPERATURE.
        greedy: bool, exact argmax, lowest id on ties.
        top_p: float32; >= 1 disables.
        top_k: int32; negative disables.
        seed: uint32 [rows, 2], low and high word of the request's `seq_seed`.
        position: int32, index of the token to be produced in its sequence.
        banned: int32, an id that must not be produced; negative for none.
        forced: int32, the id that must be produced; negative for none. It bypasses the filters and
            the ban (DB §7.6).
    """

    temperature: Array
    greedy: Array
    top_p: Array
    top_k: Array
    seed: Array
    position: Array
    banned: Array
    forced: Array
