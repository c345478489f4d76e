"""The Engram token map: checksums with the real tokenizer, the golden maps, and out-of-range ids."""

import hashlib
import json
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from deepinfer_jax.tokenization import (
    CompressedTokenizer,
    CompressedVocabulary,
    compress_vocabulary,
    encode_compressed,
)
from tests.support.paths import GOLDEN

pytestmark = pytest.mark.pure


@pytest.fixture(scope="module")
def real(real_dir):
    return CompressedVocabulary(real_dir / "tokenizer.json")


def sha256(table):
    return hashlib.sha256(table.astype("<i4").tobytes()).hexdigest()


def test_the_real_map_has_its_checksums(real):
    table = real.lookup_table
    assert (table.dtype, table.shape, len(real)) == (np.int32, (129_280,), 99_092)
    assert sha256(table) == "c60a86322ec17b4142bfef3c57a8d81fb428550cdf487f88a4320cb59fe46481"
    assert sha256(table[:128_000]) == "a44a9e7328b760556106bce7c1002c9fa632bc2f5c8e054ad9ce3ff8f8bfa8db"
    assert table[:128_000].max() == 97_811
    np.testing.assert_array_equal(table[128_000:], np.arange(97_812, 99_092))


@pytest.mark.parametrize(
    "token, compressed",
    [
        *[(0, 0), (1, 1), (2, 2), (3, 3)],
        *[(671, 237), (270, 237), (455, 237)],  # "The", " the", " The"
        *[(6102, 5095), (294, 251), (8760, 7208), (344, 242)],  # " capital", " of", " France", " is"
        *[(201, 174), (223, 174)],  # "\n", " "
        (185, 159),  # a cut UTF-8 sequence
        *[(100_000, 76_407), (127_000, 97_037)],
    ],
)
def test_the_real_map_has_its_samples(real, token, compressed):
    assert real.lookup_table[token] == compressed


def test_the_map_cannot_be_changed_by_accident(real):
    with pytest.raises(ValueError, match="read-only"):
        real.lookup_table[0] = 1


@pytest.mark.parametrize("folder", ["A_s28", "B_s15"])
def test_token_maps_are_the_golden_ones(folder):
    config = json.loads((GOLDEN / folder / "config.json").read_text())["text_config"]
    vocabulary = CompressedVocabulary(GOLDEN / folder / "tokenizer.json")
    tokenizer = CompressedTokenizer(vocabulary, config["engram_pad_token_id"])
    with np.load(GOLDEN / folder / "engram_tables.npz") as golden:
        np.testing.assert_array_equal(vocabulary.lookup_table, golden["token_map"])
        assert tokenizer.compressed_pad_token == golden["pad_compressed"]
    assert len(vocabulary) == config["engram_compressed_vocab_size"]


def test_the_tiny_map_is_that_of_model_md():
    # model.md §14: decode of [i] is "t" + str(i // 2).
    texts = [f"t{i // 2}" for i in range(512)]
    np.testing.assert_array_equal(compress_vocabulary(texts, texts), np.arange(512) // 2)


@pytest.mark.parametrize(
    "texts",
    [
        ["the", "The", "THE", " the", "The\n", "ＴＨＥ"],
        ["été", "e\u0301te\u0301", "ETE", " Été"],
        ["x²", "X2", "x2"],
        ["a b", "a \t\r\n b", "A\nB"],
        [" ", "\n", "\n\n", "\t \r"],
    ],
)
def test_texts_of_one_normal_form_share_an_id(texts):
    assert compress_vocabulary(texts, [str(i) for i in range(len(texts))]).tolist() == [0] * len(texts)


def test_texts_of_other_normal_forms_do_not_share_an_id():
    texts = [" ", "", "\u0301", "\u0300", "a\ufffd", "A\ufffd", "a", "\ue000"]
    spellings = ["Ġ", "", "m1", "m2", "aâ", "Aâ", "a", "pua"]
    # A form that normalises to nothing is keyed by its own text, a cut character by its spelling; U+E000 itself
    # takes the way of a lone space.
    assert compress_vocabulary(texts, spellings).tolist() == [0, 1, 2, 3, 4, 5, 6, 0]


def test_only_cut_characters_are_keyed_by_spelling(real_dir):
    # DB §3.3 counts them: 1484 ids by spelling, 214 whose normal form is empty.
    from tokenizers import Tokenizer

    raw = Tokenizer.from_file(str(real_dir / "tokenizer.json"))
    texts = raw.decode_batch([[i] for i in range(raw.get_vocab_size())], skip_special_tokens=False)
    assert sum("\ufffd" in text for text in texts) == 1484


def golden_copy(tmp_path, edit):
    document = json.loads((GOLDEN / "A_s28" / "tokenizer.json").read_text())
    edit(document)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(document))
    return path


def test_a_pad_token_with_another_id_is_refused(tmp_path):
    def edit(document):
        document["model"]["vocab"]["<｜▁pad▁｜>"] = document["model"]["vocab"].pop("the")

    with pytest.raises(ValueError, match="<｜▁pad▁｜> has id 3, expected 2"):
        CompressedVocabulary(golden_copy(tmp_path, edit))


def test_ids_with_a_gap_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"its 191 entries are not numbered 0…190, id 8 is missing"):
        CompressedVocabulary(golden_copy(tmp_path, lambda document: document["model"]["vocab"].pop("cat")))


def test_missing_and_malformed_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json does not exist"):
        CompressedVocabulary(tmp_path / "tokenizer.json")
    shutil.copy(GOLDEN / "A_s28" / "config.json", tmp_path / "tokenizer.json")
    with pytest.raises(ValueError, match=r"is not a tokenizer\.json"):
        CompressedVocabulary(tmp_path / "tokenizer.json")


@given(
    ids=npst.arrays(
        np.int64, npst.array_shapes(max_dims=3), elements=st.integers(-(2**40), 2**40) | st.integers(-9, 9)
    ),
    size=st.integers(0, 6),
)
def test_ids_outside_the_table_become_the_sentinel_and_never_wrap(ids, size):
    table = np.arange(100, 100 + size, dtype=np.int32)
    expected = [100 + i if 0 <= i < size else -7 for i in ids.ravel().tolist()]
    compressed = encode_compressed(ids, table, -7)
    assert compressed.dtype == np.int32 and compressed.shape == ids.shape
    assert compressed.ravel().tolist() == expected


def test_image_sentinels_become_dead(real):
    tokenizer = CompressedTokenizer(real, 2)
    ids = np.array([671, 129_279, 129_280, 129_284, -1, np.iinfo(np.int32).min], np.int32)
    assert tokenizer.encode(ids).tolist() == [237, 99_091, -1, -1, -1, -1]
    assert (tokenizer.IMAGE_SENTINEL, tokenizer.compressed_pad_token) == (-1, 2)


def test_float_ids_are_refused_and_no_ids_are_fine(real):
    with pytest.raises(TypeError, match="must be integers, these are float64"):
        encode_compressed([1.0], real.lookup_table, -1)
    assert encode_compressed([], real.lookup_table, -1).tolist() == []


def test_a_pad_id_outside_the_vocabulary_is_refused(real):
    with pytest.raises(ValueError, match="engram_pad_token_id is 129280, but the tokenizer has ids 0…129279"):
        CompressedTokenizer(real, 129_280)
