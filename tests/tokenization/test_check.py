"""`deepinfer-jax check`: every rule passes on a good folder, and each fault shows in its own row."""

import json
import shutil
import subprocess
import sys

import pytest

from deepinfer_jax.cli.check import check_model, run_check
from tests.support.paths import GOLDEN, RELEASED_CONFIG

pytestmark = pytest.mark.pure

LOADS = "config.json describes a model that this engine runs"
IMAGE_ID = "image_token_id is the id of <image> or <｜deepseek_image｜>"
IMAGE_NAME = "<image> or <｜deepseek_image｜> has image_token_id"
EMBEDDING = "vocab_size is the number of embedding rows"
TOKENIZER_IDS = "every id of the tokenizer files, span tokens aside, is below vocab_size"
COMPRESSED = "engram_compressed_vocab_size is the number of compressed token ids"
TABLES = "engram_num_embeddings is the number of rows that the hash addresses"
PIPELINE = "the tokenizer loads and keeps the pipeline of tokenizer.json"


def broken(directory, **kwargs):
    return {row.rule: row.reason for row in check_model(directory, **kwargs) if not row.ok}


@pytest.fixture
def model_dir(tmp_path):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        shutil.copy(GOLDEN / "A_s28" / name, tmp_path)
    return tmp_path


def edit_config(directory, text=(), **top):
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config.update(top)
    config["text_config"].update(text)
    path.write_text(json.dumps(config))


def edit_header(path, edit):
    """Rewrites the JSON header of a safetensors file, the tensors' bytes stay."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    raw = json.dumps(edit(header)).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data[8 + length :])


@pytest.mark.parametrize("folder", ["A_s28", "B_s15"])
def test_golden_folders_keep_every_rule(folder, capsys):
    assert broken(GOLDEN / folder) == {}
    assert run_check(GOLDEN / folder) == 0
    output = capsys.readouterr().out
    assert "FAIL" not in output and "max_tokens is 16" in output
    assert len(output.splitlines()) == len(check_model(GOLDEN / folder)) + 1


@pytest.mark.parametrize(
    "text, top, reasons",
    [
        ({}, {"bos_token_id": 5}, {"bos_token_id of config.json is the tokenizer's": "has 0, config.json has 5"}),
        ({}, {"eos_token_id": 2}, {"eos_token_id of config.json is the tokenizer's": "has 1, config.json has 2"}),
        ({}, {"pad_token_id": 1}, {"pad_token_id of config.json is the tokenizer's": "has 2, config.json has 1"}),
        (
            {},
            {"image_token_id": 189},
            {IMAGE_ID: "calls id 189 '<sp1>'", IMAGE_NAME: "has id 188, but config.json has image_token_id 189"},
        ),
        ({"vocab_size": 193}, {}, {EMBEDDING: "embed.weight has 192 rows, vocab_size is 193"}),
        ({"engram_compressed_vocab_size": 92}, {}, {COMPRESSED: "gives 93, config.json has 92"}),
        ({"engram_num_embeddings": [304, 463]}, {}, {TABLES: "addresses [304, 462] rows, config.json has [304, 463]"}),
        (
            {"o_groups": 3},
            {},
            {
                LOADS: "num_attention_heads is a multiple of o_groups",
                "num_attention_heads is a multiple of o_groups": "4 heads, 3 groups",
            },
        ),
        (
            {"kv_source_layer_ids": [2, 4]},
            {},
            {
                LOADS: "every compressed layer has a KV source",
                "every compressed layer has a KV source of its own ratio at or before it": "layer 6 has ratio 1",
                "the candidate source is -1 or a KV source of its users' ratio": "candidate_source_layer_id is 6",
            },
        ),
        ({}, {"architectures": ["LlamaForCausalLM"]}, {LOADS: "architectures is ['LlamaForCausalLM']"}),
    ],
)
def test_each_fault_of_the_configuration_shows_in_its_rows_only(model_dir, text, top, reasons):
    edit_config(model_dir, text, **top)
    found = broken(model_dir)
    assert found.keys() == reasons.keys()
    for rule, reason in reasons.items():
        assert reason in found[rule]


def test_a_vocabulary_smaller_than_the_tokenizer_is_found(model_dir):
    edit_config(model_dir, {"vocab_size": 190, "dspark_noise_token_id": 189})
    assert broken(model_dir)[TOKENIZER_IDS].startswith("the tokenizer has id 191, vocab_size is 190")


def test_embedding_rows_are_found_under_the_model_prefix(model_dir):
    edit_header(model_dir / "model.safetensors", lambda header: {f"model.{name}": at for name, at in header.items()})
    assert broken(model_dir) == {}


def test_embedding_rows_are_found_through_a_sharded_index(model_dir):
    weights = model_dir / "model.safetensors"
    names = []
    edit_header(weights, lambda header: names.extend(header) or header)
    weights.rename(model_dir / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (model_dir / "model.safetensors.index.json").write_text(json.dumps(index))
    assert broken(model_dir) == {}
    (model_dir / "model-00001-of-00001.safetensors").unlink()
    assert "model-00001-of-00001.safetensors" in broken(model_dir)[EMBEDDING]


def test_missing_files_fail_the_rules_that_need_them(model_dir, capsys):
    (model_dir / "tokenizer.json").unlink()
    (model_dir / "model.safetensors").unlink()
    found = broken(model_dir)
    assert "holds no checkpoint" in found[EMBEDDING]
    assert all("tokenizer.json does not exist" in found[rule] for rule in (PIPELINE, IMAGE_ID, COMPRESSED))
    assert LOADS not in found and TABLES not in found
    assert run_check(model_dir) == 1
    assert f"{len(found)} of " in capsys.readouterr().out


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"text_config": {}}', '{"text_config": 3}'])
def test_a_config_of_the_wrong_content_never_raises(model_dir, content):
    (model_dir / "config.json").write_text(content)
    found = broken(model_dir)
    assert LOADS in found and EMBEDDING in found


def test_a_folder_that_does_not_exist_is_said(tmp_path, capsys):
    assert run_check(tmp_path / "absent") == 1
    assert "absent is none; download the model first" in capsys.readouterr().out


def test_auto_map_without_trust_fails_and_says_so(model_dir):
    settings = json.loads((model_dir / "tokenizer_config.json").read_text())
    settings["auto_map"] = {"AutoTokenizer": ["custom.Custom", None]}
    (model_dir / "tokenizer_config.json").write_text(json.dumps(settings))
    code = "from transformers import PreTrainedTokenizerFast\nclass Custom(PreTrainedTokenizerFast): pass\n"
    (model_dir / "custom.py").write_text(code)
    assert "pass trust_remote_code=True" in broken(model_dir)[PIPELINE]
    assert broken(model_dir, trust_remote_code=True) == {}


@pytest.fixture
def released_dir(edited_dir, rename):
    """The real tokenizer with the released configuration and a (sparse) embedding of released size."""

    def build(names=None):
        directory = edited_dir(tokenizer=rename(names)) if names else edited_dir()
        shutil.copy(RELEASED_CONFIG, directory / "config.json")
        size = 129_280 * 5120 * 2
        header = {"embed.weight": {"dtype": "BF16", "shape": [129_280, 5120], "data_offsets": [0, size]}}
        raw = json.dumps(header).encode()
        with (directory / "model.safetensors").open("wb") as file:
            file.write(len(raw).to_bytes(8, "little") + raw)
            file.truncate(8 + len(raw) + size)
        return directory

    return build


@pytest.mark.slow
def test_the_public_v4_tokenizer_fails_only_the_image_rules_of_the_released_model(released_dir):
    found = broken(released_dir())
    assert found.keys() == {IMAGE_ID, IMAGE_NAME}
    assert found[IMAGE_ID] == "the tokenizer calls id 129264 '<｜image2｜>'"


def test_the_released_model_keeps_every_rule_once_its_image_token_has_its_name(released_dir):
    assert broken(released_dir({"<｜image2｜>": "<｜deepseek_image｜>"})) == {}


@pytest.mark.slow
def test_a_released_tokenizer_with_another_pad_fails_that_rule(released_dir):
    found = broken(released_dir({"<｜▁pad▁｜>": "<reserve>"}))
    assert found["PAD is <｜▁pad▁｜> with id 2, or aliases EOS"] == "'<｜▁pad▁｜>' has no id, expected id 2"


def test_checking_never_loads_jax():
    code = (
        "import sys; from deepinfer_jax.cli.check import run_check; run_check(sys.argv[1]); "
        "assert 'jax' not in sys.modules, 'jax was imported'"
    )
    subprocess.run([sys.executable, "-c", code, str(GOLDEN / "A_s28")], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("text", "top"),
    [
        ({}, {"image_token_id": -5}),
        ({}, {"image_token_id": 2**70}),
        ({}, {"vision_config": [1]}),
        ({"engram_n_heads": 10**6}, {}),
        ({"engram_vocab_size": 2**70}, {}),
        ({"engram_max_ngram_size": "x"}, {}),
        ({"engram_num_embeddings": []}, {}),
        ({"compress_ratios": [[1]]}, {}),
    ],
)
def test_a_damaged_configuration_fails_rules_and_never_the_check(model_dir, text, top):
    edit_config(model_dir, text, **top)
    reasons = broken(model_dir)
    assert reasons
    assert all(reason and "\n" not in reason for reason in reasons.values())


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"])
@pytest.mark.parametrize("raw", [b"", b"[" * 100_000, b"\xff{", b"null", b"[1]"])
def test_a_damaged_file_fails_rules_and_never_the_check(model_dir, name, raw, capsys):
    (model_dir / name).write_bytes(raw)
    assert run_check(model_dir) == 1
    assert "FAIL" in capsys.readouterr().out
