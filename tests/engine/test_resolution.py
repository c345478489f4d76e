"""What an engine is: sizes that follow from its arguments, and an environment that is read once."""

import dataclasses
import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax import SamplingParams
from deepinfer_jax.checkpoint.tiny_config import TINY
from deepinfer_jax.config.model_config import parse_config
from deepinfer_jax.engine.args import EngineArgs, EngineType
from deepinfer_jax.engine.config import EngineConfig
from deepinfer_jax.engine.environ import Environment
from deepinfer_jax.engine.resolution import memory_demand, resolve_config, resolve_engine
from deepinfer_jax.memory.plan import plan_memory
from deepinfer_jax.model.bounded_replay import Replay
from tests.support.drafting import drafts
from tests.support.toy import MAX_POSITIONS, greedy_twin, make_table, random_prompt, run, tokens, toy_engine, toy_parts
from tests.support.toy_grammar import constrained_twin, grammar_engine
from tests.support.varlen_engine import variables

pytestmark = pytest.mark.pure

DRAFT_BLOCK = 5
MODEL = parse_config(TINY)
RELEASED = parse_config(json.loads((Path(__file__).parents[1] / "configs" / "released.json").read_text()))


def resolved(
    model_len: int = 1_048_576,
    *,
    num_drafts: int = 0,
    overlapped: bool = True,
    max_len_in_memory: int | None = None,
    num_blocks: int | None = None,
    **kwargs: Any,
) -> EngineConfig:
    with variables(USE_NEXTN_DECODE=str(num_drafts), ZERO_OVERHEAD_SCHEDULING=str(int(overlapped))):
        return resolve_config(
            EngineArgs(model="m", **kwargs),
            vocab_size=64,
            max_position_embeddings=model_len,
            draft_block=DRAFT_BLOCK,
            most_prefill_tokens=2048,
            max_len_in_memory=max_len_in_memory,
            num_blocks=num_blocks,
        )


def test_the_longest_text_is_the_models_unless_memory_holds_less() -> None:
    assert resolved(64).max_model_len == 64
    assert resolved(1_048_576).max_model_len == 1_048_576
    assert resolved(1_048_576, max_len_in_memory=5000).max_model_len == 5000
    assert resolved(64, max_len_in_memory=5000).max_model_len == 64
    assert resolved(64, max_model_len=9).max_model_len == 9


@pytest.mark.parametrize(
    ("drafts", "overlapped", "runtime"), [(5, True, 4112), (5, False, 4106), (0, True, 4097), (0, False, 4096)]
)
def test_the_runtime_length_is_deepinfers(drafts: int, overlapped: bool, runtime: int) -> None:
    """The vectors of DB §16."""
    derived = resolved(4096, num_drafts=drafts, overlapped=overlapped, max_num_seqs=256)
    assert derived.runtime_max_model_len == runtime


def test_the_token_budget_follows_from_the_running_sequences() -> None:
    assert resolved(1_048_576).max_num_batched_tokens == 2048
    assert resolved(1_048_576, max_num_seqs=5000).max_num_batched_tokens == 5000
    assert resolved(1_048_576, max_num_seqs=500, num_drafts=5).max_num_batched_tokens == 3000
    whole = resolved(9000, chunked_prefill=False)
    assert (whole.max_num_batched_tokens, whole.prompt_limit) == (9000, 9000)
    assert resolved(64, chunked_prefill=False).max_num_batched_tokens == 4096
    assert resolved(64, max_num_batched_tokens=256).max_num_batched_tokens == 256


def test_each_data_index_has_its_share_of_slots_rounded_up() -> None:
    derived = resolved(100, data_parallel_size=3, max_num_seqs=7, tokens_per_block=16)
    assert (derived.max_num_seqs, derived.num_slots, derived.blocks_per_sequence) == (7, 3, 7)


def test_a_context_beyond_the_models_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        resolved(64, max_model_len=65)
    assert "65 exceeds the model's max_position_embeddings 64" in caplog.text


def test_a_budget_that_is_too_small_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(ValueError, match=r"max_num_batched_tokens \(47\) must be .* = 8 × 6 = 48"):
        resolved(64, max_num_batched_tokens=47, max_num_seqs=8, num_drafts=5)
    with pytest.raises(ValueError, match=r"max_num_batched_tokens \(63\) .* max_model_len \(64\) when chunked_prefill"):
        resolved(64, max_num_batched_tokens=63, max_num_seqs=8, chunked_prefill=False)


def test_a_pool_that_holds_no_longest_sequence_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(
        ValueError, match=r"has 3 blocks of 16 tokens .* \(64\) tokens takes 4: lower max_model_len to 48"
    ):
        resolved(64, tokens_per_block=16, num_blocks=3)
    assert resolved(64, tokens_per_block=16, max_num_seqs=5).num_blocks == 5 * 4


arguments = st.fixed_dictionaries(
    {
        "max_model_len": st.none() | st.integers(1, 300),
        "data_parallel_size": st.integers(1, 3),
        "max_num_seqs": st.integers(1, 40),
        "tokens_per_block": st.sampled_from([2, 16, 128]),
        "chunked_prefill": st.booleans(),
        "engine_type": st.sampled_from(EngineType),
        "enable_prefix_caching": st.booleans(),
        "snapshot_memory_bytes": st.sampled_from([0, 1 << 20]),
        "stop_preempted_request": st.booleans(),
    }
)


@given(arguments, st.integers(0, DRAFT_BLOCK), st.booleans(), st.integers(0, 500))
def test_every_size_follows_from_the_arguments(
    kwargs: dict[str, Any], num_drafts: int, overlapped: bool, more: int
) -> None:
    budget = max(kwargs["max_num_seqs"] * (1 + num_drafts), 0 if kwargs["chunked_prefill"] else 300) + more
    config = resolved(300, num_drafts=num_drafts, overlapped=overlapped, max_num_batched_tokens=budget, **kwargs)
    prompts_only = kwargs["engine_type"] is EngineType.PROMPT
    time = 1 if prompts_only else 1 + num_drafts
    longest = kwargs["max_model_len"] or 300
    width = math.ceil(longest / kwargs["tokens_per_block"])
    slots = math.ceil(kwargs["max_num_seqs"] / kwargs["data_parallel_size"])
    hands_over = kwargs["engine_type"] is not EngineType.NORMAL
    caching = (
        kwargs["enable_prefix_caching"] and kwargs["snapshot_memory_bytes"] > 0 and longest > kwargs["tokens_per_block"]
    )
    assert (config.max_model_len, config.max_num_batched_tokens) == (longest, budget)
    assert (config.num_drafts, config.num_slots, config.blocks_per_sequence) == (time - 1, slots, width)
    assert config.num_blocks == slots * width
    assert config.runtime_max_model_len == longest + 2 * (time - 1) + (time if overlapped else 0)
    assert config.prompt_limit == (longest if kwargs["chunked_prefill"] else min(longest, budget))
    assert config.prefix_caching == caching

    shape, limits, duties = config.cache_shape, config.scheduler_limits, config.runner_duties
    assert (shape.data, shape.slots, shape.blocks) == (kwargs["data_parallel_size"], slots, slots * width)
    assert (shape.tokens_per_block, shape.num_drafts) == (kwargs["tokens_per_block"], time - 1)
    shared = {f.name for f in dataclasses.fields(limits)} & {f.name for f in dataclasses.fields(config)}
    assert len(shared) == 10 and all(getattr(limits, name) == getattr(config, name) for name in shared)
    assert (limits.num_slots, limits.prompt_limit, limits.decodes) == (slots, config.prompt_limit, not prompts_only)
    assert limits.snapshot_budget == kwargs["snapshot_memory_bytes"]
    assert duties.kinds == (("prefill",) if prompts_only else ("prefill", "decode"))
    assert (duties.moves_slots, duties.moves_blocks) == (hands_over or caching, hands_over)
    assert duties.drafts == (time > 1 and kwargs["engine_type"] is EngineType.COMPLETION)

    buckets = config.buckets(12)
    assert {bucket.time for bucket in buckets.decode} == {time}
    assert max(bucket.rows for bucket in buckets.decode) == slots
    assert {max(bucket.width for bucket in kind) for kind in (buckets.decode, buckets.prefill)} == {width}
    most = min(budget, 2048) if kwargs["chunked_prefill"] else config.prompt_limit
    assert max(bucket.tokens for bucket in buckets.prefill) <= most
    assert max(bucket.time for bucket in buckets.prefill) == min(most, config.prompt_limit)


@given(arguments.filter(lambda kwargs: kwargs["data_parallel_size"] < 3), st.integers(0, MODEL.text.draft_block))
def test_the_engine_is_as_large_as_its_plan(kwargs: dict[str, Any], num_drafts: int) -> None:
    args = EngineArgs(model="m", **kwargs)
    with variables(USE_NEXTN_DECODE=str(num_drafts)):
        config = resolve_engine(args, MODEL, platform="cpu", memory=1 << 30)
        plan = plan_memory(memory_demand(args, MODEL, platform="cpu", memory=1 << 30))
    assert (config.max_model_len, config.num_slots, config.num_blocks) == (
        *(plan.max_model_len, plan.num_slots, plan.num_blocks),
    )
    assert (config.image_rows, config.tokens_per_block) == (plan.image_rows, plan.tokens_per_block)


def test_what_does_not_fit_is_refused_with_the_plans_sentence() -> None:
    with variables(), pytest.raises(ValueError, match=r"^m: the weights take 510 GB on each of 1 device\(s\)"):
        resolve_engine(EngineArgs(model="m"), RELEASED, platform="gpu", memory=141 * 10**9)


def test_a_configuration_is_frozen_and_hashable() -> None:
    config = resolved(64, max_num_seqs=4)
    assert hash(config) == hash(resolved(64, max_num_seqs=4)) and config == resolved(64, max_num_seqs=4)
    assert config != resolved(64, max_num_seqs=5)
    for name in ("num_drafts", "max_model_len", "sampler"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, name, 0)


EFFECTS: list[tuple[str, str, str, Any]] = [
    ("ZERO_OVERHEAD_SCHEDULING", "0", "zero_overhead_scheduling", False),
    ("USE_NEXTN_DECODE", "3", "num_drafts", 3),
    ("BATCH_INVARIANT", "1", "batch_invariant", True),
    ("POISON_FREED_STATE", "1", "poison_freed_state", True),
    ("LOGGING_INTERVAL_STEP", "7", "logging_interval", 7),
    ("COMPILATION_CACHE_DIR", "x", "compilation_cache_dir", "x"),
    ("COMPUTE_SUM_SMALLER_PROBS", "1", "sampler.sum_smaller_probs", True),
    ("SAMPLER_FORCE_TOPK", "9", "sampler.force_top_k", 9),
    ("DECODE_TOKEN_BLACKLIST", "3..5", "sampler.blacklist", (3, 4, 5)),
    ("ENABLE_MTP_VARLEN", "1", "verifies_by_confidence", True),
    ("DFLASH_CONFIDENCE_HEAD_TEMPERATURE", "2.0", "confidence_temperatures", (2.0,) * DRAFT_BLOCK),
    ("DECODE_PERF_CACHE_DIR", "x", "decode_times.directory", "x"),
    ("DECODE_PERF_CACHE_TTL_SEC", "5", "decode_times.ttl", 5),
    ("XGRAMMAR_TIMEOUT", "3", "grammars.timeout", 3),
    ("XGRAMMAR_DISABLE_CACHE", "1", "grammars.cache_bytes", 0),
    ("XGRAMMAR_CACHE_LIMIT_BYTES", "77", "grammars.cache_bytes", 77),
    ("SO_BUILDER_CPUS", "2", "grammars.num_threads", 2),
    ("MULTI_MODAL_CPUS", "2", "images.num_threads", 2),
    ("MULTI_MODAL_BUFFER_SIZE", "3", "images.max_requests", 3),
    ("MULTIMODAL_POOL_SIZE_GB", "2", "images.max_bytes", 2 << 30),
    ("MULTI_MODAL_WORKER_TIMEOUT", "0.5", "images.timeout", 0.5),
]
"""Variable, value, and what it makes of which attribute."""


@pytest.mark.parametrize(("name", "value", "attribute", "expected"), EFFECTS)
def test_an_engine_is_what_the_environment_asked_for_when_it_was_made(
    name: str, value: str, attribute: str, expected: Any
) -> None:
    def found(config: EngineConfig) -> Any:
        for part in attribute.split("."):
            config = getattr(config, part)
        return config

    def engine() -> EngineConfig:
        return resolve_config(
            EngineArgs(model="m"),
            vocab_size=64,
            max_position_embeddings=64,
            draft_block=DRAFT_BLOCK,
            most_prefill_tokens=64,
        )

    with drafts(None):
        before = engine()
        with variables(**{name: value}):
            changed = engine()
        after = engine()
    assert found(before) != found(changed) == expected
    assert before == after


def test_every_variable_with_an_effect_changes_some_attribute() -> None:
    read_elsewhere = {"XDG_CACHE_HOME"}  # read anew each time
    replay = {"DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE", "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS"}
    rows = {row.name for row in vars(Environment).values() if getattr(row, "has_effect", False)}
    assert rows == {f"DEEPINFER_{name}" for name, *_ in EFFECTS} | read_elsewhere | replay
    window = MODEL.text.sliding_window + 1
    with variables(YOCO_PREFILL_TRUNCATION_MODE="mask", YOCO_PREFILL_KEEP_TOKENS=str(window), USE_NEXTN_DECODE="0"):
        config = resolve_engine(EngineArgs(model="m"), MODEL, platform="cpu", memory=1 << 30)
    assert (config.replay, config.keep_tokens) == (Replay("mask", window), window)


def test_an_engine_asks_the_environment_nothing_once_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, constrained = toy_engine(), grammar_engine()
    config = engine.limits

    def refuse(*_: object) -> None:
        raise AssertionError("the environment was read")

    with variables(USE_NEXTN_DECODE="3", POISON_FREED_STATE="1", SAMPLER_FORCE_TOPK="1", SO_BUILDER_CPUS="2"):
        monkeypatch.setattr(Environment, "value", refuse)
        prompt = random_prompt(4, seed=7)
        engine.add_request("u", "a", SamplingParams(temperature=0, max_tokens=9, ignore_eos=True), prompt)
        regex = {"schema_type": "regex", "schema": "[ab]{3}c"}
        constrained.add_request("u", "a", SamplingParams(temperature=0, max_tokens=9, so_args=regex), prompt)
        assert tokens(run(engine)["a"]) == greedy_twin(make_table(), prompt, 9)
        assert tokens(run(constrained)["a"]) == constrained_twin(prompt, regex, 9)
        monkeypatch.undo()
        changed = toy_parts(EngineArgs(model="toy")).config
    assert (engine.limits, config.num_drafts, config.max_model_len) == (config, 0, MAX_POSITIONS)
    assert (changed.num_drafts, changed.sampler.force_top_k, changed.grammars.num_threads) == (3, 1, 2)
    assert changed.poison_freed_state and not config.poison_freed_state
