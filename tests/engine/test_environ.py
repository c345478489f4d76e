"""The environment table of DB §2: lazy, cached, re-armed; every variable of DeepInfer's is known."""

import logging
import re

import pytest

from deepinfer_jax.engine import environ
from deepinfer_jax.engine.environ import NOT_ON_XLA, NOT_YET, TABLE, Environment

pytestmark = pytest.mark.pure

# DB §2, in its order, with the defaults written there.
DEEPINFER = """
ACCELERATOR nvidia | COMPUTE_SUM_SMALLER_PROBS False | JIT_CACHE_DIR None | NCCL_NUM_SMS 32 | USERBUFFER_COMM_SMS 0
GLOO_TIMEOUT 14400.0 | REARRANGE_P2P_GROUPS 1 | OVERRIDE_NUM_EXTRA_EXPERTS 0 | EXPERT_COUNT_WINDOW_SIZE 100
EXPERT_REARRANGEMENT_STEP_INTERVAL 0 | REARRANGE_AFTER_PREFILL_IN_NORMAL_ENGINE False | MOE_LB_STAT_INTERVAL 128
FORCE_IMBALANCE_RATIO 0.0 | FORCE_LOAD_BALANCE False | SHOW_EPLB_DETAIL False | PREFILL_MAX_SUM_SEQLEN_K None
INDEX_ATTN_MEMORY_LIMIT 10737418240 | ENABLE_MTP_VARLEN False | DFLASH_CONFIDENCE_HEAD_TEMPERATURE 1.0
ENGRAM_PAD_TOKEN 2 | ENGRAM_FORCE_GPU_STORAGE False | SAMPLER_FORCE_TOPK 0 | DECODE_TOKEN_BLACKLIST
ENFORCE_EAGER False | CUDAGRAPH_BATCH_SIZE_INTERVAL 8 | DFLASH_ENFORCE_EAGER False
DFLASH_CUDAGRAPH_BATCH_SIZE_INTERVAL 8
DECODE_PERF_CACHE_DIR None | DECODE_PERF_CACHE_TTL_SEC 3600 | NUM_STATE_SLOTS_RATIO 1.2
PREFILL_STORE_EXTRA_STATE False | PREFILL_STORE_EXTRA_SIZE 128 | XGRAMMAR_DEBUG False | XGRAMMAR_TIMEOUT 20
XGRAMMAR_DISABLE_CACHE False | XGRAMMAR_CACHE_LIMIT_BYTES 10737418240 | SO_BUILDER_CPUS 4 | PREFILL_ATTEMPT_INTERVAL 70
PREFILL_ANY_ATTEMPT_INTERVAL 100 | LOGGING_INTERVAL_STEP 100 | NCCL_MEMORY_SAMPLE_INTERVAL_STEPS 1000
RINGBUFFER_WARNING_INTERVAL 60.0 | GC_INTERVAL_STEP 1000 | YOCO_PREFILL_TRUNCATION_MODE off | YOCO_PREFILL_KEEP_TOKENS 0
BATCH_INVARIANT False | DISABLE_SYNC_GUARD False | PROFILE_TORCH_CUDA_MEMORY None | ENABLE_MEMORY_TRACING False
PROFILE_HTTP_ENABLE False | PROFILE_HTTP_PORT_BASE 6070 | TORCH_PROFILER_DIR None | MULTIMODAL_POOL_SIZE_GB 8
MULTI_MODAL_BUFFER_SIZE 512 | MULTI_MODAL_WORKER_TIMEOUT 1800.0
"""
# Where DeepInfer's default is set by the engine type or follows from another value.
DECIDED_LATER = {"ZERO_OVERHEAD_SCHEDULING", "USE_NEXTN_DECODE", "MAX_BACKTRACKING_TOKENS", "USE_MULTIMODAL_POOL"}


@pytest.fixture
def env() -> Environment:
    return Environment()


def test_every_variable_of_deepinfer_is_a_row_with_its_default() -> None:
    listed = dict(f"{entry} ".split(" ", 1) for entry in re.split(r" \| |\n", DEEPINFER) if entry)
    rows = {row.name.removeprefix("DEEPINFER_"): str(row.default) for row in TABLE}
    assert {name: rows.get(name) for name in listed} == {name: default.strip() for name, default in listed.items()}
    assert {name for name in DECIDED_LATER if rows[name] == "None"} == DECIDED_LATER
    ours = {"COMPILATION_CACHE_DIR", "XDG_CACHE_HOME", "CPP_LOG_LEVEL", "POISON_FREED_STATE", "MULTI_MODAL_CPUS"}
    assert set(rows) == set(listed) | DECIDED_LATER | ours


def test_every_row_says_what_it_means_where_it_applies_and_why_it_does_not() -> None:
    assert len({row.name for row in TABLE}) == len(TABLE)
    for row in TABLE:
        assert row.meaning and row.applies in ("engine", NOT_ON_XLA, NOT_YET), row.name
        assert bool(row.instead) == (row.applies == NOT_ON_XLA), row.name
        assert row.has_effect == (row.applies == "engine"), row.name


@pytest.mark.parametrize(
    ("text", "value"),
    [("0", False), ("", False), ("false", False), ("False", False), ("no", True), ("FALSE", True), ("1", True)],
)
def test_a_boolean_is_true_but_for_four_spellings(
    text: str, value: bool, env: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPINFER_BATCH_INVARIANT", text)
    assert env.BATCH_INVARIANT is value


def test_a_value_is_read_on_first_access_and_kept_until_it_is_rearmed(
    env: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DEEPINFER_USE_NEXTN_DECODE", raising=False)
    monkeypatch.setenv("DEEPINFER_LOGGING_INTERVAL_STEP", "7")
    assert (env.LOGGING_INTERVAL_STEP, env.USE_NEXTN_DECODE) == (7, None)
    monkeypatch.setenv("DEEPINFER_LOGGING_INTERVAL_STEP", "8")
    monkeypatch.setenv("DEEPINFER_USE_NEXTN_DECODE", "0")
    assert (env.LOGGING_INTERVAL_STEP, env.USE_NEXTN_DECODE) == (7, None)
    env.rearm("LOGGING_INTERVAL_STEP")
    assert (env.LOGGING_INTERVAL_STEP, env.USE_NEXTN_DECODE) == (8, None)
    monkeypatch.setenv("DEEPINFER_LOGGING_INTERVAL_STEP", "9")
    env.rearm("DEEPINFER_LOGGING_INTERVAL_STEP")
    assert env.LOGGING_INTERVAL_STEP == 9
    env.rearm()
    assert env.USE_NEXTN_DECODE == 0
    with pytest.raises(ValueError, match=r"LOGING_INTERVAL is not .*did you mean DEEPINFER_LOGGING_INTERVAL_STEP"):
        env.rearm("LOGING_INTERVAL")


@pytest.mark.parametrize("text", ["", "many", "1.5"])
def test_a_bad_value_is_an_error_that_starts_with_the_variable(
    text: str, env: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPINFER_LOGGING_INTERVAL_STEP", text)
    with pytest.raises(ValueError, match=f"^DEEPINFER_LOGGING_INTERVAL_STEP is '{text}'; expected an integer$"):
        env.LOGGING_INTERVAL_STEP  # noqa: B018
    monkeypatch.setenv("DEEPINFER_LOGGING_INTERVAL_STEP", "-1")
    assert env.LOGGING_INTERVAL_STEP == -1  # a failure is not remembered


def test_variables_without_effect_and_unknown_ones_warn_once(
    env: Environment, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("ENFORCE_EAGER", "PROFILE_HTTP_ENABLE", "BATCH_INVARIANT", "LOGGING_INTERVAL_STEPS"):
        monkeypatch.setenv(f"DEEPINFER_{name}", "1")
    with caplog.at_level(logging.WARNING, environ.__name__):
        env.warn_inapplicable()
        env.warn_inapplicable()
    assert [record.getMessage() for record in caplog.records] == [
        "DEEPINFER_ENFORCE_EAGER has no effect: not on XLA (every step is a program that was compiled at start)",
        "DEEPINFER_LOGGING_INTERVAL_STEPS is set, but there is no such variable; did you mean "
        "DEEPINFER_LOGGING_INTERVAL_STEP?",
        "DEEPINFER_PROFILE_HTTP_ENABLE has no effect: not used in this version",
    ]
