"""The static shapes of step programs (`Bucket`): few enough to compile all at start, close enough to waste little."""

from dataclasses import dataclass

MAX_PREFILL_ROWS = 8
"""Most sequences of a prefill step, per dp rank."""


@dataclass(frozen=True, order=True)
class Bucket:
    """The static shape of one step program, per dp rank.

    Attributes:
        rows: sequences.
        time: most new tokens of each.
        width: blocks of each block table that the program reads.
        packed: most new tokens of all, if that is fewer than rows · time; else 0.
    """

    rows: int
    time: int
    width: int
    packed: int = 0

    @property
    def tokens(self) -> int:
        """New tokens that the program computes, padding included."""
        return self.packed or self.rows * self.time


@dataclass(frozen=True)
class BucketTable:
    """All step programs of an engine.

    Attributes:
        decode: in ascending order; time is 1 + drafts in all of them.
        prefill: in ascending order.
    """

    decode: tuple[Bucket, ...]
    prefill: tuple[Bucket, ...]

    @property
    def all(self) -> tuple[Bucket, ...]:
        return self.decode + self.prefill

    @property
    def prefill_shapes(self) -> tuple[tuple[int, int], ...]:
        """The different (rows, time) of the prefill programs, in ascending order."""
        return tuple(sorted({(bucket.rows, bucket.time) for bucket in self.prefill}))

    def choose_decode(self, rows: int, width: int) -> Bucket:
        """The smallest decode program with so many rows and blocks. Raises ValueError if none has."""
        fitting = [bucket for bucket in self.decode if bucket.rows >= rows and bucket.width >= width]
        return _smallest(fitting, f"a decode step of {rows} rows and {width} blocks", self.decode)

    def decode_sizes(self, rows: int, width: int) -> tuple[Bucket, ...]:
        """The programs for the same sequences as that of `choose_decode`, which comes last, by the tokens of a step."""
        chosen = self.choose_decode(rows, width)
        same = [bucket for bucket in self.decode if (bucket.rows, bucket.width) == (chosen.rows, chosen.width)]
        return tuple(sorted(same, key=lambda bucket: bucket.tokens))

    def choose_prefill(self, shape: tuple[int, int], width: int) -> Bucket:
        """The narrowest prefill program of this (rows, time) with so many blocks. Raises ValueError if none has."""
        fitting = [bucket for bucket in self.prefill if (bucket.rows, bucket.time) == shape and bucket.width >= width]
        return _smallest(fitting, f"a prefill step of (rows, time) {shape} and {width} blocks", self.prefill)


def bucket_table(
    *,
    max_num_seqs: int,
    num_drafts: int,
    max_prefill_tokens: int,
    max_chunk: int,
    max_blocks: int,
    max_programs: int,
    chunked_prefill: bool = True,
    decode_sizes: int = 1,
) -> BucketTable:
    """The step programs for the given limits, at most `max_programs`; some program serves every legal step.

    Arguments:
        max_num_seqs: most sequences of a dp rank.
        num_drafts: drafts that a decode step verifies per sequence.
        max_prefill_tokens: most tokens of a prefill step per dp rank, padding included.
        max_chunk: most new tokens of one sequence in a prefill step.
        max_blocks: most blocks of one sequence.
        max_programs: at least 2, one to prefill and one to decode.
        chunked_prefill: False: the longest prefill program takes min(max_chunk, max_prefill_tokens) tokens of one
            sequence however few programs there are, since prompts are not cut.
        decode_sizes: decode programs for the same sequences, as far as there is room: one for all drafts, and others
            for fewer of them in all, with a constant ratio from one token per sequence.

    Widths are up to three levels with a constant ratio from 16 blocks to max_blocks, decode rows a ladder with a
    constant ratio up to max_num_seqs. Of prefill there are two shapes, one long chunk or several shorter ones; with
    two or three programs in all, one.
    """
    if min(max_num_seqs, max_prefill_tokens, max_chunk, max_blocks) < 1 or num_drafts < 0 or max_programs < 2:
        raise ValueError(
            "max_num_seqs, max_prefill_tokens, max_chunk and max_blocks must be at least 1, num_drafts at least 0 and "
            f"max_programs at least 2, got {max_num_seqs}, {max_prefill_tokens}, {max_chunk}, {max_blocks}, "
            f"{num_drafts} and {max_programs}"
        )
    long, short = (
        _prefill_shape(1, max_prefill_tokens, max_chunk),
        _prefill_shape(min(MAX_PREFILL_ROWS, max_num_seqs), max_prefill_tokens, max_chunk),
    )
    if max_programs >= 4:
        shapes = sorted({long, short})
    elif chunked_prefill:
        shapes = [_prefill_shape(min(4, max_num_seqs), max_prefill_tokens, max_chunk)]
    else:
        shapes = [long]
    # Two sizes of decode step are worth more than another width: most steps are decode steps.
    decode_levels = 2 if max_num_seqs > 1 else 1
    levels = max(1, min(3, max_programs // (len(shapes) + decode_levels * decode_sizes)))
    widths = _widths(max_blocks, levels)
    decode_programs = max_programs // len(widths) - len(shapes)  # of each width
    sizes = min(decode_sizes, decode_programs)
    rows = _ladder(max_num_seqs, decode_programs // sizes)
    time = 1 + num_drafts
    decode = {
        Bucket(count, time, width, packed)
        for count in rows
        for width in widths
        for packed in _packed_sizes(count, time, sizes)
    }
    return BucketTable(
        decode=tuple(sorted(decode)),
        prefill=tuple(Bucket(count, time, width) for count, time in shapes for width in widths),
    )


def _prefill_shape(rows: int, max_prefill_tokens: int, max_chunk: int) -> tuple[int, int]:
    """(rows, time) with at most max_prefill_tokens tokens; fewer rows where each would get less than a token."""
    rows = min(rows, max_prefill_tokens)
    return rows, min(max_chunk, max_prefill_tokens // rows)


def _widths(max_blocks: int, levels: int) -> list[int]:
    """At most `levels` widths with a constant ratio from 16 to max_blocks; max_blocks alone if that is no more."""
    if max_blocks <= 16 or levels == 1:
        return [max_blocks]
    middle = next(width for width in range(16, max_blocks + 1) if width * width >= 16 * max_blocks)
    return sorted({16, max_blocks} if levels == 2 else {16, middle, max_blocks})


def _packed_sizes(rows: int, time: int, levels: int) -> list[int]:
    """`Bucket.packed` of at most `levels` programs: ceil(rows · time ** (i / levels)), i = 1 … levels, 0 the last."""
    sizes = range(rows + 1, rows * time)
    # In integers, as in `_ladder`.
    smaller = (next((size for size in sizes if size**levels >= rows**levels * time**i), 0) for i in range(1, levels))
    return [0, *(size for size in smaller if size)]


def _ladder(top: int, levels: int) -> list[int]:
    """At most `levels` sizes ceil(top ** (i / levels)), i = 1 … levels: 256 in two levels is 16 and 256."""
    sizes = range(1, top + 1)
    # In integers: the float power of an exact root may lie just above it.
    return sorted({next(size for size in sizes if size**levels >= top**i) for i in range(1, levels + 1)})


def _smallest(fitting: list[Bucket], wanted: str, table: tuple[Bucket, ...]) -> Bucket:
    if not fitting:
        raise ValueError(f"no program is large enough for {wanted}; there are {', '.join(map(str, table))}")
    return min(fitting)
