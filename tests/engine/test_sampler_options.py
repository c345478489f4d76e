"""The sampler's options of the environment: as DB §2 writes them, and a sentence for everything else."""

import pytest

from deepinfer_jax.engine.environ import rearm
from deepinfer_jax.engine.sampler_options import sampler_options
from deepinfer_jax.sampling import NO_OPTIONS

pytestmark = pytest.mark.pure

NAMES = ("DECODE_TOKEN_BLACKLIST", "SAMPLER_FORCE_TOPK", "COMPUTE_SUM_SMALLER_PROBS")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch):
    def given(name: str, text: str) -> None:
        monkeypatch.setenv(f"DEEPINFER_{name}", text)
        rearm(name)

    yield given
    monkeypatch.undo()
    for name in NAMES:
        rearm(name)


def test_nothing_is_asked_for_by_default() -> None:
    assert sampler_options(16) == NO_OPTIONS


@pytest.mark.parametrize(
    ("text", "ids"),
    [("0..3,7,10..12", (0, 1, 2, 3, 7, 10, 11, 12)), (" 5 , 6 .. 6 ", (5, 6)), ("", ()), (" ", ()), ("15", (15,))],
)
def test_the_blacklist_is_a_list_of_ids_and_inclusive_ranges(environment, text: str, ids: tuple[int, ...]) -> None:
    environment("DECODE_TOKEN_BLACKLIST", text)
    assert sampler_options(16).blacklist == ids


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("3,x", "'x' is neither an id nor a range"),
        ("3,,4", "'' is neither"),
        ("-1", "'-1' is neither"),
        ("1..2..3", "is neither"),
        ("3..1", "ids must increase, but '3..1' does not"),
        ("3,3", "ids must increase, but '3' does not"),
        ("0..3,2", "ids must increase"),
        ("10..16", "16 is not among the model's ids 0..15"),
        ("0..15", "leaves no id to generate"),
    ],
)
def test_another_blacklist_is_refused(environment, text: str, sentence: str) -> None:
    environment("DECODE_TOKEN_BLACKLIST", text)
    with pytest.raises(ValueError, match=f"^DEEPINFER_DECODE_TOKEN_BLACKLIST is .*{sentence}"):
        sampler_options(16)


def test_force_top_k_and_the_sum_of_smaller_probabilities_are_read(environment) -> None:
    environment("SAMPLER_FORCE_TOPK", "40")
    environment("COMPUTE_SUM_SMALLER_PROBS", "1")
    options = sampler_options(16)
    assert (options.force_top_k, options.sum_smaller_probs) == (40, True)
    environment("SAMPLER_FORCE_TOPK", "-1")
    with pytest.raises(ValueError, match="DEEPINFER_SAMPLER_FORCE_TOPK is -1"):
        sampler_options(16)
