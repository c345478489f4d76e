"""Decode times are measured once for each key, and remembered as long as they may."""

import json
import time
from pathlib import Path

import pytest

from deepinfer_jax.engine.drafts.step_times import decode_times
from deepinfer_jax.scheduler import Bucket

pytestmark = pytest.mark.pure

BUCKETS = [Bucket(2, 4, 8), Bucket(4, 4, 8)]


class Meter:
    """Tells another time whenever it is asked, and counts."""

    def __init__(self) -> None:
        self.calls: list[Bucket] = []

    def __call__(self, bucket: Bucket) -> float:
        self.calls.append(bucket)
        return float(len(self.calls))


def ask(meter: Meter, folder: Path | None, key: str = "model on cpu", buckets: list[Bucket] = BUCKETS) -> list[float]:
    found = decode_times(buckets, meter, key=key, directory=None if folder is None else str(folder), ttl=3600)
    assert list(found) == buckets
    return list(found.values())


def test_without_a_folder_every_engine_measures() -> None:
    meter = Meter()
    assert ask(meter, None) == [1, 2]
    assert ask(meter, None) == [3, 4]
    assert meter.calls == BUCKETS * 2


def test_a_folder_remembers_each_key_and_each_list_of_programs_by_itself(tmp_path: Path) -> None:
    folder, meter = tmp_path / "new" / "folder", Meter()
    assert ask(meter, folder) == [1, 2]
    assert ask(meter, folder) == [1, 2]
    assert ask(meter, folder, key="model on gpu") == [3, 4]
    assert ask(meter, folder, buckets=BUCKETS[:1]) == [5]
    assert ask(meter, folder) == [1, 2]
    assert len(list(folder.iterdir())) == 3


@pytest.mark.parametrize("age", [3700, -60])
def test_old_times_and_times_of_the_future_are_measured_anew(tmp_path: Path, age: float) -> None:
    meter = Meter()
    ask(meter, tmp_path)
    (file,) = tmp_path.iterdir()
    content = json.loads(file.read_text())
    assert abs(content["measured_at"] - time.time()) < 60
    file.write_text(json.dumps(content | {"measured_at": time.time() - age}))
    assert ask(meter, tmp_path) == [3, 4]
    assert ask(meter, tmp_path) == [3, 4]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"key": 1}', "null", '{"key": "k", "measured_at": 1, "milliseconds": ["x"]}']
)
def test_a_broken_file_is_written_anew_and_others_are_left_alone(tmp_path: Path, text: str) -> None:
    meter = Meter()
    ask(meter, tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(text)
    (tmp_path / "mine.txt").write_text("mine")
    assert ask(meter, tmp_path) == [3, 4]
    assert ask(meter, tmp_path) == [3, 4]
    assert (tmp_path / "mine.txt").read_text() == "mine" and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("milliseconds", [[1.0], [1.0, -2.0], [1.0, float("nan")], [float("inf"), 1.0]])
def test_impossible_times_do_not_count(tmp_path: Path, milliseconds: list[float]) -> None:
    meter = Meter()
    ask(meter, tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(json.dumps(json.loads(file.read_text()) | {"milliseconds": milliseconds}))
    assert ask(meter, tmp_path) == [3, 4]


def test_a_folder_that_cannot_be_written_costs_no_more_than_the_next_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    meter = Meter()
    assert ask(meter, tmp_path / "file") == [1, 2]
    assert ask(meter, tmp_path / "file") == [3, 4]
    assert "decode times cannot be kept" in caplog.text
