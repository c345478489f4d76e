"""The engine on golden checkpoints: what it samples from is what the model authors' code computed.

Golden decode steps are teacher-forced; `golden_token_ids` forces the engine along the same tokens, so that every
step's distribution can be compared.
"""

import numpy as np
import pytest

from deepinfer_jax.engine.args import EngineArgs
from deepinfer_jax.engine.llm_engine import LLMEngine
from deepinfer_jax.engine.requests.sampling_params import SamplingParams
from tests.support.engine_runs import drain
from tests.support.golden import log_softmax
from tests.support.paths import GOLDEN

pytestmark = pytest.mark.real


def check_case(folder: str, case: str, *, extra_requests: int) -> None:
    data = np.load(GOLDEN / folder / f"{case}.f32nq.npz")
    ids, prefill_len = data["input_ids"], int(data["prefill_len"])
    batch, total = ids.shape
    engine = LLMEngine(
        EngineArgs(
            model=str(GOLDEN / folder),
            precision="float32_exact",
            max_model_len=total,
            max_num_seqs=batch + extra_requests,
            max_num_batched_tokens=64,  # so that prompts run in chunks, beside generating requests
        )
    )
    for row in range(batch):
        forced = ids[row, prefill_len:].tolist()
        params = SamplingParams(
            golden_token_ids=forced, max_tokens=len(forced) + 1, top_logprobs=3, prompt_logprobs=True, ignore_eos=True
        )
        engine.add_request("u", str(row), params, ids[row, :prefill_len])
    for extra in range(extra_requests):
        engine.add_request("u", f"x{extra}", {"max_tokens": 3 + extra, "ignore_eos": True}, ids[0, : 2 + 3 * extra])
    results = drain(engine)

    for row in range(batch):
        steps = np.concatenate([data["prefill/logits"][row, -1:], data["decode/logits"][:, row, 0]])
        reference = log_softmax(steps)
        outputs = results[str(row)]
        assert [o.token_id for o in outputs[:-1]] == ids[row, prefill_len:].tolist()
        for step, output in enumerate(outputs):
            assert output.top_token_ids[:3] == np.argsort(-reference[step], kind="stable")[:3].tolist()
            # 1e-4 is what the golden README demands end to end in this precision.
            np.testing.assert_allclose(output.top_logprobs[:3], np.sort(reference[step])[::-1][:3], atol=1e-4)
            np.testing.assert_allclose(output.token_logprobs, reference[step, output.token_id], atol=1e-4)
        along_prompt = log_softmax(data["prefill/logits"][row])[np.arange(prefill_len - 1), ids[row, 1:prefill_len]]
        np.testing.assert_allclose(outputs[0].prompt_logprobs, along_prompt, atol=1e-4)
    assert [len(results[f"x{extra}"]) for extra in range(extra_requests)] == [3 + e for e in range(extra_requests)]


def test_engine_follows_golden_b_among_other_requests() -> None:
    check_case("B_s15", "blong", extra_requests=2)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["inc", "long"])
def test_engine_follows_golden_a(case: str) -> None:
    check_case("A_s28", case, extra_requests=1)
