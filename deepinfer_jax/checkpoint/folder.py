"""Finds a model folder's tensors by released name: sharded with an index, or one `model.safetensors` (DB §13.1)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy.typing as npt

from deepinfer_jax.checkpoint.safetensors import SafetensorsFile, TensorEntry
from deepinfer_jax.config.model_config import read_json

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


def released_name(name: str) -> str:
    """A tensor's name without the optional `model.` prefix."""
    return name.removeprefix("model.")


class CheckpointFolder:
    """Every tensor of a folder, mapped. Names are released names: an optional `model.` prefix is removed."""

    def __init__(self, directory: str | Path) -> None:
        """Opens all shards; with an index, the index and the shards must agree on every tensor.

        Raises:
            FileNotFoundError: there is neither an index nor a single file, or shards are missing (all are listed).
            ValueError: index or shard is malformed, they disagree, or two names are equal without their prefix.
        """
        self.directory = Path(directory)
        index_path = self.directory / INDEX_NAME
        single_path = self.directory / SINGLE_NAME
        self._files: dict[str, SafetensorsFile] = {}
        self._stored: dict[str, str] = {}
        if index_path.is_file():
            shard_of = _read_index(index_path)
            self._open(sorted(set(shard_of.values())))
            self._check_index(index_path, shard_of)
        elif single_path.is_file():
            self._open([SINGLE_NAME])
        else:
            raise FileNotFoundError(f"{self.directory} holds no checkpoint: neither {INDEX_NAME} nor {SINGLE_NAME}")

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def entry(self, name: str) -> TensorEntry:
        """What the header of `name`'s file says of it."""
        return self._files[name].entries[self._stored[name]]

    def path(self, name: str) -> Path:
        """The file that holds `name`."""
        return self._files[name].path

    def view(self, name: str) -> npt.NDArray[Any]:
        """Read-only view of a tensor; copy what must outlive this object."""
        return self._files[name].view(self._stored[name])

    def release(self, name: str) -> None:
        """Let go of the tensor's pages; see `SafetensorsFile.release`."""
        self._files[name].release(self._stored[name])

    def _open(self, shards: list[str]) -> None:
        missing = [shard for shard in shards if not (self.directory / shard).is_file()]
        if missing:
            raise FileNotFoundError(f"{self.directory} lacks {len(missing)} shard(s): {', '.join(missing)}")
        for shard in shards:
            file = SafetensorsFile(self.directory / shard)
            for stored in file.entries:
                name = released_name(stored)
                if name in self._files:
                    raise ValueError(
                        f"tensor {name!r} occurs twice: as {self._stored[name]!r} in {self._files[name].path} and as "
                        f"{stored!r} in {file.path}"
                    )
                self._files[name] = file
                self._stored[name] = stored

    def _check_index(self, index_path: Path, shard_of: dict[str, str]) -> None:
        for name, shard in shard_of.items():
            if name not in self._files or self._files[name].path.name != shard:
                raise ValueError(f"{index_path} says that tensor {name!r} is in {shard}, which does not hold it")
        for name, file in self._files.items():
            if name not in shard_of:
                raise ValueError(f"{file.path} holds tensor {name!r}, which {index_path} does not list")


def _read_index(path: Path) -> dict[str, str]:
    """`weight_map` of an index: released tensor name -> shard file name."""
    raw = read_json(path)
    weight_map = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{path}: weight_map must be a JSON object {{tensor name: shard file}}")
    shard_of: dict[str, str] = {}
    for stored, shard in weight_map.items():
        if not isinstance(shard, str) or not _is_file_name(shard):
            raise ValueError(f"{path}: tensor {stored!r} is in {shard!r:.200}, which is not a file name in this folder")
        name = released_name(stored)
        if name in shard_of:
            raise ValueError(f"{path}: tensor {name!r} occurs twice, with and without the prefix 'model.'")
        shard_of[name] = shard
    return shard_of


def _is_file_name(text: str) -> bool:
    """One name that a file system takes, without a way out of the folder."""
    return Path(text).name == text and text not in ("", "..") and "\0" not in text and len(text) <= 255
