"""The memory plan against numbers worked out by hand, against the arrays themselves, and against brute force."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax.cache.paged import paged_state, state_specs
from deepinfer_jax.cache.pools import CacheShape, StateSpec, init_pools
from deepinfer_jax.checkpoint.init import init_params
from deepinfer_jax.checkpoint.tiny_config import TINY
from deepinfer_jax.config.model_config import PRECISIONS, ModelConfig, load_config, parse_config
from deepinfer_jax.memory import device
from deepinfer_jax.memory.demand import MemoryDemand
from deepinfer_jax.memory.device import device_memory
from deepinfer_jax.memory.parts import checkpoint_bytes, state_bytes, temporary_bytes, weight_bytes
from deepinfer_jax.memory.plan import MemoryPlan, plan_memory
from deepinfer_jax.memory.units import format_bytes
from deepinfer_jax.runtime.slot_table import init_slot_table
from deepinfer_jax.weights.layout import released_tensors
from tests.support.paths import GOLDEN_B, RELEASED_CONFIG

pytestmark = pytest.mark.pure

GB = 10**9
RELEASED = parse_config(json.loads(RELEASED_CONFIG.read_text()))
TINY_CONFIG = parse_config(TINY)
STATE = ("compressed KV", "index keys", "window rings", "open groups", "n-gram tails", "draft window rings")
WEIGHTS = ("text weights", "routed experts", "Engram tables", "draft weights", "vision weights")


def planned(model: ModelConfig, **demand: Any) -> MemoryPlan:
    return plan_memory(MemoryDemand(model, **demand))


def test_the_checkpoint_s_bytes_are_those_of_its_tensors_without_headers() -> None:
    assert checkpoint_bytes(RELEASED) == 510_286_023_000 == sum(tensor.nbytes for tensor in released_tensors(RELEASED))
    folder = GOLDEN_B
    raw = (folder / "model.safetensors").read_bytes()
    header = 8 + int.from_bytes(raw[:8], "little")
    assert checkpoint_bytes(load_config(folder)) == len(raw) - header


def test_released_weights_on_one_device_are_the_published_parts() -> None:
    token_map = 4 * 129_280
    assert weight_bytes(RELEASED, "reference", "gpu", 1, 1) == {
        "text weights": 9_846_748_608,
        "routed experts": 288_777_830_400,
        "Engram tables": 202_758_032_400 + token_map,
        "vision weights": 970_536_960,
        "draft weights": 7_932_874_632,
    }


def test_released_weights_on_2_x_4_devices_have_known_sizes() -> None:
    found = weight_bytes(RELEASED, "reference", "gpu", 2, 4)
    # Embedding and head lie over all eight; every other text weight is on each device.
    vocabulary = 2 * 129_280 * 5120 * 2
    assert found["text weights"] == 9_846_748_608 - vocabulary + vocabulary // 8
    # Experts lie over the four of the expert axis.
    assert found["routed experts"] == 288_777_830_400 // 4
    # 384,006,168 rows divide by eight, 384,016,682 are filled up to 8 x 48,002,086; a row has 256 + 8 bytes.
    assert found["Engram tables"] == (48_000_771 + 48_002_086) * 264 + 4 * 129_280


def test_experts_that_do_not_divide_are_filled_up() -> None:
    expert = 3 * (2304 * 5120 // 2 + 2304 * 5120 // 32)  # FP4 and one scale byte for 32 values
    found = weight_bytes(RELEASED, "reference", "gpu", 1, 5)
    assert found["routed experts"] == 40 * 77 * expert  # 5 x 77 = 385


def test_a_mesh_that_cannot_share_the_vocabulary_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"embed\.weight: axis 0 \(vocab\) has 129280 entries .* 3 devices"):
        planned(RELEASED, expert_parallel_size=3)


def test_released_state_is_890_bytes_per_token_and_528_per_window_row() -> None:
    plan = planned(RELEASED, max_num_seqs=1, num_blocks=10, max_model_len=1024)
    # Entry and index key take 288 + 68 bytes; the sources are three of ratio 2 and one of ratio 1.
    assert plan.bytes_per_token == (288 + 68) * (3 / 2 + 1) == 890
    assert plan.bytes_per_block == 128 * 890
    assert {name: plan.parts[name] for name in STATE} == {
        "compressed KV": 10 * 128 * 288 * 5 // 2,
        "index keys": 10 * 128 * 68 * 5 // 2,
        "window rings": 40 * 128 * 528,
        "open groups": 3 * 2 * 512 * 4,
        "n-gram tails": 3 * 4,
        "draft window rings": 3 * 128 * 528,
    }
    assert plan.bytes_per_slot == 2_703_360 + 12_288 + 12 + 202_752
    assert plan.parts["block tables"] == 1024 // 128 * 4
    assert plan.parts["snapshots"] == 0


@pytest.mark.parametrize(
    ("precision", "packed", "per_token"),
    [("bf16", True, 890), ("reference", False, 2.5 * 640 * 2), ("float32", True, 890), ("float32_exact", True, 6400)],
)
def test_unpacked_state_takes_the_type_of_the_arithmetic(precision: str, packed: bool, per_token: float) -> None:
    plan = planned(RELEASED, precision=precision, packed=packed, num_blocks=1)
    assert plan.bytes_per_token == per_token


def test_drafts_keep_their_distributions() -> None:
    plan = planned(RELEASED, num_drafts=5, max_num_seqs=32, num_blocks=1)
    assert plan.parts["draft log-probabilities"] == 32 * 5 * (129_280 + 2) * 4
    assert planned(RELEASED, num_blocks=1).parts["draft log-probabilities"] == 0


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_plan_counts_the_bytes_of_the_arrays_themselves(precision: Any) -> None:
    shape = CacheShape(data=1, slots=3, blocks=7, tokens_per_block=4, num_drafts=2)
    plan = planned(
        TINY_CONFIG,
        precision=precision,
        platform="cpu",
        max_num_seqs=3,
        max_model_len=TINY_CONFIG.text.max_position_embeddings,
        num_blocks=7,
        tokens_per_block=4,
        num_drafts=2,
    )
    params = jax.eval_shape(lambda key: init_params(TINY_CONFIG, key, precision=precision), jax.random.key(0))
    declared = paged_state(TINY_CONFIG, precision, tokens_per_block=4)
    cache = jax.eval_shape(lambda: init_pools(declared, shape))
    text = TINY_CONFIG.text
    table = jax.eval_shape(lambda: init_slot_table(shape, text.max_position_embeddings // 4, text.vocab_size))
    assert sum(plan.parts[name] for name in WEIGHTS) == _nbytes(params)
    assert sum(plan.parts[name] for name in STATE) == _nbytes(cache)
    parts = ("slot table", "block tables", "draft log-probabilities")
    assert sum(plan.parts[name] for name in parts) == _nbytes(table)
    assert plan.total == sum(plan.parts.values())


def _nbytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def test_each_data_index_has_its_share_of_sequences_and_its_own_blocks() -> None:
    one = planned(RELEASED, expert_parallel_size=8, memory=141 * GB, max_num_seqs=9, max_model_len=8192)
    two = planned(
        RELEASED, data_parallel_size=2, expert_parallel_size=8, memory=141 * GB, max_num_seqs=9, max_model_len=8192
    )
    assert (one.num_slots, two.num_slots) == (9, 5)
    assert (one.num_blocks, two.num_blocks) == (9 * 64, 5 * 64)
    assert (one.concurrency(8192), two.concurrency(8192), two.concurrency(100)) == (9, 10, 10)


sizes = st.fixed_dictionaries(
    {
        "max_num_seqs": st.integers(1, 12),
        "tokens_per_block": st.sampled_from([2, 16, 128]),
        "max_prefill_tokens": st.integers(1, 300),
        "num_drafts": st.integers(0, 2),
        "max_model_len": st.none() | st.integers(1, 300),
        "memory": st.integers(2_000_000, 30_000_000),
        "utilization": st.sampled_from([0.5, 0.9, 1.0]),
    }
)


def test_image_features_take_what_is_asked_for_and_at_least_what_a_step_may_need() -> None:
    row = 5120 * 2
    plan = planned(RELEASED, num_blocks=1, image_cache_bytes=256 << 20)
    assert plan.image_rows == (256 << 20) // row and plan.parts["image features"] == plan.image_rows * row
    # Two dp ranks, each with 2048 tokens in 8 chunks, whose ends cut images of up to 1021 features.
    least = planned(RELEASED, num_blocks=1, data_parallel_size=2, max_num_seqs=16)
    assert least.image_rows == 2 * (2048 + 2 * 8 * 1021)
    assert planned(RELEASED, precision="float32", num_blocks=1).parts["image features"] == 18_384 * 5120 * 4
    text = load_config(GOLDEN_B)
    blind = planned(text, num_blocks=1, image_cache_bytes=256 << 20)
    assert blind.image_rows == blind.parts["image features"] == 0


@given(sizes)
def test_a_plan_fits_exactly_when_it_names_no_problem(arguments: dict[str, Any]) -> None:
    plan = planned(TINY_CONFIG, **arguments)
    needed = -(-plan.max_model_len // plan.tokens_per_block)
    assert plan.budget is not None
    assert (plan.problem == "") == (plan.total <= plan.budget and plan.num_blocks >= needed)
    if plan.problem:
        return
    assert plan.concurrency(plan.max_model_len) >= 1
    # The pool is as large as memory or use allows.
    everyone = plan.num_slots * needed
    assert plan.num_blocks == everyone or plan.total + plan.bytes_per_block > plan.budget


@given(sizes, st.integers(1, 127))
def test_the_default_length_is_the_longest_of_which_one_sequence_fits(arguments: dict[str, Any], blocks: int) -> None:
    size = arguments["tokens_per_block"]
    length = min(blocks * size, TINY_CONFIG.text.max_position_embeddings)
    tight = planned(TINY_CONFIG, **arguments | {"max_model_len": length, "num_blocks": -(-length // size)})
    plan = planned(TINY_CONFIG, **arguments | {"max_model_len": None, "memory": tight.total, "utilization": 1.0})
    assert (plan.max_model_len, plan.problem, plan.concurrency(length)) == (length, "", tight.data_parallel_size)


def test_without_a_limit_every_sequence_can_have_the_whole_length() -> None:
    plan = planned(TINY_CONFIG, max_num_seqs=5)
    assert plan.max_model_len == TINY_CONFIG.text.max_position_embeddings
    assert plan.table()[-1] == (plan.max_model_len, 5)
    assert plan.problem == ""


def test_too_few_devices_are_told_the_least_number_that_suffices() -> None:
    plan = planned(RELEASED, memory=141 * GB)
    assert plan.problem.startswith(
        "the weights take 510 GB on each of 1 device(s), but each has 127 GB (0.9 of 141 GB)"
    )
    enough = [
        count
        for count in (2, 4, 5, 8)  # those that share the vocabulary
        if not planned(RELEASED, memory=141 * GB, expert_parallel_size=count).problem
    ]
    assert plan.problem.endswith(f"; {enough[0]} devices can (data 1 x expert {enough[0]})")


def test_weights_that_every_device_holds_cannot_be_helped_by_more_devices() -> None:
    plan = planned(RELEASED, memory=8 * GB)
    assert "no number of devices can" in plan.problem


def test_a_pool_that_is_too_small_for_one_sequence_says_the_arithmetic() -> None:
    plan = planned(RELEASED, num_blocks=7, max_model_len=1000)
    assert plan.problem.startswith(
        "a sequence of 1000 tokens needs 8 blocks of 128 tokens, but the pool has 7: at most 896 tokens"
    )
    assert planned(RELEASED, num_blocks=7).max_model_len == 896


def test_a_pool_that_is_too_large_says_how_many_blocks_fit() -> None:
    sizes: dict[str, Any] = {"memory": 141 * GB, "expert_parallel_size": 8, "max_model_len": 1_000_000}
    problem = planned(RELEASED, num_blocks=10**9, **sizes).problem
    assert problem.startswith("with a pool of 1000000000 blocks of 128 tokens each device holds 114 TB, but has 127 GB")
    fitting = int(problem.split("lower num_kv_blocks to ")[1].split()[0])
    assert planned(RELEASED, num_blocks=fitting, **sizes).problem == ""
    assert planned(RELEASED, num_blocks=fitting + 1, **sizes).problem != ""


def test_context_that_does_not_fit_is_a_problem_with_the_numbers() -> None:
    plan = planned(RELEASED, memory=70 * GB, expert_parallel_size=10, max_model_len=1_000_000)
    assert "one sequence of 1000000 tokens take" in plan.problem
    assert plan.problem.count("GB") == 3


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_num_seqs", 0), ("memory", -1), ("utilization", 1.5), ("num_blocks", 0), ("data_parallel_size", 0)],
)
def test_a_number_that_cannot_be_is_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} is {value}; it must be"):
        planned(TINY_CONFIG, **{name: value})


def test_temporaries_grow_with_every_size() -> None:
    def size(config: ModelConfig = RELEASED, **changes: int) -> int:
        base = {"decode_rows": 8, "decode_time": 1, "prefill_tokens": 256, "context": 4096}
        return temporary_bytes(config, "reference", **base | changes)

    assert size() <= size(decode_rows=4096) and size() < size(prefill_tokens=512)
    assert size() < size(context=1 << 20)
    # Scores of 2048 rows against a million entries are made 16 rows at a time (2^26 bytes of fp32): with other things
    # 13 bytes each, and one tile: its products three times, and its keys. One byte is kept for each block of eight.
    long = temporary_bytes(RELEASED, "reference", decode_rows=1, decode_time=1, prefill_tokens=2048, context=1 << 20)
    million = 1 << 20
    scores = 16 * million * 13 + 3 * (8 << 20) + 65_536 * 128 * 6
    attention = 2048 * 64 * 512 * 8 + 32 * (128 + 512) * 512 * 6
    assert scores < attention
    streams = 2048 * 4 * 5120 * 8
    experts = (2048 * 6 + 64 * 384) * 5120 * 4 + 3 * 2304 * 5120 * 4
    assert long == streams + 2048 * million // 8 + max(attention, experts)
    sizes = [size(prefill_tokens=2048, context=context) for context in range(1, 1 << 16, 97)]
    assert sizes == sorted(sizes)  # `plan_memory` finds the longest context by bisection
    # A decode step cannot make fewer rows at a time: 256 sequences of a million tokens have a row each.
    crowd = temporary_bytes(RELEASED, "reference", decode_rows=256, decode_time=1, prefill_tokens=1, context=1 << 20)
    assert crowd > 256 * million * 13
    # Of 4096 sampled rows, five fp32 arrays over the vocabulary.
    wide = size(decode_rows=4096)
    assert wide == 4096 * (4096 // 8 + 4 * 5120 * 8 + 129_280 * 20)


def test_a_device_s_memory_is_what_its_allocator_has_left() -> None:
    gpu: Any = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 100, "bytes_in_use": 30})
    assert device_memory(gpu) == 70


def test_virtual_devices_share_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = jax.devices("cpu")[0]
    limit, usage = tmp_path / "limit", tmp_path / "usage"
    monkeypatch.setattr(device, "_CGROUP_FILES", ((limit, usage),))
    whole = device_memory(cpu)  # no such files
    assert whole > 10**8
    limit.write_text("1000000\n")
    usage.write_text("400000\n")
    assert device_memory(cpu) == 600_000
    monkeypatch.setattr(jax, "local_devices", lambda **_: [cpu] * 4)
    assert device_memory(cpu) == 150_000
    limit.write_text("max\n")
    assert device_memory(cpu) > 150_000


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (141 * GB, "141 GB"), (99_960_000, "100 MB"), (999_999, "1000 kB")],
)
def test_sizes_are_written_with_three_figures(size: int, text: str) -> None:
    assert format_bytes(size) == text


def test_a_state_that_nobody_named_in_words_is_counted_under_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_one_more(*arguments: Any, **sizes: Any) -> tuple[StateSpec, ...]:
        specs = state_specs(*arguments, **sizes)
        return (*specs, dataclasses.replace(specs[0], name="scratch.0"))

    monkeypatch.setattr("deepinfer_jax.memory.parts.state_specs", with_one_more)
    per_block, per_slot = state_bytes(TINY_CONFIG, "reference", 8, True, 0)
    counted = per_block | per_slot
    assert counted["scratch"] > 0
    monkeypatch.undo()
    assert "scratch" not in str(state_bytes(TINY_CONFIG, "reference", 8, True, 0))
