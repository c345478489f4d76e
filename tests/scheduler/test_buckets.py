"""The table of step programs: how large it is, and that some program serves every legal step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax.scheduler import Bucket, BucketTable, bucket_table

pytestmark = pytest.mark.pure


def table(**limits: int | bool) -> BucketTable:
    defaults = {
        "max_num_seqs": 256,
        "num_drafts": 0,
        "max_prefill_tokens": 512,
        "max_chunk": 512,
        "max_blocks": 1024,
        "max_programs": 12,
    }
    return bucket_table(**(defaults | limits))  # type: ignore[arg-type]


def test_twelve_programs_are_three_widths_of_two_decode_and_two_prefill_shapes() -> None:
    buckets = table()
    assert buckets.decode == tuple(Bucket(rows, 1, width) for rows in (16, 256) for width in (16, 128, 1024))
    assert buckets.prefill == tuple(
        Bucket(rows, time, width) for rows, time in ((1, 512), (8, 64)) for width in (16, 128, 1024)
    )
    assert len(buckets.all) == 12


def test_three_programs_are_two_to_decode_and_one_to_prefill() -> None:
    buckets = table(max_programs=3, max_num_seqs=64, max_blocks=100)
    assert buckets.decode == (Bucket(8, 1, 100), Bucket(64, 1, 100))
    assert buckets.prefill == (Bucket(4, 128, 100),)


def test_one_sequence_needs_one_decode_and_one_prefill_program_per_width() -> None:
    buckets = table(max_num_seqs=1, max_blocks=16)
    assert buckets.all == (Bucket(1, 1, 16), Bucket(1, 512, 16))


def test_drafts_are_in_the_time_of_decode_programs() -> None:
    assert {bucket.time for bucket in table(num_drafts=5).decode} == {6}


def test_decode_programs_for_fewer_drafts_stand_beside_those_for_all() -> None:
    buckets = table(num_drafts=5, decode_sizes=2)
    assert buckets.decode == tuple(
        Bucket(rows, 6, width, packed)
        for rows, tokens in ((16, 40), (256, 628))
        for width in (16, 1024)
        for packed in (0, tokens)
    )
    assert len(buckets.all) == 12
    assert [bucket.tokens for bucket in buckets.decode_sizes(17, 16)] == [628, 1536]
    assert buckets.choose_decode(17, 16) == Bucket(256, 6, 16)
    small = table(num_drafts=5, decode_sizes=2, max_programs=3, max_num_seqs=8, max_blocks=16)
    assert small.decode == (Bucket(8, 6, 16), Bucket(8, 6, 16, 20))
    assert table(num_drafts=5, decode_sizes=2, max_programs=2, max_num_seqs=8).decode == (Bucket(8, 6, 1024),)
    assert [b.tokens for b in table(num_drafts=7, decode_sizes=3, max_num_seqs=1, max_blocks=8).decode] == [8, 2, 4]


def test_row_ladders_have_a_constant_ratio_and_exact_roots() -> None:
    def rows(n: int, programs: int) -> list[int]:
        return [bucket.rows for bucket in table(max_num_seqs=n, max_programs=programs, max_blocks=8).decode]

    assert rows(256, 10) == [2, 4, 8, 16, 32, 64, 128, 256]
    assert rows(243, 7) == [3, 9, 27, 81, 243]  # 243 ** (1 / 5) is 3.0000000000000004 in floats
    assert rows(3, 12) == [2, 3]


def test_without_chunks_the_long_program_stays_when_there_is_only_one() -> None:
    assert table(max_programs=3, chunked_prefill=False).prefill_shapes == ((1, 512),)
    assert table(max_programs=3, chunked_prefill=True).prefill_shapes == ((4, 128),)


def test_the_smallest_fitting_program_is_chosen() -> None:
    buckets = table()
    assert buckets.choose_decode(16, 16) == Bucket(16, 1, 16)
    assert buckets.choose_decode(17, 17) == Bucket(256, 1, 128)
    assert buckets.choose_prefill((8, 64), 129) == Bucket(8, 64, 1024)
    with pytest.raises(ValueError, match="no program is large enough for a decode step of 257 rows and 1 blocks"):
        buckets.choose_decode(257, 1)
    with pytest.raises(ValueError, match="no program is large enough for a prefill step"):
        buckets.choose_prefill((8, 64), 1025)


@given(
    max_num_seqs=st.integers(1, 300),
    num_drafts=st.integers(0, 5),
    max_prefill_tokens=st.integers(1, 3000),
    max_chunk=st.integers(1, 3000),
    max_blocks=st.integers(1, 9000),
    max_programs=st.integers(2, 20),
    chunked_prefill=st.booleans(),
    decode_sizes=st.integers(1, 3),
    data=st.data(),
)
def test_some_program_serves_every_legal_step_and_there_are_not_too_many(
    max_num_seqs: int,
    num_drafts: int,
    max_prefill_tokens: int,
    max_chunk: int,
    max_blocks: int,
    max_programs: int,
    chunked_prefill: bool,
    decode_sizes: int,
    data: st.DataObject,
) -> None:
    buckets = bucket_table(
        max_num_seqs=max_num_seqs,
        num_drafts=num_drafts,
        max_prefill_tokens=max_prefill_tokens,
        max_chunk=max_chunk,
        max_blocks=max_blocks,
        max_programs=max_programs,
        chunked_prefill=chunked_prefill,
        decode_sizes=decode_sizes,
    )
    assert len(buckets.all) <= max_programs
    for kind in (buckets.decode, buckets.prefill):  # with chunks of one token a bucket may be of both kinds
        assert list(kind) == sorted(set(kind))
    for bucket in buckets.prefill:
        assert bucket.rows * bucket.time <= max_prefill_tokens
        assert 1 <= bucket.rows <= max_num_seqs and 1 <= bucket.time <= max_chunk
    if max_programs >= 4 or not chunked_prefill:
        assert max(time for _, time in buckets.prefill_shapes) == min(max_chunk, max_prefill_tokens)
    assert max(bucket.rows for bucket in buckets.decode) == max_num_seqs
    assert {bucket.time for bucket in buckets.decode} == {1 + num_drafts}

    rows, width = data.draw(st.integers(1, max_num_seqs)), data.draw(st.integers(1, max_blocks))
    chosen = buckets.choose_decode(rows, width)
    assert chosen.rows >= rows and chosen.width >= width
    assert not any(
        rows <= b.rows <= chosen.rows and width <= b.width <= chosen.width
        for b in buckets.decode
        if b != chosen and not b.packed
    )
    sizes = buckets.decode_sizes(rows, width)
    assert sizes[-1] == chosen and not chosen.packed and len(sizes) <= decode_sizes
    tokens = [bucket.tokens for bucket in sizes]
    assert tokens == sorted(set(tokens)) and tokens[0] >= chosen.rows
    assert {(b.rows, b.time, b.width) for b in sizes} == {(chosen.rows, chosen.time, chosen.width)}
    for shape in buckets.prefill_shapes:
        assert buckets.choose_prefill(shape, width).width >= width


@pytest.mark.parametrize(
    "limits", [{"max_num_seqs": 0}, {"max_chunk": 0}, {"max_blocks": 0}, {"num_drafts": -1}, {"max_programs": 1}]
)
def test_impossible_limits_are_refused(limits: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be at least 1, num_drafts at least 0 and max_programs at least 2"):
        table(**limits)
