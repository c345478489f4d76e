"""The vocabulary that grammars see: that of the real tokenizer too."""

import json

import numpy as np
import pytest

from deepinfer_jax.structured import Matcher, compile_grammar, grammar_vocabulary, structured_args
from deepinfer_jax.tokenization import get_hf_tokenizer
from tests.support.paths import DEEPSEEK_TOKENIZER
from tests.support.walks import tokenizer

pytestmark = pytest.mark.pure


@pytest.fixture(scope="module")
def real():
    return grammar_vocabulary(get_hf_tokenizer(DEEPSEEK_TOKENIZER), 129_280, 1)


def test_every_ordinary_token_has_the_bytes_of_its_text(real) -> None:
    document = json.loads((DEEPSEEK_TOKENIZER / "tokenizer.json").read_text())
    backend = get_hf_tokenizer(DEEPSEEK_TOKENIZER).backend_tokenizer
    whole_texts = 0
    for token in range(0, 128_000, 7):
        text = backend.decode([token])
        if "�" not in text and token not in (0, 1, 2):
            assert real.tokenizer.decode_bytes([token]) == text.encode(), token
            whole_texts += 1
    assert whole_texts > 15_000
    assert len(real.markers) == len([token for token in document["added_tokens"] if token["id"] < 129_280])
    assert real.markers["｜DSML｜"] == 128_825 and real.markers["</think>"] == 128_822


def test_no_text_reaches_an_added_token(real, capfd) -> None:
    """TK6: no warning about characters either; the full-width bar is text like any other."""
    args = structured_args({"schema_type": "json", "schema": '{"type": "string"}'})
    one = Matcher(compile_grammar(args, real), args)
    one.accept(real.tokenizer.tokenize_str('"'))
    masks = np.zeros((1, real.num_words), np.uint32)
    one.fill_masks([], masks)
    ids = set(np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little")).tolist())
    assert not ids & set(real.markers.values())
    bar = real.tokenizer.greedy_tokenize("｜")
    one.accept([*bar, *real.tokenizer.greedy_tokenize('DSML"')])
    assert len(ids) > 100_000 and bar[0] in ids
    assert capfd.readouterr() == ("", "")


def test_added_tokens_beyond_the_logits_do_not_exist(real) -> None:
    """As the span tokens of the release policy, which are behind the model's ids."""
    few = grammar_vocabulary(get_hf_tokenizer(DEEPSEEK_TOKENIZER), 128_822, 1)
    assert few.tokenizer.vocab_size == 128_822 and few.num_words == 4026
    assert "</think>" not in few.markers and few.markers["<think>"] == 128_821


def test_a_tokenizer_of_more_text_than_the_model_has_ids_is_refused() -> None:
    with pytest.raises(ValueError, match="has text for id 511, but the model has only 300 ids"):
        grammar_vocabulary(tokenizer(), 300, 1)


@pytest.mark.parametrize("eos", [-1, 300])
def test_an_end_outside_the_vocabulary_is_refused(eos: int) -> None:
    with pytest.raises(ValueError, match=f"token {eos} is outside the model's 300 ids"):
        grammar_vocabulary(tokenizer(), 300, eos)


def test_a_slow_tokenizer_is_refused() -> None:
    with pytest.raises(ValueError, match="grammars need a fast tokenizer"):
        grammar_vocabulary(object(), 300, 1)
