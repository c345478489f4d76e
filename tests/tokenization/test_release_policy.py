"""The release policy on the real tokenizer: three repairs on its unmodified files, broken copies refused."""

import logging

import pytest
from transformers import PreTrainedTokenizerFast

from deepinfer_jax.tokenization import (
    apply_release_policy,
    find_image_placeholder,
    get_hf_tokenizer,
    load_unrepaired_tokenizer,
    release_rules,
)

pytestmark = pytest.mark.pure

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
SPANS = [f"<|place_holder_mm_span_{i:04d}|>" for i in range(21)]


def state(tokenizer):
    return (
        len(tokenizer),
        tokenizer.get_vocab(),
        tokenizer.bos_token,
        tokenizer.eos_token,
        tokenizer.pad_token,
        tokenizer.add_bos_token,
        tokenizer.encode("a b"),
    )


def repair_lines(caplog):
    return [record.getMessage() for record in caplog.records if "repaired" in record.getMessage()]


def test_unmodified_files_satisfy_the_policy_after_three_repairs(real_dir, caplog):
    loaded = load_unrepaired_tokenizer(real_dir)
    assert [reason for _, reason in release_rules(loaded)] == [None] * 5
    before = state(loaded)
    with caplog.at_level(logging.INFO):
        repaired = apply_release_policy(loaded)
    assert state(loaded) == before
    assert (before[0], len(repaired)) == (129_280, 129_301)
    assert repaired.encode("") == [0]
    assert (repaired.pad_token, repaired.pad_token_id) == (PAD, 2)
    assert [repaired.convert_tokens_to_ids(name) for name in SPANS] == list(range(129_280, 129_301))
    assert repaired.decode([129_280, 129_300], skip_special_tokens=True) == ""
    [line] = repair_lines(caplog)
    assert line.count(";") == 2 and "129280…129300" in line and BOS in line and PAD in line


def test_nothing_is_repaired_or_logged_twice(real_tokenizer, caplog):
    with caplog.at_level(logging.INFO):
        assert apply_release_policy(real_tokenizer) is real_tokenizer
    assert repair_lines(caplog) == []


def test_only_what_is_missing_is_repaired(edited_dir, caplog):
    def settings(document):
        document.update(add_bos_token=True, pad_token=PAD)

    def spans(document):
        document["added_tokens"] += [
            {**document["added_tokens"][0], "id": 129_280 + i, "content": name} for i, name in enumerate(SPANS[:4])
        ]

    with caplog.at_level(logging.INFO):
        tokenizer = get_hf_tokenizer(edited_dir(tokenizer=spans, tokenizer_config=settings))
    assert [tokenizer.convert_tokens_to_ids(name) for name in SPANS] == list(range(129_280, 129_301))
    [line] = repair_lines(caplog)
    assert line.endswith("policy: 17 span tokens added at 129284…129300")


def test_the_real_files_fail_the_image_check(real_tokenizer):
    # They know 129264 as <｜image2｜> (model.md §15.11), so no prompt could place an image.
    with pytest.raises(ValueError, match=r"neither <image> nor <｜deepseek_image｜>.*at id 129264"):
        find_image_placeholder(real_tokenizer.get_vocab(), 129_264)


def appended(document):
    document["added_tokens"].append({**document["added_tokens"][0], "id": 129_280, "content": "<one too many>"})


@pytest.mark.parametrize(
    "settings, sentence",
    [
        ({"bos_token": EOS}, f"BOS is '{EOS}' with id 1, expected '{BOS}' with id 0"),
        ({"eos_token": PAD}, f"EOS is '{PAD}' with id 2, expected '{EOS}' with id 1"),
        ({"eos_token": None}, f"EOS is None with id None, expected '{EOS}' with id 1"),
        ({"pad_token": "<｜User｜>"}, f"PAD is '<｜User｜>' with id 128803, expected '{PAD}' with id 2"),
        ({"add_eos_token": True}, "add_eos_token is True, expected false"),
        ({"add_bos_token": None}, "add_bos_token is None, expected true or false"),
        # A token that tokenizer.json does not hold is appended by transformers, so the spans no longer fit either.
        ({"bos_token": "<s>"}, f"BOS is '<s>' with id 129280, expected '{BOS}' with id 0"),
        ({"bos_token": "<s>"}, "has 129281 entries, expected 129280"),
    ],
)
def test_broken_settings_are_refused(edited_dir, settings, sentence):
    directory = edited_dir(tokenizer_config=lambda document: document.update(settings))
    with pytest.raises(ValueError) as error:
        get_hf_tokenizer(directory)
    assert sentence in str(error.value) and str(directory) in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "names, sentence",
    [
        # PAD at another id: it changes places with a reserve token.
        (
            {PAD: "<reserve>", "<｜place▁holder▁no▁0｜>": PAD},
            f"'{PAD}' has id 128000, expected id 2",
        ),
        ({PAD: "<reserve>"}, f"'{PAD}' has no id, expected id 2"),
        ({"<｜place▁holder▁no▁1｜>": SPANS[7]}, f"'{SPANS[7]}' has id 128001, expected id 129287"),
    ],
)
def test_broken_vocabularies_are_refused(edited_dir, rename, names, sentence):
    with pytest.raises(ValueError) as error:
        get_hf_tokenizer(edited_dir(tokenizer=rename(names)))
    assert sentence in str(error.value)


@pytest.mark.slow
def test_one_token_too_many_is_refused_and_left_unchanged(edited_dir):
    loaded = load_unrepaired_tokenizer(edited_dir(tokenizer=appended))
    before = state(loaded)
    with pytest.raises(ValueError) as error:
        apply_release_policy(loaded)
    assert f"'{SPANS[0]}' would be appended with id 129281, expected id 129280" in str(error.value)
    assert "has 129281 entries, expected 129280" in str(error.value)
    assert state(loaded) == before


def test_one_token_too_many_behind_all_spans_is_refused(edited_dir):
    def complete_and_one_more(document):
        first = document["added_tokens"][0]
        names = [*SPANS, "<one too many>"]
        document["added_tokens"] += [{**first, "id": 129_280 + i, "content": name} for i, name in enumerate(names)]

    with pytest.raises(ValueError, match=r"'<one too many>' has id 129301.*has 129302 entries, expected 129301"):
        get_hf_tokenizer(edited_dir(tokenizer=complete_and_one_more))


class Stubborn(PreTrainedTokenizerFast):
    """Satisfies every rule and ignores the repair: only the last check can see it."""

    @property
    def add_bos_token(self):
        return False

    @add_bos_token.setter
    def add_bos_token(self, value):
        pass


def test_a_class_that_ignores_the_repair_is_refused_and_left_unchanged(real_dir, caplog):
    loaded = Stubborn.from_pretrained(str(real_dir), local_files_only=True)
    before = state(loaded)
    with caplog.at_level(logging.INFO), pytest.raises(ValueError, match=r"the empty text encodes to \[\]"):
        apply_release_policy(loaded)
    assert state(loaded) == before
    assert repair_lines(caplog) == []
