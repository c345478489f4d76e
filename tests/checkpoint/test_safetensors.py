"""checkpoint/safetensors.py and folder.py: every lie that a file can tell is refused with its name."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from deepinfer_jax.checkpoint.folder import CheckpointFolder
from deepinfer_jax.checkpoint.safetensors import (
    DTYPES,
    MAX_HEADER_BYTES,
    SafetensorsFile,
    read_header,
    write_safetensors,
)
from deepinfer_jax.weights.layout import TensorSpec
from tests.support.paths import GOLDEN_A

pytestmark = pytest.mark.pure

TENSORS = (
    TensorSpec("codes", "F8_E4M3", (3, 5)),  # 15 bytes: the tensors behind it are not aligned
    TensorSpec("scales", "F8_E8M0", (7,)),
    TensorSpec("packed", "I8", (2, 2, 2)),
    TensorSpec("half", "BF16", (4,)),
    TensorSpec("full", "F32", (2, 3)),
    TensorSpec("empty", "F32", (0, 3)),
)


def random_bytes(spec: TensorSpec, seed: int = 0) -> np.ndarray:
    raw = np.random.default_rng(seed).integers(0, 256, spec.nbytes, np.uint8)
    return raw.view(DTYPES[spec.dtype]).reshape(spec.shape)


def write_raw(path: Path, header: Any, payload: bytes = b"") -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + payload)
    return path


def claim(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_what_is_written_is_read_back_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    arrays = [random_bytes(spec, seed) for seed, spec in enumerate(TENSORS)]
    write_safetensors(path, TENSORS, iter(arrays))
    file = SafetensorsFile(path)
    assert list(file.entries) == [spec.name for spec in TENSORS]
    for spec, array in zip(TENSORS, arrays, strict=True):
        view = file.view(spec.name)
        assert (view.dtype, view.shape) == (DTYPES[spec.dtype], spec.shape)
        assert not view.flags.writeable
        assert view.tobytes() == array.tobytes()
        file.release(spec.name)
        assert file.view(spec.name).tobytes() == array.tobytes()


def test_the_safetensors_library_reads_our_file_and_we_read_its(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"
    specs = (TensorSpec("a", "F32", (2, 2)), TensorSpec("b", "I8", (3,)))
    arrays = [np.arange(4, dtype=np.float32).reshape(2, 2), np.arange(3, dtype=np.int8)]
    write_safetensors(ours, specs, arrays)
    for name, array in zip("ab", arrays, strict=True):
        np.testing.assert_array_equal(load_file(ours)[name], array)
    save_file(dict(zip("ab", arrays, strict=True)), theirs, metadata={"format": "np"})
    assert sorted(SafetensorsFile(theirs).entries) == ["a", "b"]
    for name, array in zip("ab", arrays, strict=True):
        np.testing.assert_array_equal(SafetensorsFile(theirs).view(name), array)


def test_golden_file_holds_the_dtypes_of_the_release() -> None:
    golden = GOLDEN_A / "model.safetensors"
    file = SafetensorsFile(golden)
    assert {entry.dtype for entry in file.entries.values()} == {"BF16", "F32", "F8_E4M3", "F8_E8M0", "I8"}
    assert file.view("layers.0.attn.wq_a.weight").dtype == ml_dtypes.float8_e4m3fn


def test_the_writer_refuses_other_data_than_declared(tmp_path: Path) -> None:
    specs = (TensorSpec("w", "F32", (2,)),)
    for wrong in (np.zeros(2, np.float64), np.zeros(3, np.float32)):
        with pytest.raises(ValueError, match="'w' is declared F32"):
            write_safetensors(tmp_path / "x", specs, [wrong])
    with pytest.raises(ValueError):
        write_safetensors(tmp_path / "x", specs, [])


LIES = {
    "no header": (b"", "not valid JSON|announce"),
    "bad JSON": (b"{", "not valid JSON"),
    "bad UTF-8": (b'{"\xff": 1}', "not valid JSON"),
    "a list": (b"[]", "expected an object"),
    "a key twice": (b'{"w": 1, "w": 2}', "'w' occurs twice"),
    "nested without end": (b"[" * 100_000, "not valid JSON"),
    "65 dimensions": ({"w": claim(shape=[1] * 63 + [2, 1])}, "'w': shape"),
    "no size": ({"w": claim(shape=[0, 2**64], offsets=[0, 0])}, "'w': shape"),
    "no offset": ({"w": claim(offsets=[0, 10**4000])}, "'w': data_offsets"),
    "no offsets": ({"w": {"dtype": "F32", "shape": [2]}}, "'w': the header entry needs"),
    "unknown dtype": ({"w": claim(dtype="F4")}, "'w': unknown dtype 'F4'"),
    "dtype no text": ({"w": claim(dtype=[])}, "'w': unknown dtype"),
    "negative shape": ({"w": claim(shape=[-2])}, "'w': shape"),
    "boolean shape": ({"w": claim(shape=[True])}, "'w': shape"),
    "one offset": ({"w": claim(offsets=[0])}, "'w': data_offsets"),
    "float offset": ({"w": claim(offsets=[0, 8.0])}, "'w': data_offsets"),
    "backwards": ({"w": claim(offsets=[8, 0])}, "'w': its bytes 8..0 lie outside"),
    "before the file": ({"w": claim(offsets=[-8, 0])}, "'w': its bytes -8..0 lie outside"),
    "behind the file": ({"w": claim(offsets=[12, 20])}, "'w': its bytes 12..20 lie outside the 16 bytes"),
    "size": ({"w": claim(shape=[3])}, "'w': F32 of shape .3. takes 12 bytes, the header gives it 8"),
    "overlap": ({"w": claim(), "v": claim(offsets=[4, 12])}, "'w' and 'v' share bytes"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_is_refused(tmp_path: Path, lie: str) -> None:
    header, message = LIES[lie]
    path = write_raw(tmp_path / "lie.safetensors", header, bytes(16))
    with pytest.raises(ValueError, match=message) as caught:
        SafetensorsFile(path)
    assert str(path) in str(caught.value)


def test_a_key_twice_among_many_is_found_at_once(tmp_path: Path) -> None:
    keys = ",".join(f'"{number}":1' for number in [*range(200_000), 199_999])
    path = write_raw(tmp_path / "lie.safetensors", ("{" + keys + "}").encode())
    with pytest.raises(ValueError, match="'199999' occurs twice"):  # quadratic search would take hours
        SafetensorsFile(path)


def test_a_refusal_does_not_repeat_a_huge_claim(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "lie.safetensors", {"w": claim(dtype="F" * 10**6)})
    with pytest.raises(ValueError, match="unknown dtype") as caught:
        SafetensorsFile(path)
    assert len(str(caught.value)) < 1000


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_is_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "t.safetensors"
    write_safetensors(path, TENSORS, [random_bytes(spec) for spec in TENSORS])
    whole = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        # The header's length, the header, its end: not the tensors, whose bytes are all valid.
        at = data.draw(st.integers(0, 8 + int.from_bytes(whole[:2], "little")))
        whole[at : at + data.draw(st.integers(0, 2))] = data.draw(
            st.sampled_from([b"", b"9", b"-", b"[", b'"', b"\xff"])
        )
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole)))] if data.draw(st.booleans()) else whole)
    try:
        file = SafetensorsFile(path)
    except ValueError as error:
        assert str(path) in str(error)
    else:
        for name, entry in file.entries.items():
            assert file.view(name).nbytes == entry.end - entry.begin


@pytest.mark.parametrize("length", [0, 17, MAX_HEADER_BYTES + 1, 2**63])
def test_a_header_longer_than_file_or_limit_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + bytes(16))
    with pytest.raises(ValueError, match=f"a header of {length} bytes"):
        read_header(path)


def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    specs = TENSORS[:-1]
    write_safetensors(path, specs, [random_bytes(spec) for spec in specs])
    whole = path.read_bytes()
    for size in (0, 7, 8, 40, len(whole) - 50, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="truncated"):
            SafetensorsFile(path)


def two_shards(folder: Path, names: tuple[str, str] = ("a", "b")) -> dict[str, str]:
    for name, shard in zip(names, ("1.safetensors", "2.safetensors"), strict=True):
        spec = TensorSpec(name, "F32", (2,))
        write_safetensors(folder / shard, [spec], [np.full(2, len(name), np.float32)])
    return dict(zip(names, ("1.safetensors", "2.safetensors"), strict=True))


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_shards_are_found_through_the_index(tmp_path: Path) -> None:
    write_index(tmp_path, two_shards(tmp_path))
    folder = CheckpointFolder(tmp_path)
    assert sorted(folder) == ["a", "b"]
    assert len(folder) == 2
    assert folder.path("b").name == "2.safetensors"
    np.testing.assert_array_equal(folder.view("b"), np.float32([1, 1]))


def test_the_model_prefix_is_optional_in_index_and_shards_independently(tmp_path: Path) -> None:
    shards = two_shards(tmp_path, ("model.a", "b"))
    write_index(tmp_path, {"a": shards["model.a"], "model.b": shards["b"]})
    folder = CheckpointFolder(tmp_path)
    assert sorted(folder) == ["a", "b"]
    assert folder.entry("a").name == "model.a"


def test_two_names_that_differ_by_the_prefix_are_refused(tmp_path: Path) -> None:
    shards = two_shards(tmp_path, ("model.a", "a"))
    write_index(tmp_path, shards)
    with pytest.raises(ValueError, match=r"index.json: tensor 'a' occurs twice"):
        CheckpointFolder(tmp_path)
    write_index(tmp_path, {"a": "1.safetensors", "b": "2.safetensors"})
    with pytest.raises(ValueError, match=r"'a' occurs twice: as 'model.a' in .*1.safetensors and as 'a' in .*2"):
        CheckpointFolder(tmp_path)


def test_missing_shards_are_all_listed(tmp_path: Path) -> None:
    write_index(tmp_path, {**two_shards(tmp_path), "c": "3.safetensors", "d": "4.safetensors"})
    with pytest.raises(FileNotFoundError, match=r"lacks 2 shard.*3.safetensors, 4.safetensors"):
        CheckpointFolder(tmp_path)


def test_index_and_shards_must_agree(tmp_path: Path) -> None:
    shards = two_shards(tmp_path)
    write_index(tmp_path, {**shards, "c": "2.safetensors"})
    with pytest.raises(ValueError, match=r"'c' is in 2.safetensors, which does not hold it"):
        CheckpointFolder(tmp_path)
    write_index(tmp_path, {"a": "2.safetensors", "b": "1.safetensors"})
    with pytest.raises(ValueError, match=r"'a' is in 2.safetensors, which does not hold it"):
        CheckpointFolder(tmp_path)
    extra = [TensorSpec("b", "F32", (2,)), TensorSpec("hidden", "F32", (1,))]
    write_safetensors(tmp_path / "2.safetensors", extra, [np.zeros(2, np.float32), np.zeros(1, np.float32)])
    write_index(tmp_path, shards)
    with pytest.raises(ValueError, match=r"holds tensor 'hidden', which .*index.json does not list"):
        CheckpointFolder(tmp_path)


@pytest.mark.parametrize(
    "weight_map",
    [
        None,
        {},
        [],
        {"a": 1},
        *({"a": name} for name in ("../1.safetensors", "/1.safetensors", "..", "", "a\0b", "a" * 256)),
    ],
)
def test_a_malformed_index_is_refused(tmp_path: Path, weight_map: Any) -> None:
    two_shards(tmp_path)
    write_index(tmp_path, weight_map)
    with pytest.raises(ValueError, match=r"index\.json"):
        CheckpointFolder(tmp_path)


def test_an_index_that_is_not_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ValueError, match="is not valid JSON"):
        CheckpointFolder(tmp_path)


def test_a_folder_without_checkpoint_says_what_it_looked_for(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"neither model.safetensors.index.json nor model.safetensors"):
        CheckpointFolder(tmp_path)
