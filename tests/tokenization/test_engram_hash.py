"""Engram rows on the host: the numbers of model.md §14 and Appendix B, DB §16, and both golden folders."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax.tokenization import (
    DEAD,
    CompressedTokenizer,
    CompressedVocabulary,
    engram_multipliers,
    engram_offsets,
    engram_primes,
    ngram_rows,
    ngram_windows,
)
from tests.support.paths import GOLDEN, RELEASED_CONFIG

pytestmark = pytest.mark.pure

FOLDERS = ("A_s28", "B_s15")
# case.mode.npz; the stale files (case.mode.stale.npz) record no rows.
CASES = [path for folder in FOLDERS for path in sorted((GOLDEN / folder).glob("*.npz")) if path.name.count(".") == 2]


def released():
    primes = engram_primes([1, 14], 16_000_000, 4, 8)
    return primes, np.stack([engram_multipliers(layer, 4, 99_092) for layer in (1, 14)])


def tables(text):
    ngram = text["engram_max_ngram_size"]
    primes = engram_primes(text["engram_layer_ids"], text["engram_vocab_size"], ngram, text["engram_n_heads"])
    multipliers = [engram_multipliers(i, ngram, text["engram_compressed_vocab_size"]) for i in text["engram_layer_ids"]]
    return primes, np.stack(multipliers)


def text_config(folder):
    return json.loads((GOLDEN / folder / "config.json").read_text())["text_config"]


def test_released_primes_are_those_of_appendix_b():
    primes, _ = released()
    last_digits = [
        [57, 79, 81, 97, 121, 129, 133, 183],
        [189, 207, 211, 253, 277, 289, 307, 321],
        [339, 381, 393, 399, 403, 409, 447, 463],
        [477, 487, 499, 507, 511, 573, 609, 627],
        [667, 669, 693, 697, 711, 729, 759, 769],
        [781, 799, 813, 819, 841, 877, 879, 889],
    ]
    np.testing.assert_array_equal(primes.reshape(6, 8), 16_000_000 + np.array(last_digits))


def test_released_table_sizes_equal_the_configuration():
    released_config = RELEASED_CONFIG
    expected = json.loads(released_config.read_text())["text_config"]["engram_num_embeddings"]
    primes, _ = released()
    assert primes.sum(axis=(1, 2)).tolist() == expected == [384_006_168, 384_016_682]


def test_primes_of_small_tables_restart_for_every_row_without_reuse():
    # DB §16: two n-gram orders, four heads, layers 1 and 15.
    assert engram_primes([1, 15], 1000, 3, 4).tolist() == [
        [[1009, 1013, 1019, 1021], [1031, 1033, 1039, 1049]],
        [[1051, 1061, 1063, 1069], [1087, 1091, 1093, 1097]],
    ]


@given(start=st.integers(1, 5000), heads=st.integers(1, 3), ngram=st.integers(2, 4))
def test_primes_equal_a_search_written_as_the_specification_says(start, heads, ngram):
    def is_prime(n):
        return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))

    used, expected = set(), []
    for _layer in range(2):
        for _order in range(ngram - 1):
            candidate = start - 1
            for _head in range(heads):
                candidate += 1
                while not is_prime(candidate) or candidate in used:
                    candidate += 1
                used.add(candidate)
                expected.append(candidate)
    assert engram_primes([3, 9], start, ngram, heads).ravel().tolist() == expected


def test_strong_pseudoprimes_are_not_taken_for_primes():
    # The smallest composites that pass Miller-Rabin for the bases 2; 2, 3; 2, 3, 5; 2, 3, 5, 7; 2…11 and 2…17.
    for composite in (2047, 1_373_653, 25_326_001, 3_215_031_751, 2_152_302_898_747, 341_550_071_728_321):
        assert engram_primes([0], composite, 2, 1)[0, 0, 0] > composite


def test_multipliers_are_those_of_appendix_b_and_of_the_engine_vectors():
    _, multipliers = released()
    assert multipliers.tolist() == [
        [76632096046245, 4839876093313, 35959672319349, 73987337458391],
        [67716810739261, 51510806800915, 30921347202721, 82619226485591],
    ]
    assert engram_multipliers(1, 3, 1000).tolist() == [7593627661414631, 479593001838623, 3563315849468963]
    assert engram_multipliers(15, 3, 1000).tolist() == [2865651367968763, 5551170510236881, 5343936160617101]


@given(layer=st.integers(0, 60), vocabulary=st.integers(1, 200_000))
def test_no_product_overflows(layer, vocabulary):
    multipliers = engram_multipliers(layer, 4, vocabulary)
    assert all(int(m) % 2 == 1 and int(m) * (vocabulary - 1) < 2**63 for m in multipliers)


def test_tiny_tables_and_rows_are_those_of_model_md():
    # model.md §14.
    primes = engram_primes([1, 2], 100, 4, 2)
    assert primes.tolist() == [
        [[101, 103], [107, 109], [113, 127]],
        [[131, 137], [139, 149], [151, 157]],
    ]
    assert primes.sum(axis=(1, 2)).tolist() == [660, 864]
    multipliers = np.stack([engram_multipliers(layer, 4, 256) for layer in (1, 2)])
    assert multipliers.tolist() == [
        [29662608052400909, 1873410163432121, 13919202536988139, 28638879857136817],
        [29614367931768699, 14359748903426231, 8766307535087495, 27646881644150121],
    ]
    assert ngram_rows(np.array([5, 7, 11, 13]), primes, multipliers).tolist() == [
        [80, 129, 292, 325, 479, 659],
        [101, 168, 400, 455, 647, 748],
    ]


def test_the_rows_of_one_released_window_are_known():
    rows = ngram_rows(np.array([5, 7, 11, 13]), *released())
    assert rows.reshape(6, 8).tolist() == [
        [6961830, 31143904, 34796895, 48021142, 75858929, 90471933, 97778503, 125113896],
        [128920094, 146640906, 168356892, 188372380, 206667341, 223815044, 225536255, 253542237],
        [267226692, 284872852, 289916976, 308439827, 331455479, 349978782, 360629759, 372696692],
        [937800, 17223952, 33567381, 49796588, 65911473, 83686889, 100719816, 117237088],
        [132251331, 152090433, 166151179, 189829054, 200698844, 219246730, 228827578, 248022513],
        [264480591, 283190663, 290632749, 307537539, 321521072, 342954535, 364591066, 376768797],
    ]


def test_released_rows_at_the_start_of_a_sequence_are_known():
    rows = ngram_rows(ngram_windows(np.array([100]), max_ngram=4, pad=2), *released())
    assert rows.reshape(6, 8).tolist() == [
        [4052413, 23667694, 42906971, 52829082, 75741025, 88719377, 111210122, 112422857],
        [138893193, 154754281, 160059424, 191821447, 207733256, 223702343, 239672137, 250328800],
        [270913409, 282584305, 299653391, 308191258, 324551334, 349093302, 360573537, 378065828],
        [12021899, 20784535, 37706961, 54326366, 70637610, 83563719, 102518839, 112022409],
        [129899157, 150805120, 161683417, 187500518, 205864025, 218060649, 227759873, 252338043],
        [258127387, 282088587, 288292330, 306955190, 332733788, 348791174, 365686218, 370160343],
    ]


def test_a_dead_position_blanks_itself_and_everything_older():
    # T24: 11 and 12 lie behind the image at index 2, so they are pad although they are text.
    windows = ngram_windows(np.array([11, 12, DEAD, 13, 14]), max_ngram=4, pad=0)
    assert windows.tolist() == [
        [11, 0, 0, 0],
        [12, 11, 0, 0],
        [0, 0, 0, 0],
        [13, 0, 0, 0],
        [14, 13, 0, 0],
    ]


@given(
    ids=st.lists(st.sampled_from([DEAD, 3, 4, 5]), min_size=1, max_size=12),
    ngram=st.integers(2, 5),
    cut=st.integers(0, 12),
)
def test_windows_in_two_chunks_equal_one_walk_back_from_each_position(ids, ngram, cut):
    def walk(position):
        window = []
        for r in range(ngram):
            older = position - r
            dead = older < 0 or ids[older] == DEAD or (window and window[-1] == 9)
            window.append(9 if dead else ids[older])
        return window

    cut = min(cut, len(ids))
    tail = np.array(([DEAD] * (ngram - 1) + ids[:cut])[cut:])
    first = ngram_windows(np.array(ids[:cut], int), max_ngram=ngram, pad=9)
    second = ngram_windows(np.array(ids[cut:], int), max_ngram=ngram, pad=9, tail=tail)
    assert [*first.tolist(), *second.tolist()] == [walk(p) for p in range(len(ids))]


def test_a_tail_of_the_wrong_length_is_refused():
    with pytest.raises(ValueError, match=r"shape \(2, 3\), it has \(2, 2\)"):
        ngram_windows(np.zeros((2, 5), int), max_ngram=4, pad=0, tail=np.zeros((2, 2), int))


@pytest.mark.parametrize("ngram, heads, size", [(1, 2, 100), (3, 0, 100), (3, 2, 0)])
def test_tables_that_cannot_exist_are_refused(ngram, heads, size):
    with pytest.raises(ValueError, match=f"max_ngram={ngram}, heads={heads}, vocab_size={size}"):
        engram_primes([1], size, ngram, heads)


def test_an_empty_compressed_vocabulary_is_refused():
    with pytest.raises(ValueError, match="got 0"):
        engram_multipliers(1, 4, 0)


@pytest.mark.parametrize("folder", FOLDERS)
def test_primes_and_multipliers_are_the_golden_ones(folder):
    text = text_config(folder)
    primes, multipliers = tables(text)
    with np.load(GOLDEN / folder / "engram_tables.npz") as golden:
        np.testing.assert_array_equal(primes, golden["primes"])
        np.testing.assert_array_equal(multipliers, golden["multipliers"])
    # Rows of hash k start where the tables before it end, and the last one ends at the layer's table.
    offsets, sizes = engram_offsets(primes).reshape(2, -1), primes.reshape(2, -1)
    np.testing.assert_array_equal(offsets[:, 1:], (offsets + sizes)[:, :-1])
    assert (offsets + sizes)[:, -1].tolist() == text["engram_num_embeddings"]
    assert offsets[:, 0].tolist() == [0, 0]


@pytest.mark.parametrize("path", CASES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_rows_of_prefill_and_decode_are_the_golden_ones(path):
    text = text_config(path.parent.name)
    vocabulary = CompressedVocabulary(path.parent / "tokenizer.json")
    tokenizer = CompressedTokenizer(vocabulary, text["engram_pad_token_id"])
    primes, multipliers = tables(text)
    ngram = text["engram_max_ngram_size"]
    with np.load(path) as golden:
        compressed = tokenizer.encode(golden["input_ids"])
        if "token_types" in golden:  # start, end and new line count as image positions too (T26)
            compressed[golden["token_types"] >= 0] = DEAD
        length = int(golden["prefill_len"])
        windows = ngram_windows(compressed[:, :length], max_ngram=ngram, pad=tokenizer.compressed_pad_token)
        np.testing.assert_array_equal(ngram_rows(windows, primes, multipliers), golden["prefill/engram_ids"])
        steps = golden.get("decode/engram_ids", ())
        for position, expected in enumerate(steps, start=length):
            tail = compressed[:, max(0, position - ngram + 1) : position]
            windows = ngram_windows(
                compressed[:, position : position + 1],
                max_ngram=ngram,
                pad=tokenizer.compressed_pad_token,
                tail=tail,
            )
            np.testing.assert_array_equal(ngram_rows(windows, primes, multipliers), expected)
