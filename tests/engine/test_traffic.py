"""Random traffic with aborts, flushes, preemption and steps that break: one account of every request."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from deepinfer_jax.engine.llm_engine import LLMEngine
from deepinfer_jax.engine.requests.outputs import RequestOutput
from deepinfer_jax.engine.requests.sampling_params import SamplingParams
from tests.support.engine_runs import while_unfinished
from tests.support.toy import greedy_twin, make_table, random_prompt, sampled_twin, toy_engine

pytestmark = [pytest.mark.toy, pytest.mark.unoptimised]

TABLE = make_table()


class Lost:
    """A launched step whose results never come."""

    def result(self) -> Any:
        raise ConnectionError("lost")


class Traffic:
    """Calls to an engine, chosen by `rng`, and everything that it said.

    Attributes:
        requests: prompt and parameters by request id.
        outputs: by request id.
    """

    def __init__(self, engine: LLMEngine, rng: np.random.Generator, failures: float) -> None:
        self.engine, self.rng, self.failures = engine, rng, failures
        self.requests: dict[str, tuple[list[int], SamplingParams]] = {}
        self.outputs: dict[str, list[RequestOutput]] = {}
        for name in ("prefill", "decode"):
            setattr(engine.core.runner, name, self._unreliable(getattr(engine.core.runner, name)))

    def _unreliable(self, launch: Callable[..., Any]) -> Callable[..., Any]:
        def sometimes(*arguments: Any) -> Any:
            if self.rng.random() >= self.failures:
                return launch(*arguments)
            if self.rng.integers(2):
                raise ConnectionError("lost")
            launch(*arguments)
            return Lost()

        return sometimes

    def take(self, call: Callable[[], list[RequestOutput]]) -> None:
        try:
            outputs = call()
        except ConnectionError:
            return
        for output in outputs:
            self.outputs.setdefault(output.request_id, []).append(output)

    def act(self) -> None:
        kind = self.rng.random()
        if kind < 0.4:
            length, request_id = int(self.rng.integers(1, 41)), str(len(self.requests))
            params = SamplingParams(
                max_tokens=int(self.rng.integers(1, 30)),
                temperature=float(self.rng.choice([0, 0.9])),
                seq_seed=int(self.rng.integers(100)),
                top_logprobs=int(self.rng.choice([0, 0, 3])),
                prompt_logprobs=bool(self.rng.integers(2)),
            )
            self.requests[request_id] = random_prompt(length, seed=len(self.requests)), params
            self.engine.add_request("u", request_id, params, self.requests[request_id][0])
        elif kind < 0.5:
            self.engine.abort_request(str(self.rng.integers(len(self.requests) + 1)))
        elif kind < 0.55:
            self.take(self.engine.flush_inflight_reqs)
        else:
            self.take(self.engine.step)

    def finish(self) -> None:
        for _ in while_unfinished(self.engine):
            self.take(self.engine.step)
        self.take(self.engine.flush_inflight_reqs)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("stop_preempted_request", [True, False])
@pytest.mark.parametrize("failures", [0.0, 0.05])
def test_every_request_is_told_its_own_tokens_and_its_end_once(
    failures: float, stop_preempted_request: bool, overlap: bool
) -> None:
    reasons: Counter[str] = Counter()
    preemptions = 0
    for seed in range(4):
        engine = toy_engine(num_kv_blocks=12, stop_preempted_request=stop_preempted_request, overlap=overlap)
        traffic = Traffic(engine, np.random.default_rng(seed), failures)
        for _ in range(60):
            traffic.act()
        traffic.finish()
        engine.step()  # the scheduler's word on requests that a broken step has ended
        engine.core.scheduler.check_idle()
        assert engine.core.scheduler.num_unfinished == 0
        assert traffic.outputs.keys() == traffic.requests.keys()
        for request_id, (prompt, params) in traffic.requests.items():
            check(traffic.outputs[request_id], prompt, params)
        reasons.update(engine.stats()["num_finished"])
        preemptions += engine.stats()["num_preemptions"]
    assert preemptions > 0
    assert reasons.keys() == {"length", "abort"} | (
        {"insufficient_system_resource"} if stop_preempted_request else set()
    )


def check(outputs: list[RequestOutput], prompt: list[int], params: SamplingParams) -> None:
    """The outputs of one request are a prefix of what it gets alone, and then one end."""
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    given = [output for output in outputs if not output.message]
    alone = greedy_twin(TABLE, prompt, len(given)) if params.greedy else sampled_twin(TABLE, prompt, params, len(given))
    assert [output.token_id for output in given] == alone
    assert [output.num_output_tokens for output in given] == list(range(1, len(given) + 1))
    if outputs[-1].finish_reason == "length":
        assert len(given) == min(params.max_tokens, 41 - len(prompt))
    for output in given:
        asked = params.prompt_logprobs and output.num_output_tokens == 1
        assert len(output.prompt_logprobs) == (len(prompt) - 1 if asked else 0)
        listed = output.top_token_ids[: params.top_logprobs]
        extra = [output.token_id] if params.top_logprobs and output.token_id not in listed else []
        assert len(listed) == params.top_logprobs and output.top_token_ids == listed + extra
