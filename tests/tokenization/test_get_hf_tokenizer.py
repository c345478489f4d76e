"""The three paths of `get_hf_tokenizer`, and that text goes through it exactly as tokenizer.json says."""

import copy
import json
import logging
import pickle
import re
import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from deepinfer_jax.tokenization import SPAN_TOKENS, get_hf_tokenizer
from tests.support.paths import GOLDEN_A

pytestmark = pytest.mark.pure

BOS = "<｜begin▁of▁sentence｜>"
SPAN_NAME = re.compile(r"<\|place_holder_mm_span_00([01][0-9]|20)\|>")


@pytest.fixture(scope="module")
def raw(real_dir):
    return Tokenizer.from_file(str(real_dir / "tokenizer.json"))


@pytest.fixture
def native_dir(tmp_path):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(GOLDEN_A / name, tmp_path)
    return tmp_path


def edit_json(path, **values):
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


# --- text in, text out ------------------------------------------------------------------------------------------------

# Names that the file holds, names that it nearly holds, and their pieces.
LOOK_ALIKES = [
    BOS,
    "<｜end▁of▁sentence｜>",
    "<|end▁of▁sentence|>",
    "<｜User｜>",
    "<|User|>",
    "<｜Assistant｜>",
    "</think>",
    "<think",
    "｜DSML｜",
    "<｜image2｜>",
    "<|EOT|>",
    "<|place_holder_mm_span_0021|>",
    "<|place_holder_mm_span_0434|>",
    "<|place_holder_mm_span_002",
    "<｜place▁holder▁no▁799｜>",
    "｜",
    "▁",
    "|>",
    "<｜",
]
pieces = st.one_of(
    st.text(max_size=20),
    st.text(alphabet="0123456789.,-e", max_size=12),
    st.text(alphabet=st.characters(min_codepoint=0x3040, max_codepoint=0x9FFF), max_size=10),
    st.text(alphabet=" \t\r\n\u00a0\u3000\u200b", max_size=8),
    st.text(alphabet="abcXYZ_(){}[]:;=+-*/<>!&|\\\"'#$%^~` \n\t", max_size=30),
    st.text(alphabet="e\u0301aA\u030aﬁ²İıßΣς\ufeff\ufffd\ue000", max_size=6),
    st.sampled_from(LOOK_ALIKES),
)
texts = st.lists(pieces, max_size=8).map("".join).filter(lambda text: not SPAN_NAME.search(text))


# The tokenizer has no state that one example could leave to the next.
@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=texts)
def test_text_is_bos_and_the_tokens_of_the_file_and_comes_back(real_tokenizer, raw, text):
    ids = real_tokenizer.encode(text)
    assert ids == [0, *raw.encode(text).ids]
    assert real_tokenizer.decode(ids[1:]) == text
    assert real_tokenizer(text)["input_ids"] == ids


def test_a_text_that_a_llama_pipeline_ruins_is_encoded_right(real_tokenizer):
    assert real_tokenizer.encode("Hello world, 你好世界") == [0, 19923, 2058, 14, 223, 30594, 3427]


@pytest.mark.parametrize(
    "call",
    [
        lambda tokenizer, text: tokenizer.encode(text),
        lambda tokenizer, text: tokenizer(text),
        lambda tokenizer, text: tokenizer(["fine", text]),
        lambda tokenizer, text: tokenizer(text=["fine"], text_pair=[text]),
        lambda tokenizer, text: tokenizer.tokenize(text),
        lambda tokenizer, text: tokenizer.encode(text, add_special_tokens=False),
    ],
    ids=["encode", "call", "batch", "pair", "tokenize", "encode-plain"],
)
def test_lone_surrogates_and_span_names_are_refused_wherever_text_enters(real_tokenizer, call):
    with pytest.raises(ValueError, match=r"lone surrogate U\+DC80 at position 3"):
        call(real_tokenizer, "abc\udc80")
    with pytest.raises(ValueError, match=r"'<\|place_holder_mm_span_0020\|>' at position 2.*multi_modal_data"):
        call(real_tokenizer, "a <|place_holder_mm_span_0020|>")


def test_a_text_with_its_own_bos_is_encoded_as_said_and_warned_about(real_tokenizer, raw, caplog):
    text = BOS + "x"
    assert real_tokenizer.encode(text) == [0, *raw.encode(text).ids] == [0, 0, 90]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    caplog.clear()
    assert real_tokenizer.encode(text, add_special_tokens=False) == [0, 90]
    assert not caplog.records


def test_a_pipeline_that_changes_text_is_refused(edited_dir):
    def normalising(document):
        document["normalizer"] = {"type": "NFKC"}

    with pytest.raises(ValueError, match="does not give back the text it encoded"):
        get_hf_tokenizer(edited_dir(tokenizer=normalising))


# --- native -----------------------------------------------------------------------------------------------------------


def test_native_takes_the_files_as_they_are(native_dir, caplog):
    with caplog.at_level(logging.INFO):
        tokenizer = get_hf_tokenizer(native_dir)
    plain = Tokenizer.from_file(str(native_dir / "tokenizer.json"))
    assert len(tokenizer) == 192 and tokenizer.get_vocab() == plain.get_vocab()
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, 2)
    assert tokenizer.encode("the Cat ran<image>") == plain.encode("the Cat ran<image>").ids
    assert 188 in tokenizer.encode("<image>") and tokenizer.encode("") == []
    assert not caplog.records
    with pytest.raises(ValueError, match="lone surrogate"):
        tokenizer.encode("\ud800")


def test_native_honours_the_bos_that_its_settings_ask_for(native_dir):
    # transformers 5 drops add_bos_token from the file whenever a tokenizer.json is there.
    edit_json(native_dir / "tokenizer_config.json", add_bos_token=True)
    assert get_hf_tokenizer(native_dir).encode("")[:1] == [0]


def test_native_keeps_a_pipeline_whose_settings_name_a_class_that_rebuilds_it(real_dir, tmp_path, raw):
    shutil.copy(real_dir / "tokenizer.json", tmp_path)
    shutil.copy(real_dir / "tokenizer_config.json", tmp_path)
    edit_json(tmp_path / "tokenizer_config.json", tokenizer_class="LlamaTokenizerFast")
    (tmp_path / "config.json").write_text('{"tokenizer_compatibility": "native"}')
    text = "Hello world, 你好世界"
    assert get_hf_tokenizer(tmp_path).encode(text) == raw.encode(text).ids


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_missing_file_is_named(native_dir, name):
    (native_dir / name).unlink()
    with pytest.raises(FileNotFoundError, match=f"{re.escape(str(native_dir / name))} does not exist"):
        get_hf_tokenizer(native_dir)


def test_an_unknown_policy_is_refused_before_anything_is_loaded(native_dir):
    edit_json(native_dir / "config.json", tokenizer_compatibility="legacy")
    (native_dir / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"tokenizer_compatibility is 'legacy', expected \"release\" or \"native\""):
        get_hf_tokenizer(native_dir)


@pytest.mark.parametrize("content", ["{", '{"added_tokens": []}', "[]"])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json"])
def test_malformed_files_are_a_value_error_that_names_the_directory(native_dir, name, content):
    if content.startswith('{"') and name != "tokenizer.json":
        content = "null"
    (native_dir / name).write_text(content)
    with pytest.raises(ValueError, match=re.escape(str(native_dir))):
        get_hf_tokenizer(native_dir)


def test_the_policy_defaults_to_release_and_the_golden_tokenizer_does_not_satisfy_it(native_dir):
    (native_dir / "config.json").unlink()
    with pytest.raises(ValueError, match="BOS is '<bos>' with id 0, expected '<｜begin▁of▁sentence｜>' with id 0"):
        get_hf_tokenizer(native_dir)


def test_a_revision_is_said_to_mean_nothing(native_dir, caplog):
    get_hf_tokenizer(native_dir, revision="v2")
    assert "revision v2 is not looked at" in caplog.text


# --- auto_map ---------------------------------------------------------------------------------------------------------

CUSTOM = """
from transformers import PreTrainedTokenizerFast
from .helper import SUFFIX

class Custom(PreTrainedTokenizerFast):
    def encode(self, text, *args, **kwargs):
        return super().encode(text + SUFFIX, *args, **kwargs)
"""


def with_auto_map(directory, entry, code=CUSTOM, **config):
    edit_json(directory / "tokenizer_config.json", auto_map={"AutoTokenizer": entry})
    (directory / "custom.py").write_text(code)
    (directory / "helper.py").write_text("SUFFIX = '<image>'\n")
    if config:
        edit_json(directory / "config.json", **config)
    return directory


def test_auto_map_code_does_not_run_without_trust(native_dir):
    with_auto_map(native_dir, ["custom.Custom", None], code="raise SystemExit('this code ran')")
    with pytest.raises(ValueError, match=r"custom\.py; read it, then pass trust_remote_code=True"):
        get_hf_tokenizer(native_dir)


@pytest.mark.parametrize("entry", [["custom.Custom", "other.Fast"], [None, "custom.Custom"], "custom.Custom"])
def test_auto_map_loads_the_first_class_with_its_neighbours_and_guards_it(native_dir, entry):
    tokenizer = get_hf_tokenizer(with_auto_map(native_dir, entry), trust_remote_code=True)
    assert tokenizer.encode("<sp1>") == [189, 188]
    with pytest.raises(ValueError, match="lone surrogate"):
        tokenizer.encode("\udfff")


@pytest.mark.parametrize("entry", [["repository--custom.Custom"], ["Custom"], [None], None, ["../custom.Custom"]])
def test_auto_map_entries_that_point_elsewhere_are_refused(native_dir, entry):
    with pytest.raises(ValueError, match=r'expected \["module.Class", …\]'):
        get_hf_tokenizer(with_auto_map(native_dir, entry), trust_remote_code=True)


def test_auto_map_names_what_is_missing(native_dir):
    with pytest.raises(FileNotFoundError, match=r"absent\.py does not exist"):
        get_hf_tokenizer(with_auto_map(native_dir, ["absent.Custom"]), trust_remote_code=True)
    with pytest.raises(ValueError, match=r"custom\.py defines no class Absent"):
        get_hf_tokenizer(with_auto_map(native_dir, ["custom.Absent"]), trust_remote_code=True)


PLAIN = "from transformers import PreTrainedTokenizerFast\n\nclass Custom(PreTrainedTokenizerFast):\n    pass\n"
LLAMA = """
from transformers import LlamaTokenizerFast

class Custom(LlamaTokenizerFast):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
"""


def test_auto_map_under_the_release_policy_is_repaired_and_guarded(edited_dir, raw):
    directory = edited_dir(tokenizer_config=lambda document: None)
    tokenizer = get_hf_tokenizer(with_auto_map(directory, ["custom.Custom"], PLAIN), trust_remote_code=True)
    assert tokenizer.encode("x 你") == [0, *raw.encode("x 你").ids]
    assert len(tokenizer) == 129_301
    with pytest.raises(ValueError, match="reserved"):
        tokenizer.encode("<|place_holder_mm_span_0000|>")


@pytest.mark.slow
def test_a_class_that_rebuilds_the_pipeline_is_refused_under_the_release_policy(edited_dir):
    directory = edited_dir(tokenizer_config=lambda document: None)
    with pytest.raises(ValueError, match=r"encodes text differently from tokenizer\.json"):
        get_hf_tokenizer(with_auto_map(directory, ["custom.Custom"], LLAMA), trust_remote_code=True)


def test_the_tokenizer_survives_pickle_and_copy_with_its_guard(real_tokenizer):
    text = "Hello 你好 <｜User｜>"
    for other in (pickle.loads(pickle.dumps(real_tokenizer)), copy.deepcopy(real_tokenizer)):
        assert other.encode(text) == real_tokenizer.encode(text)
        assert (len(other), other.pad_token_id) == (len(real_tokenizer), 2)
        with pytest.raises(ValueError, match="reserved"):
            other.encode(next(iter(SPAN_TOKENS)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("def (", "cannot be imported: SyntaxError"),
        ("1 / 0", "cannot be imported: ZeroDivisionError"),
        ("Mine = 5", "defines no class Mine"),
        ("", "defines no class Mine"),
    ],
)
def test_trusted_code_that_breaks_is_one_sentence(edited_dir, code, sentence):
    directory = edited_dir(
        tokenizer_config=lambda settings: settings.update(auto_map={"AutoTokenizer": ["mine.Mine", None]})
    )
    (directory / "mine.py").write_text(code)
    with pytest.raises(ValueError, match=sentence):
        get_hf_tokenizer(directory, trust_remote_code=True)


@pytest.mark.slow
def test_an_empty_auto_map_asks_for_nothing(edited_dir):
    directory = edited_dir(tokenizer_config=lambda settings: settings.update(auto_map=None))
    assert get_hf_tokenizer(directory).encode("") == [0]
