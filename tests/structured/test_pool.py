"""The pool that compiles: ready, failed, late, shared, cached, closed."""

import threading
import time

import pytest

from deepinfer_jax.structured import GrammarError, GrammarPool, PendingGrammar, StructuredArgs, pool
from tests.support.walks import allowed, vocabulary

pytestmark = pytest.mark.pure

NULL = StructuredArgs("json", '{"type": "null"}')


def make_pool(*, num_threads: int = 2, timeout: float = 30, cache_bytes: int | None = 1 << 30) -> GrammarPool:
    return GrammarPool(vocabulary, num_threads=num_threads, timeout=timeout, cache_bytes=cache_bytes)


def ready(grammars: GrammarPool, pending: PendingGrammar):
    grammars.wait([pending])
    return pending.matcher()


class Slow:
    """Compiles when it is told to, and counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may, self.compiled = threading.Event(), []
        real = pool.compile_grammar

        def compile_grammar(args, vocabulary):
            self.compiled.append(args.schema)
            assert self.may.wait(30)
            return real(args, vocabulary)

        monkeypatch.setattr(pool, "compile_grammar", compile_grammar)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Slow:
    return Slow(monkeypatch)


def test_a_grammar_becomes_ready_and_each_request_has_its_own_matcher() -> None:
    grammars = make_pool()
    first, second = (ready(grammars, grammars.submit(NULL)) for _ in range(2))
    first.accept([int(allowed(first)[0])])
    assert list(allowed(first)) != list(allowed(second))
    grammars.close()


def test_a_grammar_that_cannot_be_compiled_fails_with_the_reason() -> None:
    grammars = make_pool()
    pending = grammars.submit(StructuredArgs("regex", "(a)\\1"))
    with pytest.raises(GrammarError, match="backreferences are not supported"):
        ready(grammars, pending)
    assert ready(grammars, grammars.submit(NULL))  # the thread goes on
    grammars.close()


def test_whatever_goes_wrong_in_the_thread_fails_the_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_grammar(args, vocabulary):
        raise RuntimeError("broken")

    grammars = make_pool(num_threads=1)
    with monkeypatch.context() as patch:
        patch.setattr(pool, "compile_grammar", compile_grammar)
        with pytest.raises(GrammarError, match="RuntimeError: broken"):
            ready(grammars, grammars.submit(NULL))
    assert ready(grammars, grammars.submit(NULL))
    grammars.close()


def test_submitting_and_looking_never_wait(slow: Slow) -> None:
    grammars = make_pool()
    pending = [grammars.submit(StructuredArgs("regex", f"a{{{n}}}")) for n in range(20)]
    assert all(each.matcher() is None for each in pending)  # none can be ready before it may
    slow.may.set()
    assert all(ready(grammars, each) for each in pending)
    grammars.close()


def test_a_grammar_that_is_late_fails_and_one_that_nobody_waits_for_is_not_compiled(slow: Slow) -> None:
    grammars = make_pool(num_threads=1, timeout=0.2)
    running, queued = grammars.submit(NULL), grammars.submit(StructuredArgs("regex", "a"))
    grammars.wait([running])
    for late in (running, queued):
        with pytest.raises(GrammarError, match=r"not ready within 0.2 s \(DEEPINFER_XGRAMMAR_TIMEOUT\)"):
            while late.matcher() is None:
                time.sleep(0.01)
    slow.may.set()
    assert ready(grammars, grammars.submit(StructuredArgs("regex", "b")))
    assert slow.compiled == [NULL.schema, "b"]
    grammars.close()


def test_one_grammar_is_compiled_once_for_all_that_wait_and_those_that_come_later(slow: Slow) -> None:
    grammars = make_pool()
    early = [grammars.submit(NULL) for _ in range(3)]
    slow.may.set()
    assert all(ready(grammars, each) for each in early)
    assert ready(grammars, grammars.submit(StructuredArgs("json", NULL.schema, trigger=(3,))))
    assert slow.compiled == [NULL.schema]
    grammars.close()


def test_the_cache_forgets_what_was_not_used_for_longest(slow: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    slow.may.set()
    grammars = make_pool(num_threads=1)
    monkeypatch.setattr(pool, "MAX_CACHED", 2)
    for schema in ("a", "b", "a", "c", "a", "b"):
        assert ready(grammars, grammars.submit(StructuredArgs("regex", schema)))
    assert slow.compiled == ["a", "b", "c", "b"]
    grammars.close()


@pytest.mark.parametrize(("cache_bytes", "compiled"), [(0, 3), (1 << 40, 1), (None, 1)])
def test_the_cache_keeps_what_its_bytes_allow(slow: Slow, cache_bytes: int | None, compiled: int) -> None:
    slow.may.set()
    grammars = make_pool(cache_bytes=cache_bytes)
    for _ in range(3):
        assert ready(grammars, grammars.submit(NULL))
    assert len(slow.compiled) == compiled
    grammars.close()


def test_too_many_that_wait_are_refused(slow: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "MAX_WAITING", 2)
    grammars = make_pool(num_threads=1)
    grammars.submit(NULL)
    while not slow.compiled:
        time.sleep(0.01)
    for n in range(2):
        grammars.submit(StructuredArgs("regex", str(n)))
    with pytest.raises(GrammarError, match="2 other grammars wait to be compiled"):
        grammars.submit(StructuredArgs("regex", "x"))
    slow.may.set()
    grammars.close()


def test_closing_ends_the_threads_and_fails_what_waits(slow: Slow) -> None:
    grammars = make_pool(num_threads=1)
    grammars.submit(NULL)
    while not slow.compiled:
        time.sleep(0.01)
    queued = grammars.submit(StructuredArgs("regex", "a"))
    grammars.close()
    with pytest.raises(GrammarError, match="the engine was closed"):
        queued.matcher()
    slow.may.set()
    for thread in grammars._threads:
        thread.join(30)
        assert not thread.is_alive()
