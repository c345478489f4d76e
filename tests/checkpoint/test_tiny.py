"""checkpoint/tiny.py: a checkpoint of the released layout that is real enough to break what uniform noise hides."""

import copy
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.checkpoint.folder import CheckpointFolder
from deepinfer_jax.checkpoint.hf import load_params
from deepinfer_jax.checkpoint.tiny import ZERO_EMBEDDING_ROW, make_tiny
from deepinfer_jax.checkpoint.tiny_config import TINY
from deepinfer_jax.config.model_config import load_config
from deepinfer_jax.model.forward import forward
from deepinfer_jax.tokenization import CompressedVocabulary, get_hf_tokenizer
from deepinfer_jax.weights.layout import released_tensors
from tests.support.paths import GOLDEN, RELEASED_CONFIG

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny(folder)
    return folder


def tensors_of(folder: Path) -> dict[str, bytes]:
    checkpoint = CheckpointFolder(folder)
    return {name: checkpoint.view(name).tobytes() for name in checkpoint}


def write_config(path: Path, **text: Any) -> Path:
    path.write_text(json.dumps(TINY | {"text_config": TINY["text_config"] | text}))
    return path


def test_default_is_tiny_in_the_released_layout(tiny: Path) -> None:
    folder = CheckpointFolder(tiny)
    entries = [folder.entry(name) for name in folder]
    assert (len(entries), sum(entry.end - entry.begin for entry in entries)) == (642, 1_562_058)
    declared = {t.name: (t.dtype, t.shape) for t in released_tensors(load_config(tiny))}
    assert declared == {entry.name: (entry.dtype, entry.shape) for entry in entries}


def test_the_tiny_tokenizer_is_native_and_of_the_declared_sizes(tiny: Path) -> None:
    config = load_config(tiny)
    assert config.tokenizer_compatibility == "native"
    assert len(CompressedVocabulary(tiny / "tokenizer.json")) == config.text.engram_compressed_vocab_size
    tokenizer = get_hf_tokenizer(tiny)
    assert len(tokenizer) == config.text.vocab_size == 512
    assert [tokenizer.convert_ids_to_tokens(i) for i in (0, 1, 2, 510, 511)] == [
        "<bos>",
        "<eos>",
        "<pad>",
        "<noise>",
        "<image>",
    ]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, 2)
    assert all(isinstance(tokenizer.decode([i]), str) for i in range(512))


@pytest.mark.parametrize("text", ["The other world", "x = f(1)\n\n\tpass", "你好，世界 é ﬁ 🙂", "  two  blanks ", ""])
def test_the_tiny_tokenizer_encodes_any_text_reversibly(tiny: Path, text: str) -> None:
    tokenizer = get_hf_tokenizer(tiny)
    ids = tokenizer.encode(text)
    assert ids[0] == 0 and max(ids) < 510
    assert tokenizer.decode(ids[1:]) == text
    assert len(tokenizer.encode(" that which they had been")) == 1 + 5  # words are pieces, not bytes


@pytest.mark.slow  # ten seconds of compilation; the engine's fast tests run this model too
def test_it_runs_with_activations_of_ordinary_size(tiny: Path) -> None:
    config = load_config(tiny)
    params = load_params(tiny, config, precision="float32_exact")
    tokens = np.random.default_rng(0).integers(3, 510, (2, 40))
    tokens[:, 5] = ZERO_EMBEDDING_ROW
    captured = ("layers.*.moe.expert_ids", "layers.*.attention.output")
    out = forward(params, config, tokens, precision="float32_exact", capture=captured)
    assert np.isfinite(out.logits).all()
    assert 0.5 < float(jnp.std(out.logits)) < 3  # random logits of about unit size; 1.4 here
    used = np.unique(np.concatenate([np.ravel(v) for k, v in out.captured.items() if "expert_ids" in k]))
    assert len(used) == 8  # no expert is dead


def test_it_has_the_statistics_of_a_real_checkpoint(tiny: Path) -> None:
    config = load_config(tiny)
    params = load_params(tiny, config, precision="float32")
    assert not params.embed[ZERO_EMBEDDING_ROW].any()
    assert (jnp.abs(params.embed).max(axis=1) > 0).sum() == 511
    scales = np.concatenate(
        [np.frombuffer(data, np.uint8) for name, data in tensors_of(tiny).items() if name.endswith(".scale")]
    )
    assert scales.min() == 0 and scales.max() == 254 and ((scales > 0) & (scales < 40)).any()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))
    rms = jnp.sqrt(jnp.mean(params.layers[0].attn.wq_a ** 2, axis=1))
    assert rms.max() > 4 * jnp.median(rms)  # an outlier row is 8 times the others
    # rms-normed input of outlier norms, times an outlier router row: logits well above 20
    x = jax.random.normal(jax.random.key(0), (512, 64)) * params.layers[0].ffn_norm
    assert (x @ params.layers[0].ffn.gate.T).max() > 20
    assert (x @ params.layers[0].ffn.experts.w1[0].T).max() > config.text.swiglu_limit
    assert (params.layers[0].ffn.bias != params.layers[0].ffn.bias_vl).all()


def test_the_seed_decides_every_weight(tiny: Path, tmp_path: Path) -> None:
    make_tiny(tmp_path / "again")
    make_tiny(tmp_path / "other", seed=1)
    first, again, other = (tensors_of(folder) for folder in (tiny, tmp_path / "again", tmp_path / "other"))
    assert first == again
    weights = [name for name in first if name.endswith("weight")]
    assert weights and all(first[name] != other[name] for name in weights)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tiny / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_shards_hold_the_same_tensors_as_one_file(tiny: Path, tmp_path: Path) -> None:
    make_tiny(tmp_path / "sharded", shard_bytes=400_000)
    folder = CheckpointFolder(tmp_path / "sharded")
    shards = list((tmp_path / "sharded").glob("*.safetensors"))
    assert len(shards) > 3 and max(shard.stat().st_size for shard in shards) < 440_000  # headers included
    assert tensors_of(tmp_path / "sharded") == tensors_of(tiny)
    for name in folder:
        if name.endswith(".scale"):
            assert folder.path(name) == folder.path(name.removesuffix("scale") + "weight")
    config = load_config(tiny)
    for one, many in zip(
        jax.tree.leaves(load_params(tiny, config)),
        jax.tree.leaves(load_params(tmp_path / "sharded", config)),
        strict=True,
    ):
        np.testing.assert_array_equal(one, many)


@pytest.mark.parametrize("golden", ["A_s28", "B_s15", "A_s28/bf16"])
def test_any_config_gives_a_checkpoint_that_loads(tmp_path: Path, golden: str) -> None:
    make_tiny(tmp_path / "out", GOLDEN / golden / "config.json")
    ours, theirs = (load_config(folder) for folder in (tmp_path / "out", GOLDEN / golden))
    compressed = ours.text.engram_compressed_vocab_size
    assert compressed == len(CompressedVocabulary(tmp_path / "out" / "tokenizer.json"))
    text = dataclasses.replace(theirs.text, engram_compressed_vocab_size=compressed)
    assert ours == dataclasses.replace(theirs, text=text, tokenizer_compatibility="native")
    assert load_params(tmp_path / "out", ours).token_map is not None


def test_a_vocabulary_too_small_for_all_bytes_shows_the_others_as_pad(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_tiny(tmp_path / "out", GOLDEN / "B_s15" / "config.json")  # 160 ids, 5 of them special
    assert "160 ids has no token for 101 of the 256 bytes" in caplog.text
    tokenizer = get_hf_tokenizer(tmp_path / "out")
    assert len(tokenizer) == 160
    printable = "".join(chr(c) for c in range(32, 127)) + "\n"
    assert tokenizer.decode(tokenizer.encode(printable)[1:]) == printable
    assert tokenizer.encode("你")[1:].count(2) == 2  # one of its three bytes has a token


def test_the_written_config_fits_the_written_tokenizer(tmp_path: Path) -> None:
    source = write_config(
        tmp_path / "c.json",
        vocab_size=1000,
        engram_num_embeddings=[1, 2],
        engram_compressed_vocab_size=7,
    )
    make_tiny(tmp_path / "out", source)
    config = load_config(tmp_path / "out")
    assert config.text.engram_num_embeddings == (660, 864)  # the prime sums of model.md §14
    assert len(CompressedVocabulary(tmp_path / "out" / "tokenizer.json")) == config.text.engram_compressed_vocab_size
    assert len(get_hf_tokenizer(tmp_path / "out")) == 1000
    assert load_params(tmp_path / "out", config).token_map is not None


def test_nothing_is_overwritten_and_bad_configurations_write_nothing(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(FileExistsError, match="is not empty"):
        make_tiny(tiny)
    with pytest.raises(FileNotFoundError, match=r"nowhere.json does not exist"):
        make_tiny(tmp_path / "out", tmp_path / "nowhere.json")
    source = write_config(tmp_path / "bad.json", compress_ratios=[0])
    with pytest.raises(ValueError, match=r"bad.json: text_config breaks the rule"):
        make_tiny(tmp_path / "out", source)
    (tmp_path / "no.json").write_text("{")
    with pytest.raises(ValueError, match=r"no.json: "):
        make_tiny(tmp_path / "out", tmp_path / "no.json")
    assert not (tmp_path / "out").exists()


def test_a_model_larger_than_the_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 5, 5_000_000))
    with pytest.raises(ValueError, match="take 510,286,023,000 bytes, the disk has 5,000,000 free"):
        make_tiny(tmp_path / "out", RELEASED_CONFIG)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("role", "shared"), [("pad", "eos"), ("bos", "eos")])
def test_two_roles_of_one_id_keep_it(tmp_path: Path, role: str, shared: str) -> None:
    raw = copy.deepcopy(TINY)
    raw[f"{role}_token_id"] = raw[f"{shared}_token_id"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    make_tiny(tmp_path / "out", tmp_path / "config.json")
    tokenizer = get_hf_tokenizer(tmp_path / "out")
    assert len(tokenizer) == raw["text_config"]["vocab_size"]  # no second name was appended
    for name in ("bos", "eos", "pad"):
        assert getattr(tokenizer, f"{name}_token_id") == raw[f"{name}_token_id"]


def test_a_negative_seed_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="seed is -1"):
        make_tiny(tmp_path / "out", seed=-1)
    assert not (tmp_path / "out").exists()
