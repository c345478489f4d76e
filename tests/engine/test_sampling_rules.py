"""Rules of single requests, through the engine on the toy model: against a plain twin that has one request."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.engine.args import EngineType
from deepinfer_jax.engine.environ import rearm
from deepinfer_jax.engine.handover.sequence_state import SequenceState
from deepinfer_jax.engine.requests.outputs import RequestOutput, answer_ids, answer_text
from deepinfer_jax.engine.requests.sampling_params import SamplingParams
from deepinfer_jax.sampling import plain_rows, sample
from tests.support.drafting import drafts
from tests.support.engine_runs import while_unfinished
from tests.support.marks import slow
from tests.support.toy import (
    EOS,
    VOCAB,
    greedy_twin,
    history_logits,
    make_table,
    random_prompt,
    run,
    tokens,
    toy_engine,
)

pytestmark = [pytest.mark.toy, pytest.mark.unoptimised]

TABLE = make_table()
GREEDY = {"temperature": 0, "ignore_eos": True}
_sample = jax.jit(sample)


def twin_logits(params: SamplingParams, prompt: list[int], output: list[int]) -> np.ndarray:
    """What the next token of a request is drawn from."""
    logits = history_logits(TABLE, prompt + output).astype(np.float64).copy()
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    if len(output) < params.min_tokens:
        logits[list(params.stop_ids)] = -np.inf
    if params.first_n_token_no_eos == 1 and not output:
        logits[params.eos_id] = -np.inf
    for token in set(prompt + output):
        logits[token] *= 1 / params.repetition_penalty if logits[token] > 0 else params.repetition_penalty
        logits[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty * (token in output)
    return logits.astype(np.float32)


def twin(prompt: list[int], params: SamplingParams) -> list[int]:
    """Its output, of a request that only the number of tokens, EOS and stop ids end."""
    params = dataclasses.replace(params, eos_id=EOS)
    output: list[int] = []
    seed = params.seq_seed or 0
    while len(output) < params.max_tokens and not (output and output[-1] in params.stop_ids):
        rows = plain_rows(1).replace(
            temperature=jnp.asarray([params.temperature], jnp.float32),
            greedy=jnp.asarray([params.greedy]),
            top_p=jnp.asarray([params.top_p], jnp.float32),
            min_p=jnp.asarray([params.min_p], jnp.float32),
            seed=jnp.asarray([[seed & 0xFFFFFFFF, seed >> 32]], jnp.uint32),
            position=jnp.asarray([len(prompt) + len(output)], jnp.int32),
        )
        output.append(int(_sample(jnp.asarray(twin_logits(params, prompt, output))[None], rows).tokens[0]))
    return output


def random_params(rng: np.random.Generator, temperatures: tuple[float, ...] = (0.0, 0.8, 1.5)) -> SamplingParams:
    """Of all rules some, at random."""
    fields: dict[str, Any] = {"max_tokens": int(rng.integers(1, 20)), "seq_seed": int(rng.integers(2**40))}
    fields["temperature"] = float(rng.choice(temperatures))
    if rng.random() < 0.3:
        fields |= {"min_p": 0.1, "top_p": 0.95}
    if rng.random() < 0.5:
        fields |= {"repetition_penalty": 1.3, "presence_penalty": float(rng.choice([0.0, 0.5]))}
    if rng.random() < 0.5:
        fields |= {"frequency_penalty": float(rng.choice([-0.5, 0.9]))}
    if rng.random() < 0.4:
        fields["logit_bias"] = {int(token): 6.0 for token in rng.choice(VOCAB, 3, replace=False)} | {EOS: 5.0}
    if rng.random() < 0.4:
        fields |= {"stop_token_ids": rng.integers(4, VOCAB, 6).tolist()}
    if rng.random() < 0.4:
        fields |= {"min_tokens": int(rng.integers(fields["max_tokens"] + 1)), "first_n_token_no_eos": 1}
    return SamplingParams(**fields)


@pytest.mark.parametrize("overlap", [True, False])
def test_requests_with_any_rules_have_the_tokens_of_the_twin(overlap: bool) -> None:
    """Beside each other, in chunks, preempted (there are blocks for about three) and in slots that others used."""
    rng = np.random.default_rng(3)
    engine = toy_engine(num_kv_blocks=20, overlap=overlap, stop_preempted_request=False)
    compiled = engine.compile_count
    prompts = [random_prompt(int(rng.integers(1, 16)), seed) for seed in range(40)]
    wanted = [random_params(rng) for _ in prompts]
    for number, (prompt, params) in enumerate(zip(prompts, wanted, strict=True)):
        engine.add_request("u", str(number), params, prompt)
    results = run(engine)
    for number, (prompt, params) in enumerate(zip(prompts, wanted, strict=True)):
        assert tokens(results[str(number)]) == twin(prompt, params), params
    assert engine.stats()["num_preemptions"] > 0
    assert engine.compile_count == compiled


@pytest.mark.slow
def test_greedy_requests_with_any_rules_give_the_same_with_drafts() -> None:
    """Also of a preempted one, in the middle of a block, and where a stop cuts what was accepted."""
    rng = np.random.default_rng(4)
    texts = [random_prompt(int(rng.integers(1, 16)), seed) for seed in range(40)]
    wanted = [
        dataclasses.replace(random_params(rng, (0.0,)), logprobs_mode="raw_logprobs", top_logprobs=3) for _ in texts
    ]
    results = []
    for count in (0, 3):
        with drafts(count):
            engine = toy_engine(num_kv_blocks=22, stop_preempted_request=False)
        for number, (prompt, params) in enumerate(zip(texts, wanted, strict=True)):
            engine.add_request("u", str(number), params, prompt)
        results.append(run(engine))
        assert engine.stats()["num_preemptions"] > 0
    plain, drafted = results
    assert max(output.accept_tok for outputs in drafted.values() for output in outputs) > 2
    for number, (prompt, params) in enumerate(zip(texts, wanted, strict=True)):
        assert tokens(drafted[str(number)]) == twin(prompt, params), params
        for one, other in zip(drafted[str(number)], plain[str(number)], strict=True):
            assert one.token_logprobs == pytest.approx(other.token_logprobs, abs=1e-5)
            assert one.top_token_ids == other.top_token_ids
            assert (one.finish_reason, one.stop_reason) == (other.finish_reason, other.stop_reason)


def test_a_request_goes_on_by_its_rules_in_another_engine(tmp_path: Path) -> None:
    rng = np.random.default_rng(8)
    prompts = toy_engine(engine_type=EngineType.PROMPT)
    completions = toy_engine(engine_type=EngineType.COMPLETION, num_kv_blocks=20, stop_preempted_request=False)
    texts = [random_prompt(int(rng.integers(1, 12)), number) for number in range(20)]
    wanted = {str(number): (prompt, random_params(rng)) for number, prompt in enumerate(texts)}
    results: dict[str, list[int]] = {name: [] for name in wanted}
    for name, (prompt, params) in wanted.items():
        prompts.add_request("u", name, params, prompt)
    for _ in while_unfinished(prompts):
        for output in prompts.step():
            results[output.request_id].append(output.token_id)
        for name in prompts.computed_requests():
            prompts.export_sequence(name).save(tmp_path / name)
    for file in sorted(tmp_path.iterdir()):
        completions.import_sequence(SequenceState.load(file))
    for name, outputs in run(completions).items():
        results[name] += tokens(outputs)
    assert results == {name: twin(prompt, params) for name, (prompt, params) in wanted.items()}
    assert completions.stats()["num_preemptions"] > 0


def only(params: SamplingParams, prompt: list[int], **sizes: Any) -> list[RequestOutput]:
    engine = toy_engine(**sizes)
    engine.add_request("u", "r", params, prompt)
    return run(engine)["r"]


def test_a_stop_id_ends_a_request_also_when_eos_is_ignored() -> None:
    prompt = random_prompt(5)
    free = greedy_twin(TABLE, prompt, 8)
    outputs = only(SamplingParams(max_tokens=8, stop_token_ids=[free[3]], **GREEDY), prompt)
    assert tokens(outputs) == free[: free.index(free[3]) + 1]
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", free[3])
    assert answer_ids(outputs) == tokens(outputs)[:-1]


@pytest.mark.parametrize("num_drafts", [0, slow(4)])
def test_a_stop_text_ends_a_request_and_its_text_but_not_its_ids(num_drafts: int) -> None:
    prompt = random_prompt(5)
    free = greedy_twin(TABLE, prompt, 8)
    decode = toy_engine().tokenizer.decode
    stop = decode(free[3:5])  # over the border of two tokens
    with drafts(num_drafts):
        outputs = only(SamplingParams(max_tokens=8, stop=[stop, "☃"], **GREEDY), prompt)
    assert tokens(outputs) == free[:5]
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", stop)
    assert answer_text(outputs, decode) == decode(free[:3])


def test_the_token_itself_is_always_listed() -> None:
    params = SamplingParams(max_tokens=20, top_logprobs=2, temperature=2.0, seq_seed=5, ignore_eos=True)
    outputs = only(params, random_prompt(4))
    for output in outputs:
        place = output.top_token_ids.index(output.token_id)
        assert output.top_logprobs[place] == pytest.approx(output.token_logprobs, abs=1e-6)
        assert len(output.top_token_ids) == (2 if place < 2 else 3)
        assert sum(np.exp(output.top_logprobs)) <= 1 + 1e-6
    assert {len(output.top_token_ids) for output in outputs} == {2, 3}


def test_raw_log_probabilities_are_the_models_also_of_the_prompt() -> None:
    prompt = random_prompt(11)
    params = SamplingParams(
        max_tokens=6, temperature=0.4, top_k=3, logit_bias={9: 50.0}, presence_penalty=1.0, seq_seed=1,
        prompt_logprobs=True, ignore_eos=True,
    )  # fmt: skip
    raw = only(dataclasses.replace(params, logprobs_mode="raw_logprobs"), prompt)
    processed = only(params, prompt)
    assert tokens(raw) == tokens(processed)
    whole = prompt + tokens(raw)
    rows = np.stack([history_logits(TABLE, whole[:end]) for end in range(1, len(whole))])
    logprobs = np.asarray(jax.nn.log_softmax(jnp.asarray(rows)))[np.arange(len(rows)), whole[1:]]
    np.testing.assert_allclose(raw[0].prompt_logprobs, logprobs[:10], atol=1e-5)
    np.testing.assert_allclose([output.token_logprobs for output in raw], logprobs[10:], atol=1e-5)
    assert max(abs(a.token_logprobs - b.token_logprobs) for a, b in zip(raw, processed, strict=True)) > 0.1


def test_ids_outside_the_vocabulary_and_several_completions_are_refused() -> None:
    engine = toy_engine()
    assert engine.add_request("u", "r", SamplingParams(logit_bias={VOCAB: 1.0}), [5]) is None
    assert engine.add_request("u", "r", SamplingParams(stop_token_ids=[VOCAB]), [5]) is None
    with pytest.raises(ValueError, match="one completion, got n=2"):
        engine.add_request("u", "r", SamplingParams(n=2), [5])


def test_what_the_engines_eos_adds_counts_too() -> None:
    """Before an engine knows them, EOS is 0."""
    engine = toy_engine()
    engine.add_request("u", "other", SamplingParams(temperature=0, max_tokens=4), [5])
    most = SamplingParams(logit_bias=dict.fromkeys(range(2, 64), 1.0), stop_token_ids=[0], min_tokens=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deepinfer_jax.engine.requests.sampling_params.MAX_EDITS", 63)
        most = dataclasses.replace(most)
        with pytest.raises(ValueError, match="makes 64 changes of logits; at most 63"):
            engine.add_request("u", "r", most, [5])
        with pytest.raises(ValueError, match="makes 64 changes of logits; at most 63"):
            engine.add_request("u", "r", dataclasses.asdict(most), [5])
    assert tokens(run(engine)["other"]) == greedy_twin(TABLE, [5], 4)


def test_the_sampler_options_of_the_environment_act(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = random_prompt(6)
    free = greedy_twin(TABLE, prompt, 1)
    monkeypatch.setenv("DEEPINFER_DECODE_TOKEN_BLACKLIST", f"{free[0]}..{free[0]}")
    monkeypatch.setenv("DEEPINFER_SAMPLER_FORCE_TOPK", "2")
    monkeypatch.setenv("DEEPINFER_COMPUTE_SUM_SMALLER_PROBS", "1")
    names = ("DECODE_TOKEN_BLACKLIST", "SAMPLER_FORCE_TOPK", "COMPUTE_SUM_SMALLER_PROBS")
    for name in names:
        rearm(name)
    outputs = only(SamplingParams(max_tokens=1, seq_seed=3, top_logprobs=3), prompt)
    monkeypatch.undo()
    for name in names:
        rearm(name)
    logits = history_logits(TABLE, prompt).copy()
    logits[free[0]] = -np.inf
    first, second = np.argsort(-logits)[:2].tolist()
    assert outputs[0].top_token_ids[:2] == [first, second]
    assert sum(np.exp(outputs[0].top_logprobs[:2])) == pytest.approx(1, abs=1e-6)
    likelier = outputs[0].token_id == first
    assert outputs[0].sum_smaller_probs == pytest.approx(
        1.0 if likelier else np.exp(outputs[0].token_logprobs), rel=1e-5
    )
