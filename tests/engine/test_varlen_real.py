"""Packed decode steps on the real model give the tokens of `forward` alone, with what is freed overwritten by NaN."""

from pathlib import Path

import pytest

from deepinfer_jax import LLM
from tests.support.real_model import generate, long_golden_a, requests, what_forward_says
from tests.support.varlen_engine import random_choice, variables

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.usefixtures("poisoned")]
PRECISION = "float32_exact"  # no rounding can flip a token
SIZES = {"max_num_seqs": 4, "max_model_len": 160, "tokens_per_block": 16, "num_kv_blocks": 11}


def test_greedy_tokens_are_those_of_forward_with_steps_of_any_size(tmp_path: Path) -> None:
    folder = long_golden_a(tmp_path / "a")
    with variables(ENABLE_MTP_VARLEN="1", USE_NEXTN_DECODE="3", POISON_FREED_STATE="1"):
        llm = LLM(folder, precision=PRECISION, decode_sequence=False, **SIZES)
    engine = llm.llm_engine
    compiled = engine.compile_count
    random_choice(engine)
    prompts, params = requests([1, 2, 15, 16, 17, 33, 64, 100, 117, 5], greedy=True)
    found = generate(llm, prompts, params)
    assert found == [
        what_forward_says(folder, PRECISION, prompt, own, output)
        for prompt, own, output in zip(prompts, params, found, strict=True)
    ]
    stats = engine.stats()
    assert engine.compile_count == compiled <= 3
    assert stats["num_preemptions"] > 0
    # Rows of packed steps: 8 for 4 sequences, of 16; some sequences verified nothing, others all.
    verified = stats["num_drafts_verified"]
    assert verified[0] > verified[2] > 50 and stats["num_wasted_rows"] > 0
