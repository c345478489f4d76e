"""`ImageWorkers`: order, the bound on what lies ready, and what becomes of what is cancelled, late or broken.

Nothing here waits for time to pass: threads are held by locks, and the clock is a number.
"""

import gc
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from deepinfer_jax.engine.images.workers import ImageWorkers, PendingImages
from deepinfer_jax.tokenization import ImageError, ImageInput, ImageLayout, ImagePrompt, ProcessedImage

pytestmark = pytest.mark.pure

LAYOUT = ImageLayout(1, 1, 4, 4, 1, 1, 4)
IDS = np.asarray([7], np.int32)
PATIENCE = 60  # seconds after which a test has failed


@dataclass
class Opener:
    """Opens images when it is told to. A request's data is {"name": ..., "bytes": of pixels, or "raises": what}."""

    held: bool = True
    clock: float = 0.0
    begun: list[str] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)
    free: set[str] = field(default_factory=set)

    def __call__(self, ids: np.ndarray, data: Any) -> ImagePrompt:
        with self.changed:
            self.begun.append(data["name"])
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: not self.held or data["name"] in self.free, PATIENCE)
        if "raises" in data:
            raise data["raises"]
        pixels = np.zeros(data.get("bytes", 1), np.uint8)
        image = ImageInput(4, 4, 0, 4, ProcessedImage(LAYOUT, pixels, data["name"].encode()))
        return ImagePrompt(ids, np.zeros(1, np.int32), (image,))

    def let(self, *names: str) -> None:
        with self.changed:
            self.free |= set(names)
            self.changed.notify_all()

    def reaches(self, *names: str) -> None:
        """Waits until exactly these are begun, in this order."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.begun) >= len(names), PATIENCE)
            assert self.begun == list(names)

    def workers(self, **options: Any) -> ImageWorkers:
        sizes = {"num_threads": 1, "max_bytes": 1000, "max_requests": 1000, "timeout": 100.0} | options
        return ImageWorkers(self, clock=lambda: self.clock, **sizes)


@pytest.fixture
def opener() -> Iterator[Opener]:
    opener = Opener()
    yield opener
    with opener.changed:
        opener.held = False
        opener.changed.notify_all()
    for thread in threading.enumerate():
        if thread.name.startswith("images-"):
            thread.join(PATIENCE)
            assert not thread.is_alive()


def submit(workers: ImageWorkers, name: str, **data: Any) -> PendingImages:
    return workers.submit(IDS, {"name": name, **data})


def outcome(workers: ImageWorkers, pending: PendingImages) -> ImagePrompt:
    workers.wait([pending], PATIENCE)
    prompt = pending.result()
    assert prompt is not None
    return prompt


def idle(workers: ImageWorkers) -> bool:
    return (workers.held_bytes, len(workers._queue), len(workers._begun), len(workers._held)) == (0, 0, 0, 0)


def test_images_are_opened_in_order_in_as_many_threads_as_there_are(opener: Opener) -> None:
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("images-")]
    workers = opener.workers(num_threads=2)
    a, b, c, d = (submit(workers, name) for name in "abcd")
    opener.reaches(*"ab")
    assert [one.result() for one in (a, b, c, d)] == [None] * 4
    opener.let("b")
    assert outcome(workers, b).images[0].image.digest == b"b"
    opener.reaches(*"abc")
    assert a.result() is None
    opener.let("a", "c", "d")
    for name, pending in zip("acd", (a, c, d), strict=True):
        assert outcome(workers, pending).images[0].image.digest == name.encode()
    assert (workers.num_processed, workers.held_bytes) == (4, 4)
    for pending in (a, b, c, d):
        pending.release()
        pending.release()
    assert idle(workers)


def test_what_lies_ready_holds_back_what_comes_until_it_is_released(opener: Opener) -> None:
    opener.held = False
    workers = opener.workers(max_bytes=100)
    big, small, last = (submit(workers, name, bytes=count) for name, count in (("a", 250), ("b", 60), ("c", 60)))
    outcome(workers, big)  # larger than the bound, but nothing was there
    workers.wait([small, last], 0)
    assert (opener.begun, workers.held_bytes) == (["a"], 250)
    big.release()
    outcome(workers, small), outcome(workers, last)  # 60 is below the bound, so the next may begin
    more = submit(workers, "d")
    assert (opener.begun, workers.held_bytes) == (["a", "b", "c"], 120)
    small.release()
    outcome(workers, more)
    assert opener.begun == ["a", "b", "c", "d"]


def test_the_number_of_requests_is_a_bound_too(opener: Opener) -> None:
    opener.held = False
    workers = opener.workers(max_requests=1)
    a, b = submit(workers, "a"), submit(workers, "b")
    outcome(workers, a)
    assert opener.begun == ["a"] and b.result() is None
    a.release()
    outcome(workers, b)


def test_a_request_may_be_cancelled_before_during_and_after(opener: Opener) -> None:
    workers = opener.workers()
    during, before, after = (submit(workers, name, bytes=5) for name in "abc")
    opener.reaches("a")
    before.release()
    during.release()
    opener.let("a", "c")
    outcome(workers, after)
    opener.reaches(*"ac")  # b never
    assert workers.held_bytes == 5 and during.result() is None and before.result() is None
    after.release()
    assert idle(workers)


@pytest.mark.parametrize(
    ("error", "kind", "sentence"),
    [
        (ImageError("no image"), ImageError, "no image"),
        (ValueError("2 runs, 1 image"), ValueError, "2 runs, 1 image"),
        (RuntimeError("boom"), ImageError, "the images cannot be opened: RuntimeError: boom"),
        (MemoryError(), ImageError, "the images cannot be opened: MemoryError"),
    ],
)
def test_an_exception_ends_its_request_alone(
    opener: Opener, error: Exception, kind: type[Exception], sentence: str
) -> None:
    opener.held = False
    workers = opener.workers()
    bad, good = submit(workers, "a", raises=error), submit(workers, "b")
    outcome(workers, good)
    with pytest.raises(kind, match=sentence) as raised:
        bad.result()
    assert type(raised.value) is kind
    good.release()
    bad.release()
    assert idle(workers)


def test_without_a_thread_a_request_fails_alone(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    workers = opener.workers()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda _: (_ for _ in ()).throw(RuntimeError("can't start")))
        failed = submit(workers, "a")
    with pytest.raises(ImageError, match="no thread could be started to open the images: can't start"):
        failed.result()
    opener.let("b")
    outcome(workers, good := submit(workers, "b"))
    good.release()
    assert idle(workers)


def test_a_failed_request_leaves_nothing_behind() -> None:
    """Nor a circle of references: many large images could lie in them until Python looks for such."""

    def fail(ids: np.ndarray, data: Any) -> ImagePrompt:
        try:
            raise OSError("cut short")
        except OSError as error:
            raise ImageError("damaged") from error

    workers = ImageWorkers(fail, num_threads=1, max_bytes=1, max_requests=1, timeout=0)
    image = np.zeros(1)
    left = weakref.ref(image)
    gc.disable()
    try:
        pending = workers.submit(IDS, {"image": image})
        del image
        with pytest.raises(ImageError, match="damaged"):
            outcome(workers, pending)
        for thread in threading.enumerate():
            if thread.name.startswith("images-"):
                thread.join(PATIENCE)
        assert left() is None
    finally:
        gc.enable()


def test_a_thread_that_hangs_ends_its_request_and_another_takes_its_place(opener: Opener) -> None:
    workers = opener.workers(timeout=10)
    stuck, cancelled, next_one = submit(workers, "a"), submit(workers, "b"), submit(workers, "c")
    opener.let("c")
    opener.clock = 9.5
    assert stuck.result() is None
    opener.clock = 10.0
    with pytest.raises(ImageError, match=r"not opened within 10 s \(DEEPINFER_MULTI_MODAL_WORKER_TIMEOUT\)"):
        stuck.result()
    opener.reaches(*"ab")
    cancelled.release()  # it hangs too, and nobody asks for it
    opener.clock = 20.0
    next_one.result()
    outcome(workers, next_one)
    opener.let("a", "b")  # what comes too late changes nothing
    next_one.release()
    with pytest.raises(ImageError):
        stuck.result()
    assert idle(workers)


def test_zero_seconds_are_no_limit(opener: Opener) -> None:
    workers = opener.workers(timeout=0)
    slow = submit(workers, "a")
    opener.clock = 1e9
    assert slow.result() is None
    opener.let("a")
    outcome(workers, slow)


def test_closing_drops_what_waits_what_is_opened_and_what_is_ready(opener: Opener) -> None:
    workers = opener.workers()
    ready, begun, queued = (submit(workers, name) for name in "abc")
    opener.let("a")
    outcome(workers, ready)
    opener.reaches(*"ab")
    workers.close()
    workers.close()
    for pending in (ready, begun, queued):
        with pytest.raises(ImageError, match="the engine was closed"):
            pending.result()
    opener.let("b")
    opener.reaches(*"ab")
    assert workers.held_bytes == 0
