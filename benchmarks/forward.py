"""Speed of the float32 forward pass on this machine: decode, prefill, eager calls, compile time.

    python benchmarks/forward.py            # about five minutes on 2 cores; needs a checkout (tests/golden)

The last columns compare with eager PyTorch in fp32 on a quiet 2-core AMD EPYC (AVX-512): figures measured once, with a
straightforward PyTorch forward of the same models, and kept here as constants.
"""

import argparse
import functools
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax import Cache, ModelConfig, Params, forward, init_cache, init_params, load_config, load_params
from deepinfer_jax.config.model_config import parse_config
from deepinfer_jax.model.forward import compute_logits
from deepinfer_jax.tokenization import engram_primes

REPOSITORY = Path(__file__).parents[1]
GOLDEN_A = REPOSITORY / "tests" / "golden" / "A_s28"
RELEASED = REPOSITORY / "tests" / "configs" / "released.json"
RELEASED_5_LAYERS = REPOSITORY / "tests" / "configs" / "released_5_layers.json"
MID = REPOSITORY / "benchmarks" / "mid.json"

PYTORCH = {  # tokens/s
    ("A", "decode, batch 1"): 56,
    ("A", "decode, batch 8"): 323,
    ("A", "prefill 512"): 5000,
    ("mid", "decode, batch 1"): 32,
    ("mid", "decode, batch 8"): 97,
    ("mid", "prefill 512"): 820,
}
CONTEXT = 640


def best_seconds(run: Callable[[], object], rounds: int) -> float:
    """The fastest of some rounds after one warm-up: the machine's other work only ever adds."""
    run()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def decode_seconds(params: Params, config: ModelConfig, batch: int, rounds: int, steps: int = 50) -> float:
    """Seconds per greedy decode step, one jitted program that donates its cache."""

    @functools.partial(jax.jit, donate_argnames="cache")
    def step(params: Params, cache: Cache, tokens: jax.Array) -> tuple[Cache | None, jax.Array]:
        output = forward(params, config, tokens[:, None], cache=cache, precision="float32")
        assert output.logits is not None
        return output.cache, jnp.argmax(output.logits[:, 0], axis=-1).astype(jnp.int32)

    def run() -> None:
        cache, tokens = init_cache(config, batch, CONTEXT, precision="float32"), jnp.full(batch, 5, jnp.int32)
        for _ in range(steps):
            cache, tokens = step(params, cache, tokens)
        tokens.block_until_ready()

    return best_seconds(run, rounds) / steps


def prefill_seconds(params: Params, config: ModelConfig, length: int, rounds: int) -> float:
    """Seconds for one prompt into an empty cache, logits of its last token."""

    @jax.jit
    def prefill(params: Params, tokens: jax.Array) -> tuple[object, jax.Array]:
        cache = init_cache(config, 1, CONTEXT, precision="float32")
        output = forward(params, config, tokens, cache=cache, precision="float32", return_logits=False)
        return output.cache, compute_logits(params, output.hidden[:, -1])

    tokens = jnp.asarray(np.random.default_rng(0).integers(3, config.text.vocab_size - 8, (1, length)), jnp.int32)
    return best_seconds(lambda: prefill(params, tokens)[1].block_until_ready(), rounds)


def eager_seconds(params: Params, config: ModelConfig, rounds: int) -> float:
    """Seconds for one one-token call of `forward` from plain Python, input checks included."""
    cache, tokens = init_cache(config, 1, CONTEXT, precision="float32"), np.full((1, 1), 5)

    def run() -> None:
        jax.block_until_ready(forward(params, config, tokens, cache=cache, precision="float32").logits)

    return best_seconds(run, rounds)


def compile_seconds(schedule: Path) -> tuple[float, float]:
    """Trace and compile seconds of a decode step with the layer schedule of this configuration at golden A's widths."""
    raw, released = json.loads((GOLDEN_A / "config.json").read_text()), json.loads(schedule.read_text())
    text = raw["text_config"]
    for key in (
        "num_hidden_layers",
        "compress_ratios",
        "kv_source_layer_ids",
        "index_source_layer_ids",
        "candidate_source_layer_id",
        "engram_layer_ids",
        "dspark_target_layer_ids",
    ):
        text[key] = released["text_config"][key]
    primes = engram_primes(
        text["engram_layer_ids"],
        text["engram_vocab_size"],
        text["engram_max_ngram_size"],
        text["engram_n_heads"],
    )
    text["engram_num_embeddings"] = primes.sum(axis=(1, 2)).tolist()
    config = parse_config(raw)
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0), precision="float32"))
    cache = jax.eval_shape(lambda: init_cache(config, 1, CONTEXT, precision="float32"))
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    start = time.perf_counter()
    lowered = jax.jit(
        lambda params, cache, tokens: forward(params, config, tokens, cache=cache, precision="float32")
    ).lower(params, cache, tokens)
    traced = time.perf_counter()
    lowered.compile()
    return traced - start, time.perf_counter() - traced


def machine() -> str:
    """What this runs on."""
    try:
        cpu = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
        cpu = cpu.split(":", 1)[1].strip()
    except (OSError, StopIteration):
        cpu = platform.processor()
    load = os.getloadavg()[0]
    return f"{cpu}, {os.cpu_count()} cores, load {load:.1f}, jax {jax.__version__}, {jax.devices()[0].device_kind}"


def main() -> None:
    """Prints one table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="a few seconds, to see that it runs")
    smoke: bool = parser.parse_args().smoke
    rounds, steps = (1, 2) if smoke else (7, 50)
    print(machine())
    config_a = load_config(GOLDEN_A)
    models = {"A": (config_a, load_params(GOLDEN_A, config_a, precision="float32"))}
    if not smoke:
        config_mid = parse_config(json.loads(MID.read_text()))
        models["mid"] = (config_mid, init_params(config_mid, jax.random.key(0), precision="float32"))
    print(f"{'model':6}{'what':18}{'ms':>9}{'tokens/s':>10}{'PyTorch':>9}{'ratio':>7}")
    for name, (config, params) in models.items():
        rows = [
            ("decode, batch 1", 1, decode_seconds(params, config, 1, rounds, steps)),
            ("decode, batch 8", 8, decode_seconds(params, config, 8, rounds, steps)),
            ("prefill 512", 512, prefill_seconds(params, config, 512, rounds)),
        ]
        for what, tokens, seconds in rows:
            rate, base = tokens / seconds, PYTORCH[name, what]
            print(f"{name:6}{what:18}{seconds * 1e3:9.2f}{rate:10.0f}{base:9d}{rate / base:7.1f}", flush=True)
        print(f"{name:6}{'eager, one token':18}{eager_seconds(params, config, steps) * 1e3:9.2f}", flush=True)
    schedule = RELEASED_5_LAYERS if smoke else RELEASED
    trace, compiled = compile_seconds(schedule)
    print(f"layer schedule of {schedule.stem} at A's widths: trace {trace:.1f} s, compile {compiled:.1f} s")


if __name__ == "__main__":
    main()
