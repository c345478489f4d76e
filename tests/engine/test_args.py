"""`EngineArgs`: names, defaults, derived sizes, refusals."""

import logging

import pytest

from deepinfer_jax.engine.args import EngineArgs, EngineType


def test_an_unknown_argument_names_the_nearest() -> None:
    with pytest.raises(TypeError, match=r"'max_num_seq'.* did you mean max_num_seqs"):
        EngineArgs.from_kwargs({"model": "m", "max_num_seq": 3})
    with pytest.raises(TypeError, match="'zzz'; known: model, "):
        EngineArgs.from_kwargs({"model": "m", "zzz": 3})


def test_sizes_follow_from_the_model_and_the_arguments() -> None:
    limits = EngineArgs(model="m").limits(max_position_embeddings=1_048_576)
    assert (limits.max_model_len, limits.max_num_seqs, limits.max_num_batched_tokens) == (4096, 256, 4096)
    assert limits.buckets == ((1, 128), (4, 128), (16, 128), (64, 64), (256, 16))
    small = EngineArgs(model="m", max_num_seqs=3).limits(max_position_embeddings=64)
    assert (small.max_model_len, small.buckets) == (64, ((1, 64), (3, 64)))
    long = EngineArgs(model="m", max_model_len=9000, max_num_seqs=1).limits(max_position_embeddings=1_048_576)
    assert (long.max_model_len, long.max_num_batched_tokens, long.buckets) == (9000, 9000, ((1, 128),))


def test_a_context_beyond_the_models_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        EngineArgs(model="m", max_model_len=65).limits(max_position_embeddings=64)
    assert "65 exceeds the model's max_position_embeddings 64" in caplog.text


def test_a_budget_below_one_token_per_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_num_batched_tokens \(7\) must be at least max_num_seqs \(8\)"):
        EngineArgs(model="m", max_num_batched_tokens=7, max_num_seqs=8).limits(64)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("load_format", "gguf"),
        ("load_format", None),
        ("max_num_seqs", True),
        ("precision", "fp64"),
        ("max_model_len", 0),
        ("max_num_seqs", -1),
        ("max_num_batched_tokens", 8.0),
        ("gpu_memory_utilization", 1.5),
        ("gpu_memory_utilization", 0),
        ("expert_parallel_size", 2),
        ("engine_type", EngineType.COMPLETION),
    ],
)
def test_values_that_cannot_be_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        EngineArgs(**{"model": "m", field: value})  # type: ignore[arg-type]


def test_the_load_format_is_read_in_any_case() -> None:
    assert EngineArgs(model="m", load_format="Dummy").load_format == "dummy"
