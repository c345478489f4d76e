"""What an engine costs the longer it runs: bytes to the device per step, memory per request."""

from unittest import mock

import jax
import numpy as np
import psutil
import pytest

from tests.support.engine_runs import while_unfinished
from tests.support.toy import random_prompt, toy_engine

pytestmark = [pytest.mark.toy, pytest.mark.unoptimised]


def test_a_steady_decode_step_sends_at_most_64_bytes_per_sequence() -> None:
    engine = toy_engine(max_num_seqs=32)
    for i in range(32):
        how = {"max_tokens": 30, "ignore_eos": True, "temperature": 0.7, "top_p": 0.9, "top_k": 9, "top_logprobs": 3}
        engine.add_request("u", str(i), how, random_prompt(3, i))
    for _ in range(12):  # all prompts are computed, four of them a step
        engine.step()
    sent: list[int] = []

    def record(array: np.ndarray, *arguments: object) -> jax.Array:
        sent.append(array.nbytes)
        return device_put(array, *arguments)

    device_put = jax.device_put
    # Whatever else went to the device would be an implicit transfer, which the guard refuses.
    with mock.patch.object(jax, "device_put", record), jax.transfer_guard_host_to_device("disallow"):
        for _ in range(8):  # two new blocks of four tokens each
            assert len(engine.step()) == 32


@pytest.mark.slow
def test_ten_thousand_requests_leave_less_than_a_kilobyte_each() -> None:
    engine = toy_engine(max_num_seqs=64, stop_preempted_request=False)
    process, rng = psutil.Process(), np.random.default_rng(0)
    counts, resident = [], []
    for first in range(0, 11_000, 500):
        for i in range(first, first + 500):
            how = {
                "max_tokens": int(rng.integers(1, 6)),
                "top_logprobs": int(rng.integers(0, 3)),
                "prompt_logprobs": i % 7 == 0,
            }
            engine.add_request("u", str(i), how, random_prompt(int(rng.integers(1, 12)), i))
            if i % 50 == 0:
                engine.abort_request(str(i))
        for _ in while_unfinished(engine):
            engine.step()
        if first >= 1000:
            counts.append(first)
            resident.append(process.memory_info().rss)
    slope = np.polyfit(counts, resident, 1)[0]
    assert slope < 1024, f"{slope:.0f} bytes per request"
    engine.core.scheduler.check_idle()
