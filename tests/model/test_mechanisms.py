"""What the golden data do not discriminate (golden README, last paragraph), each against its own formula in float64."""

import copy
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax import ModelConfig, forward, init_cache, init_params
from deepinfer_jax.cache.dense import DenseIndexKeys
from deepinfer_jax.checkpoint.tiny_config import TINY
from deepinfer_jax.config.model_config import parse_config
from deepinfer_jax.config.precision import precision_policy
from deepinfer_jax.model import indexer as indexer_module
from deepinfer_jax.model.embedding import embed_tokens
from deepinfer_jax.model.engram import engram
from deepinfer_jax.model.engram_hash import engram_rows
from deepinfer_jax.model.hyper_connections import mix_coefficients, sinkhorn
from deepinfer_jax.model.indexer import candidate_blocks, entries_of_blocks, index_query, index_scores, pick
from deepinfer_jax.model.moe import expert_scores
from deepinfer_jax.model.norm import rms_norm
from deepinfer_jax.model.rope import frequencies, rotation
from deepinfer_jax.tokenization import engram_multipliers, engram_primes
from deepinfer_jax.tokenization.engram_hash import DEAD, ngram_rows, ngram_windows
from deepinfer_jax.weights.params import Engram, Experts, HyperConnection, Indexer, MoE

pytestmark = [pytest.mark.real, pytest.mark.unoptimised]

Array = npt.NDArray[Any]


def tiny_config(**text: Any) -> ModelConfig:
    """TINY of model.md §14 without vision, with other values in `text_config`."""
    document = copy.deepcopy(TINY)
    document["text_config"] |= text
    document["vision_config"] = None
    return parse_config(document)


def two_layers(**text: Any) -> ModelConfig:
    """One window layer and one at ratio 1: the smallest model with every cache quantiser."""
    return tiny_config(
        **{
            "num_hidden_layers": 2,
            "compress_ratios": [0, 1],
            "kv_source_layer_ids": [1],
            "index_source_layer_ids": [1],
            "candidate_source_layer_id": -1,
            "engram_layer_ids": [],
            "engram_num_embeddings": [],
            "num_nextn_predict_layers": 0,
            "dspark_target_layer_ids": [],
        }
        | text
    )


# ---- router (model.md §6)


def router(logits: jax.Array) -> jax.Array:
    """Scores of experts with these logits: the input is 1, the gate's only column holds them."""
    unused = Experts(None, None, None)
    gate = MoE(gate=logits[:, None], bias=None, bias_vl=None, experts=unused, shared_experts=unused)
    return expert_scores(jnp.ones((1, 1, 1), jnp.float32), gate)[0, 0]


def test_router_scores_follow_softplus_beyond_20_and_far_below_0() -> None:
    """log1p keeps tiny scores apart; XLA:CPU would flush e^z to 0 below −87 and make all such experts equal."""
    logits = np.array([-170, -120, -95, -88, -87, -80, -30, -17, -1, 0, 5, 19.9, 20, 20.1, 60, 80, 500], np.float32)
    found = np.asarray(router(jnp.asarray(logits)))
    wanted = np.sqrt(np.logaddexp(0, logits.astype(np.float64)))
    # fp32 exp and sqrt: a few units in the last place, and |z| times one in the argument of exp.
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert (np.diff(found) > 0).all()


def test_the_gradient_of_router_scores_is_finite_and_right_everywhere() -> None:
    logits = np.array([-170, -95, -80, -20, -1, 0, 1, 19, 20, 21, 80], np.float32)
    z = logits.astype(np.float64)
    wanted = 1 / (1 + np.exp(-z)) / (2 * np.sqrt(np.logaddexp(0, z)))
    found = jax.grad(lambda gate: jnp.sum(router(gate)))(jnp.asarray(logits))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


# ---- norms (model.md §5, §11)


@pytest.mark.parametrize("size", [1.0, 1e-4, 1e-8, 1e-10, 1e-12])
@pytest.mark.parametrize("eps", [1e-20, 1e-6])
def test_rms_norm_of_tiny_rows_is_that_of_float64(size: float, eps: float) -> None:
    rng = np.random.default_rng(0)
    x, weight = (rng.standard_normal(64) * size).astype(np.float32), rng.standard_normal(64).astype(np.float32)
    wide = x.astype(np.float64)
    wanted = weight * wide / np.sqrt((wide * wide).mean() + eps)
    np.testing.assert_allclose(rms_norm(jnp.asarray(x), jnp.asarray(weight), eps), wanted, rtol=1e-6)


def test_every_norm_of_the_forward_pass_uses_the_configured_eps() -> None:
    """With eps 1e-20 the first layer's input does not depend on the size of the embedding; with 1e-6 it does."""
    sizes = {"small": 2.0**-22, "one": 1.0}

    def first_input(eps: float) -> dict[str, Array]:
        config = two_layers(rms_norm_eps=eps)
        params = init_params(config, jax.random.key(0), precision="float32_exact")
        inputs = {}
        for name, size in sizes.items():
            scaled = dataclasses.replace(params, embed=params.embed * size)
            out = forward(
                scaled,
                config,
                np.arange(4)[None],
                precision="float32_exact",
                capture="layers.0.attention.input",
                return_logits=False,
            )
            inputs[name] = np.asarray(out.captured["layers.0.attention.input"])
        return inputs

    exact, rough = first_input(1e-20), first_input(1e-6)
    # mean(x²) is about 6e-14: eps 1e-20 changes the seventh digit, eps 1e-6 all of them.
    np.testing.assert_allclose(exact["small"], exact["one"], rtol=1e-5)
    assert np.abs(rough["small"]).max() < 1e-2 * np.abs(rough["one"]).max()


@pytest.mark.parametrize("precision", ["reference", "float32_exact"])
def test_rows_of_zeros_give_no_nan(precision: str) -> None:
    """An all-zero embedding row goes through 0 · rsqrt(1e-20) in every norm and through every amax floor."""
    config = two_layers()
    params = init_params(config, jax.random.key(0), precision=precision)
    params = dataclasses.replace(params, embed=params.embed.at[3].set(0))
    cache = init_cache(config, 1, 4, precision=precision)
    out = forward(params, config, np.array([[3, 3, 7, 3]]), cache=cache, precision=precision, capture="embed")
    assert not np.asarray(out.captured["embed"][0, 0]).any()
    assert out.logits is not None
    for leaf in jax.tree.leaves((out.logits, out.hidden, out.cache)):
        assert np.isfinite(np.asarray(leaf, np.float32)).all()


def test_ids_outside_the_vocabulary_embed_as_zeros() -> None:
    """A negative id must not wrap to the table's end, a large one must not be clamped to it (T41)."""
    config = two_layers()
    params = init_params(config, jax.random.key(0), precision="float32_exact")
    vocab = config.text.vocab_size
    ids = jnp.array([[-1, 0, vocab - 1, vocab, vocab + 4, -vocab]])
    found = np.asarray(embed_tokens(ids, params, precision_policy(config, "float32_exact")))[0]
    assert np.array_equal(found[1:3], params.embed[jnp.array([0, vocab - 1])])
    assert not found[[0, 3, 4, 5]].any()


# ---- hyper-connections (model.md §4, Appendix B)

MHC_LOGITS = np.array(
    [0.3, -0.7, 1.1, 0, 0.5, -0.5, 0.25, -1, *[((7 * i) % 11) / 3 - 1.5 for i in range(16)]], np.float32
)
MHC_COMB = [
    [0.00542786, 0.09589034, 0.0054235, 0.89298505],
    [0.47202653, 0.00545439, 0.47203088, 0.05078891],
    [0.05051805, 0.8932, 0.05051376, 0.00543612],
    [0.47202653, 0.00545439, 0.47203088, 0.05078891],
]


def test_coefficients_are_those_of_appendix_b() -> None:
    """Streams of ones have mean square 1, and a projection with one column hands the 24 numbers over unchanged."""
    streams = jnp.ones((1, 1, 4, 6), jnp.float32)
    params = HyperConnection(
        fn=jnp.zeros((24, 24)).at[:, 0].set(MHC_LOGITS),
        base=jnp.linspace(-0.2, 0.2, 24, dtype=jnp.float32),
        scale=jnp.array([0.5, 1.5, 2.0], jnp.float32),
    )
    mix = mix_coefficients(streams, params, tiny_config().text)
    # Eight printed digits.
    np.testing.assert_allclose(mix.pre[0, 0], [0.48750365, 0.36990967, 0.5950271, 0.46311164], atol=1e-7)
    np.testing.assert_allclose(mix.post[0, 0], [1.3002392, 0.59340775, 1.1387727, 0.34208384], atol=3e-7)
    np.testing.assert_allclose(mix.comb[0, 0], MHC_COMB, atol=1e-7)


@pytest.mark.parametrize("iterations", [1, 2, 5, 19, 20])
def test_sinkhorn_counts_the_first_column_pass_as_its_first_round(iterations: int) -> None:
    """Twice the released scale: there 19 and 20 rounds still differ by more than the tolerance."""
    logits = (MHC_LOGITS[8:] * 4).reshape(4, 4)

    def rounds(count: int) -> Array:
        c = np.exp(logits.astype(np.float64))
        c = c / c.sum(1, keepdims=True) + 1e-6
        c /= c.sum(0, keepdims=True) + 1e-6
        for _ in range(count - 1):
            c /= c.sum(1, keepdims=True) + 1e-6
            c /= c.sum(0, keepdims=True) + 1e-6
        return c

    found = np.asarray(sinkhorn(jnp.asarray(logits), iterations, 1e-6))
    np.testing.assert_allclose(found, rounds(iterations), atol=1e-6)
    assert np.abs(rounds(iterations) - rounds(iterations + 1)).max() > 5e-6


# ---- rotary positions (model.md §5.2, Appendix B)


def released_text() -> Any:
    return tiny_config(
        head_dim=512,
        qk_rope_head_dim=64,
        index_head_dim=128,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 65536,
        },
    ).text


def test_yarn_frequencies_are_those_of_appendix_b() -> None:
    wanted = [
        *[1.0, 0.68765604, 0.47287080, 0.32517242, 0.22360680, 0.15376456, 0.10573713, 0.072710775],
        *[0.05, 0.034382802, 0.023643538, 0.016258623, 0.011180340, 0.0076882280, 0.0052868561, 0.0036355385],
        *[0.0022656249, 0.0013968013, 8.4968971e-4, 5.0808198e-4, 2.9697779e-4, 1.6817998e-4, 9.0867841e-5],
        *[4.5444227e-5, 1.9531253e-5, 5.3723124e-6, 3.6943034e-6, 2.5404097e-6, 1.7469280e-6, 1.2012856e-6],
        *[8.2607130e-7, 5.6805294e-7],
    ]
    # Eight printed digits of float32 numbers; the power itself differs in the last place between libraries.
    np.testing.assert_allclose(frequencies(released_text(), True), wanted, rtol=2.5e-7)


def test_frequencies_are_float32_reciprocals_of_float32_powers() -> None:
    """10^(3/2) rounded, then inverted, is 0.0316227786; 10^(−3/2) rounded is 0.0316227749. The window keys of golden
    A (16 channels, θ = 10000, i = 3) lie on the first: rms angle error 2.1e-7 there, 3.7e-7 with the second.
    """
    found = frequencies(tiny_config(rope_theta=10000, qk_rope_head_dim=16).text, False)
    assert found.dtype == np.float32
    assert found[3] == np.float32(0.0316227786) != np.float32(0.0316227749)
    assert found[5] == np.float32(0.00316227786)


@pytest.mark.parametrize("compressed", [False, True])
def test_cos_and_sin_stay_exact_up_to_the_last_of_a_million_positions(compressed: bool) -> None:
    text = released_text()
    positions = np.concatenate([np.arange(0, 2**20, 997), np.arange(2**20 - 64, 2**20)]).astype(np.int32)
    rope = rotation(text, jnp.asarray(positions), compressed)
    angles = (positions.astype(np.float32)[:, None] * frequencies(text, compressed)).astype(np.float64)
    # Half a unit in the last place of 1 is 3e-8.
    np.testing.assert_allclose(rope.cos, np.cos(angles), atol=1e-7)
    np.testing.assert_allclose(rope.sin, np.sin(angles), atol=1e-7)


# ---- amax floors of the cache quantisers (model.md §2.4, T9)


def test_amax_floors_reach_the_cache() -> None:
    """Keys of size 1e-6 are far below the floors 1e-4 and 6·2⁻⁹, so both scales stand at their smallest."""
    config = two_layers()
    exact = init_params(config, jax.random.key(0), precision="float32_exact")
    layers = tuple(
        dataclasses.replace(
            layer,
            attn=dataclasses.replace(
                layer.attn,
                kv_norm=layer.attn.kv_norm * 1e-6,
                compressor=None
                if layer.attn.compressor is None
                else dataclasses.replace(layer.attn.compressor, norm=layer.attn.compressor.norm * 1e-3),
            ),
        )
        for layer in exact.layers
    )

    def stored(precision: str) -> tuple[Array, Array]:
        params = dataclasses.replace(exact, layers=layers, precision=precision)
        cache = init_cache(config, 1, 8, precision=precision)
        out = forward(params, config, np.arange(8)[None], cache=cache, precision=precision, return_logits=False)
        assert out.cache is not None
        window, entries = out.cache.windows[0], out.cache.entries[0]
        assert isinstance(entries, jax.Array)
        return np.asarray(window, np.float64), np.asarray(entries, np.float64)

    plain, quantised = stored("float32_exact"), stored("float32")
    # e4m3 under the scale 2⁻²²: a step of an eighth of the value's binade, and of 2⁻⁹ below 2⁻⁶.
    scaled = plain[0] * 2.0**22
    step = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(scaled), 2.0**-6))) - 3)
    assert np.array_equal(quantised[0], np.round(scaled / step) * step * 2.0**-22)
    assert len(np.unique(quantised[0])) > 16
    # e2m1 under the scale 2⁻⁹: multiples of a half below 2. The second layer's input has passed the first cache,
    # so an entry may stand on the other side of a threshold; none is further away than its step.
    scaled = plain[1] * 2.0**9
    assert np.abs(scaled).max() < 2
    assert np.isin(quantised[1] * 2.0**9, np.arange(-4, 5) / 2).all()
    assert np.abs(quantised[1] * 2.0**9 - scaled).max() <= 0.25 + 1e-3


# ---- index picks and candidates (model.md §5.6, §5.7)

scores_of = st.lists(
    st.sampled_from([-np.inf, -2.0, -1.0, 0.0, 0.5, 1.0, 3.0]), min_size=1, max_size=13
)  # few values, so that ties are common


@settings(max_examples=60)
@given(scores_of, st.integers(1, 14))
def test_picks_are_the_largest_finite_scores_lowest_index_first(scores: list[float], topk: int) -> None:
    """−∞ is never picked, even where fewer finite scores than picks exist (model.md §5.7, its last rule; T30)."""
    found = np.asarray(pick(jnp.asarray([[scores]], jnp.float32), topk))[0, 0]
    ranked = sorted((j for j in range(len(scores)) if scores[j] > -np.inf), key=lambda j: (-scores[j], j))
    wanted = sorted(ranked[:topk])
    assert found.tolist() == wanted + [-1] * (min(topk, len(scores)) - len(wanted))


@settings(max_examples=60)
@given(scores_of, st.data())
def test_candidates_are_the_best_blocks_with_the_newest_one_pinned(scores: list[float], data: st.DataObject) -> None:
    entries = len(scores)
    visible = data.draw(st.integers(0, entries))
    size, keep = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    text = dataclasses.replace(tiny_config().text, candidate_block_size=size, candidate_topk_blocks=keep)
    masked = [score if j < visible else -np.inf for j, score in enumerate(scores)]
    kept = candidate_blocks(jnp.asarray([[masked]], jnp.float32), jnp.full((1, 1), visible), text)
    found = entries_of_blocks(kept, entries, text)
    best = [max(masked[b : b + size]) for b in range(0, entries, size)]
    if visible:
        best[(visible - 1) // size] = np.inf  # whole block, also beyond what is visible; counts against the budget
    ranked = sorted((b for b in range(len(best)) if best[b] > -np.inf), key=lambda b: (-best[b], b))
    assert np.asarray(found)[0, 0].tolist() == [j // size in ranked[:keep] for j in range(entries)]


@pytest.mark.parametrize("precision", ["reference", "float32_exact"])
def test_index_scores_are_their_formula_in_tiles_of_any_size(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Σ_n relu(q_n·I_j)·w_n, the relu before the signed head sum (T16), in tiles of the time axis as at once."""
    config = two_layers(index_n_heads=3)
    text, policy = config.text, precision_policy(config, precision)
    rng = np.random.default_rng(0)
    batch, time, entries = 2, 7, 11

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), policy.dtype)

    latent, x = draw(batch, time, text.q_lora_rank), draw(batch, time, text.hidden_size)
    keys = DenseIndexKeys(draw(batch, entries, text.index_head_dim))
    indexer = Indexer(
        wq_b=draw(text.index_n_heads * text.index_head_dim, text.q_lora_rank),
        weights_proj=draw(text.index_n_heads, text.hidden_size),
    )
    visible = jnp.asarray(rng.integers(0, entries + 1, (batch, time)), jnp.int32)
    still = rotation(text, jnp.zeros((batch, time), jnp.int32), compressed=True)

    def scores() -> Array:
        query, weights = index_query(latent, x, still, params=indexer, text=text, policy=policy)
        return np.asarray(index_scores(query, weights, keys, visible, policy), np.float32)

    whole = scores()
    # fp32 products of 32 terms may be summed in another order; FP4 keys and queries have exact products.
    slack = 0.0 if policy.quantize_cache else 2e-6 * float(np.abs(whole[whole > -np.inf]).max())
    for rows in (1, 3):  # the last tile of 3 is padded
        monkeypatch.setattr(indexer_module, "PRODUCT_BYTES", rows * batch * text.index_n_heads * entries * 4)
        np.testing.assert_allclose(scores(), whole, rtol=0, atol=slack)
    assert np.array_equal(whole == -np.inf, np.arange(entries) >= np.asarray(visible)[..., None])
    if precision == "float32_exact":
        q = np.einsum("btr,or->bto", *(np.asarray(a, np.float64) for a in (latent, indexer.wq_b)))
        w = np.einsum("bth,nh->btn", *(np.asarray(a, np.float64) for a in (x, indexer.weights_proj)))
        products = np.einsum("btnd,bjd->btnj", q.reshape(batch, time, 3, -1), np.asarray(keys.keys, np.float64))
        wanted = (np.maximum(products, 0) * w[..., None]).sum(2) / np.sqrt(text.index_head_dim * 3)
        seen = whole > -np.inf
        # fp32 sums of 64 and 32 products of unit size, times about 30.
        np.testing.assert_allclose(whole[seen], wanted[seen], atol=2e-6 * np.abs(wanted).max())


# ---- Engram (model.md §7, Appendix B)

RELEASED: dict[str, Any] = {
    "engram_layer_ids": [1, 14],
    "engram_vocab_size": 16_000_000,
    "engram_n_heads": 8,
    "engram_compressed_vocab_size": 99_092,
    "engram_num_embeddings": [384_006_168, 384_016_682],
}
SHAPES: dict[str, dict[str, Any]] = {
    "released": RELEASED,
    "tiny": {},
    "2-grams, three heads": {"engram_max_ngram_size": 2, "engram_n_heads": 3, "engram_vocab_size": 7},
    "5-grams over a vocabulary of one": {"engram_max_ngram_size": 5, "engram_compressed_vocab_size": 1},
}


def hashed_text(shape: str) -> Any:
    text = dataclasses.replace(tiny_config().text, **SHAPES[shape])
    text = dataclasses.replace(text, engram_layer_ids=tuple(text.engram_layer_ids))
    primes = engram_primes(
        text.engram_layer_ids, text.engram_vocab_size, text.engram_max_ngram_size, text.engram_n_heads
    )
    return dataclasses.replace(text, engram_num_embeddings=tuple(primes.sum(axis=(1, 2)).tolist()))


@pytest.mark.parametrize("shape", SHAPES)
def test_device_hash_equals_host_hash(shape: str) -> None:
    text = hashed_text(shape)
    reach = text.engram_max_ngram_size
    primes = engram_primes(text.engram_layer_ids, text.engram_vocab_size, reach, text.engram_n_heads)
    multipliers = np.stack(
        [engram_multipliers(i, reach, text.engram_compressed_vocab_size) for i in text.engram_layer_ids]
    )
    device = jax.jit(engram_rows, static_argnames="text")
    largest = text.engram_compressed_vocab_size - 1
    width = 24  # one shape, one compilation
    ids = st.one_of(st.just(DEAD), st.just(0), st.just(largest), st.integers(0, largest))

    @settings(max_examples=80)
    @given(st.lists(ids, min_size=reach - 1 + width, max_size=reach - 1 + width), st.integers(0, largest))
    def same(history: list[int], pad: int) -> None:
        ids = np.array([history], np.int32)
        windows = ngram_windows(ids[:, reach - 1 :], max_ngram=reach, pad=pad, tail=ids[:, : reach - 1])
        assert np.array_equal(device(ids, jnp.int32(pad), text=text), ngram_rows(windows, primes, multipliers))

    same()


def test_device_hash_gives_the_rows_of_appendix_b() -> None:
    text = hashed_text("released")
    assert text.engram_num_embeddings == tuple(RELEASED["engram_num_embeddings"])
    wanted = [
        [6961830, 31143904, 34796895, 48021142, 75858929, 90471933, 97778503, 125113896, 128920094, 146640906],
        [937800, 17223952, 33567381, 49796588, 65911473, 83686889, 100719816, 117237088, 132251331, 152090433],
    ]
    last = [[349978782, 360629759, 372696692], [342954535, 364591066, 376768797]]
    found = np.asarray(engram_rows(jnp.array([[13, 11, 7, 5]]), jnp.int32(2), text))[0, 0]
    assert found[:, :10].tolist() == wanted
    assert found[:, -3:].tolist() == last
    first = np.asarray(engram_rows(jnp.array([[DEAD, DEAD, DEAD, 100]]), jnp.int32(2), text))[0, 0]
    assert first[:, 0].tolist() == [4052413, 12021899]
    assert first[:, -1].tolist() == [378065828, 370160343]


@pytest.mark.parametrize("size", [0.0, 1e-9, -1e-9, 1e-3, -1e-3, 1.0, -1.0])
def test_engram_gate_has_its_floor_and_keeps_the_sign(size: float) -> None:
    """Below |d| = 1e-6 the gate is σ(±√1e-6), not ½; a value of d = 0 counts as positive."""
    text = tiny_config().text
    hidden, streams = text.hidden_size, text.hc_mult
    rng = np.random.default_rng(0)
    h = rng.standard_normal((1, 1, streams, hidden)).astype(np.float32)
    key = h[0, 0] * np.float32(2)  # parallel to the streams: d = size·√hidden·√(mean h² · mean key²) > 0 for size > 0
    value = rng.standard_normal(hidden).astype(np.float32)
    width = (text.engram_max_ngram_size - 1) * text.engram_n_heads * text.engram_head_dim
    table = np.zeros((2, text.engram_head_dim), np.float32)
    table[1, 0] = 1
    wkv = np.zeros(((streams + 1) * hidden, width), np.float32)
    wkv[:, 0] = np.concatenate([key.reshape(-1), value])
    params = Engram(
        embed=jnp.asarray(table),
        wkv=jnp.asarray(wkv),
        q_weight=jnp.full((streams, hidden), size),
        k_weight=jnp.ones((streams, hidden)),
    )
    rows = jnp.zeros((1, 1, width // text.engram_head_dim), jnp.int32).at[0, 0, 0].set(1)
    found = engram(jnp.asarray(h), rows, params, None, text, precision_policy(tiny_config(), "float32_exact"))
    wide = h[0, 0].astype(np.float64)
    d = size * (wide * key).sum(-1) / np.sqrt((wide**2).mean(-1) * (key.astype(np.float64) ** 2).mean(-1)) / hidden**0.5
    gate = 1 / (1 + np.exp(-np.copysign(np.sqrt(np.maximum(np.abs(d), 1e-6)), d)))
    # The floor moves the gate by 2.5e-4.
    np.testing.assert_allclose(found[0, 0], wide + gate[:, None] * value, atol=2e-6)
