"""The research API: tensors captured by name, replaced by name (design.md §4)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import ForwardOutput, forward, init_cache
from deepinfer_jax.model.probe import capture_names, resolve_captures
from tests.support.golden import Array, Case, worst
from tests.support.replay import replay
from tests.support.small_model import small_config, small_params

pytestmark = pytest.mark.real

EXACT = "float32_exact"
TOKENS = np.random.default_rng(0).integers(3, 180, (2, 12))


def run(**options: object) -> ForwardOutput:
    return forward(small_params(EXACT), small_config(), TOKENS, precision=EXACT, **options)  # type: ignore[arg-type]


@functools.cache
def plain() -> ForwardOutput:
    return run(capture="*")


def test_every_name_is_produced_and_no_other() -> None:
    assert set(plain().captured) == set(capture_names(small_config()))
    text = small_config().text
    assert "layers.1.engram.rows" in plain().captured and "layers.0.engram.rows" not in plain().captured
    shapes = {name: array.shape[2:] for name, array in plain().captured.items()}
    assert shapes["embed"] == shapes["final_norm"] == (text.hidden_size,)
    assert shapes["taps"] == (2 * text.hidden_size,)
    assert shapes["layers.3.streams"] == (text.hc_mult, text.hidden_size)
    assert shapes["layers.3.pre"] == (text.hc_mult,)
    assert shapes["layers.0.moe.expert_ids"] == shapes["layers.0.moe.expert_weights"] == (text.num_experts_per_tok,)
    assert shapes["layers.1.attention.index_scores"] == (12 // 2,)
    assert shapes["layers.2.attention.candidates"] == (12,)
    assert shapes["layers.2.attention.index_picks"] == (text.index_topk,)
    assert all(array.shape[:2] == TOKENS.shape for array in plain().captured.values())


def test_picks_ascend_and_end_with_minus_one() -> None:
    for name, picks in plain().captured.items():
        if name.endswith("index_picks"):
            values = np.asarray(picks)
            order = np.where(values < 0, np.iinfo(np.int32).max, values).astype(np.int64)
            assert (np.diff(order, axis=-1) >= 0).all() and values.min() == -1, name
            assert all(len(set(row[row >= 0])) == (row >= 0).sum() for row in values.reshape(-1, values.shape[-1]))


@pytest.mark.parametrize(
    ("pattern", "count"),
    [("layers.*.moe.output", 4), ("layers.2.*", 10), ("*.index_picks", 3), (["embed", "taps"], 2), ((), 0)],
)
def test_a_star_stands_for_every_name_that_fits(pattern: str | list[str], count: int) -> None:
    assert len(resolve_captures(small_config(), pattern)) == count


@pytest.mark.parametrize("option", ["capture", "edit"])
def test_a_name_that_matches_nothing_is_refused_with_the_near_names(option: str) -> None:
    value = {"capture": ["layers.2.attention.outptu"], "edit": {"layers.2.attention.outptu": jnp.negative}}[option]
    with pytest.raises(ValueError, match=rf"{option} name 'layers.2.attention.outptu'.*layers\.2\.attention\.output"):
        run(**{option: value})


def test_roles_decide_which_names_exist() -> None:
    """Layer 3 reads the entries of layer 2 and picks by itself; layer 0 has no index."""
    with pytest.raises(ValueError, match="matches nothing"):
        run(capture="layers.3.attention.candidates")
    with pytest.raises(ValueError, match="matches nothing"):
        run(capture="layers.0.attention.index_*")


def test_an_edit_changes_what_comes_after_it_and_nothing_before() -> None:
    edited = run(capture="*", edit={"layers.2.attention.output": lambda x: 2 * x})
    before = True
    for name in capture_names(small_config()):
        same = np.array_equal(edited.captured[name], plain().captured[name])
        before = before and name != "layers.2.attention.output"
        # Ids and picks may stay; every real-valued tensor of the layer and of later ones moves.
        if before:
            assert same, name
        elif name.endswith(("moe.output", "streams", "final_norm", "attention.output")):
            assert not same, name
    wanted = 2 * plain().captured["layers.2.attention.output"]
    assert np.array_equal(edited.captured["layers.2.attention.output"], wanted)  # captures hold the edited value
    assert worst(edited.logits, plain().logits) > 1e-2


def test_an_edit_that_returns_its_argument_changes_nothing() -> None:
    edited = run(capture="*", edit={"layers.*": lambda x: x, "embed": lambda x: x})
    assert worst(edited.logits, plain().logits) == 0


def test_a_captured_tensor_put_back_by_an_edit_reproduces_the_run_that_it_came_from() -> None:
    """Layer 3's streams are all that the head reads, once the last fold's weights are given too."""
    streams, pre = (plain().captured[f"layers.3.{name}"] for name in ("streams", "pre"))
    other = np.roll(TOKENS, 1, axis=1)
    output = forward(
        small_params(EXACT),
        small_config(),
        other,
        precision=EXACT,
        edit={"layers.3.streams": lambda _: streams, "layers.3.pre": lambda _: pre},
    )
    assert worst(output.logits, plain().logits) < 1e-5  # another program: fp32 sums in another order


@pytest.mark.parametrize(
    "change", [lambda x: x[:, :1], lambda x: x.astype(jnp.int32), lambda x: x > 0], ids=["shape", "integers", "bools"]
)
def test_an_edit_must_keep_shape_and_kind(change: object) -> None:
    with pytest.raises(ValueError, match=r"the edit of 'embed' returned .*; it must keep float32\[2, 12, 64\]"):
        run(edit={"embed": change})


@pytest.mark.slow
def test_an_edit_may_return_numpy_and_other_float_and_integer_types() -> None:
    streams, ids = (np.asarray(plain().captured[f"layers.3.{name}"]) for name in ("streams", "moe.expert_ids"))
    edited = run(
        edit={
            "layers.3.streams": lambda _: streams.astype(np.float64),
            "layers.3.moe.expert_ids": lambda _: ids.astype(np.uint8),
        }
    )
    assert worst(edited.logits, plain().logits) < 1e-5  # another program: fp32 sums in another order


def test_an_edit_that_returns_no_array_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the edit of 'embed' returned NoneType; it must return an array"):
        run(edit={"embed": lambda _: None})


def test_without_logits_the_hidden_states_are_the_normed_ones_that_the_head_reads() -> None:
    output = run(return_logits=False)
    assert output.logits is None and output.cache is None and output.captured == {}
    assert worst(output.hidden, plain().captured["final_norm"]) < 1e-5
    assert np.array_equal(plain().hidden, plain().captured["final_norm"])
    head = np.asarray(small_params(EXACT).head, np.float64)
    assert worst(np.asarray(plain().hidden, np.float64) @ head.T, plain().logits) < 1e-5


@pytest.mark.slow
def test_captures_and_edits_work_inside_an_outer_jit() -> None:
    """The scale is traced: an edit may close over values of the outer program."""
    config = small_config()

    @jax.jit
    def scaled(params: object, tokens: jax.Array, scale: jax.Array) -> tuple[Array, Array]:
        output = forward(
            params,  # type: ignore[arg-type]
            config,
            tokens,
            precision=EXACT,
            capture="layers.0.moe.output",
            edit={"embed": lambda x: scale * x},
        )
        return output.logits, output.captured["layers.0.moe.output"]  # type: ignore[return-value]

    logits, captured = scaled(small_params(EXACT), jnp.array(TOKENS), jnp.float32(1))
    assert worst(logits, plain().logits) < 1e-5 and worst(captured, plain().captured["layers.0.moe.output"]) < 1e-5
    assert worst(scaled(small_params(EXACT), jnp.array(TOKENS), jnp.float32(3))[0], plain().logits) > 1e-2


@pytest.mark.slow
def test_any_integer_dtype_and_an_absent_cache_give_the_same_numbers() -> None:
    narrow = forward(small_params(EXACT), small_config(), TOKENS.astype(np.uint8), precision=EXACT, capture="*")
    assert worst(narrow.logits, plain().logits) == 0
    cache = init_cache(small_config(), *TOKENS.shape, precision=EXACT)
    assert worst(run(cache=cache, return_logits=True).logits, plain().logits) < 1e-5


def test_golden_tensors_come_out_under_their_documented_names() -> None:
    """The golden tests read everything through `capture`; this is the one that says so for a lone name."""
    case = Case("A_s28", "short", "f32nq")
    assert worst(replay(case).results[0]["layers.4.engram.streams"], case.get("L4/engram_out")) < 1e-4
    assert worst(replay(case).results[0]["taps"], case.get("main_hidden")) < 1e-4
