"""`EngineArgs`: names, defaults, refusals."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from deepinfer_jax.engine.args import EngineArgs

pytestmark = pytest.mark.pure


def test_an_unknown_argument_names_the_nearest() -> None:
    with pytest.raises(TypeError, match=r"'max_num_seq'.* did you mean max_num_seqs"):
        EngineArgs.from_kwargs({"model": "m", "max_num_seq": 3})
    with pytest.raises(TypeError, match="'zzz'; known: model, "):
        EngineArgs.from_kwargs({"model": "m", "zzz": 3})


@pytest.mark.parametrize("name", ["ignore_len", "lookahead_tokens"])
def test_an_argument_that_never_did_anything_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} is no engine argument here: .*; leave it out"):
        EngineArgs.from_kwargs({"model": "m", name: 0})


def test_the_fields_are_deepinfers_in_its_order_then_ours() -> None:
    """DB §1.2, without the two that are dead there."""
    names = [field.name for field in dataclasses.fields(EngineArgs)]
    assert names == [
        *("model", "served_model_name", "tokenizer", "trust_remote_code", "load_format", "seed", "max_model_len"),
        *("data_parallel_size", "context_parallel_size", "expert_parallel_size", "engram_parallel_size"),
        *("engine_rank", "engine_group_rank", "gpu_memory_utilization", "max_num_batched_tokens", "max_num_seqs"),
        *("disable_log_stats", "revision", "tokenizer_revision", "stop_preempted_request", "engine_type"),
        *("chunked_prefill", "tokens_per_block", "offline_inference"),
        *("precision", "num_kv_blocks", "kv_cache_format", "enable_prefix_caching", "snapshot_memory_bytes"),
        "image_cache_bytes",
        "on_image_mismatch",
    ]


def test_sizes_left_to_the_engine_have_one_meaning() -> None:
    args = EngineArgs(model="m", data_parallel_size=0, tokens_per_block=-1)
    assert (args.data_parallel_size, args.tokens_per_block) == (1, 128)
    both = EngineArgs(model="m", data_parallel_size=2, expert_parallel_size=4, engram_parallel_size=8)
    assert both.num_devices == 8


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("load_format", "gguf"),
        ("load_format", None),
        ("max_num_seqs", True),
        ("precision", "fp64"),
        ("max_model_len", 0),
        ("max_num_seqs", -1),
        ("max_num_batched_tokens", -8),
        ("gpu_memory_utilization", 1.5),
        ("gpu_memory_utilization", 0),
        ("data_parallel_size", -1),
        ("expert_parallel_size", 0),
        ("context_parallel_size", 2),
        ("engram_parallel_size", 2),
        ("engine_rank", 1),
        ("engine_group_rank", 1),
        ("engine_type", 3),
        ("snapshot_memory_bytes", -1),
        ("tokens_per_block", 0),
        ("tokens_per_block", 7),
        ("num_kv_blocks", 0),
        ("kv_cache_format", "fp8"),
        ("engine_type", "NORMAL"),
        ("gpu_memory_utilization", float("nan")),
    ],
)
def test_values_that_cannot_be_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        EngineArgs(**{"model": "m", field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["4", None, 4.5, [1], np.asarray([1, 2])])
@pytest.mark.parametrize(
    "field",
    [
        *("trust_remote_code", "seed", "data_parallel_size", "context_parallel_size", "expert_parallel_size"),
        *("engram_parallel_size", "engine_rank", "engine_group_rank", "gpu_memory_utilization", "max_num_seqs"),
        *("disable_log_stats", "stop_preempted_request", "chunked_prefill", "tokens_per_block", "offline_inference"),
    ],
)
def test_values_of_another_kind_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises((TypeError, ValueError), match=field):
        EngineArgs(**{"model": "m", field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [None, 4, b"m", ["m"]])
def test_names_that_are_no_text_are_refused(value: object) -> None:
    with pytest.raises(TypeError, match="model must be the path of a folder, got "):
        EngineArgs(model=value)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="served_model_name must be a string, got "):
        EngineArgs(model="m", served_model_name=value)  # type: ignore[arg-type]


def test_paths_and_numpys_numbers_are_taken() -> None:
    args = EngineArgs(
        model=Path("m"),  # type: ignore[arg-type]
        tokenizer=Path("t"),  # type: ignore[arg-type]
        max_num_seqs=np.int64(4),  # type: ignore[arg-type]
        chunked_prefill=np.bool_(False),  # type: ignore[arg-type]
        gpu_memory_utilization=np.float32(0.5),  # type: ignore[arg-type]
    )
    assert (args.model, args.tokenizer, args.gpu_memory_utilization) == ("m", "t", 0.5)
    assert type(args.max_num_seqs) is int and args.chunked_prefill is False


def test_random_weights_are_for_one_device() -> None:
    with pytest.raises(ValueError, match='"dummy" draws its weights on one device, and the engine needs 2'):
        EngineArgs(model="m", load_format="dummy", data_parallel_size=2)


def test_the_load_format_is_read_in_any_case() -> None:
    assert EngineArgs(model="m", load_format="Dummy").load_format == "dummy"
