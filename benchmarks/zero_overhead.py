"""What the host adds to a decode step: step time of the engine over the time of the device program alone.

    python benchmarks/zero_overhead.py         # about three minutes on 2 cores

XLA's threads are pinned to one core, the host's thread to another, as on a machine whose device is not its host. A
batch of 32 sequences on a random checkpoint of benchmarks/mid.json; greedy. The program's own time is that of the same
launches one after another with nothing in between. Ratios of medians, measured in turns in one run.
"""

import os
import sys
import tempfile
import time
from pathlib import Path

HOST, DEVICE = 1, 0
os.sched_setaffinity(0, {DEVICE})  # threads that XLA starts from here on inherit it

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

jnp.ones((256, 256)).dot(jnp.ones((256, 256))).block_until_ready()

from deepinfer_jax import EngineArgs, LLMEngine  # noqa: E402
from deepinfer_jax.checkpoint.tiny import make_tiny  # noqa: E402
from deepinfer_jax.engine.environ import env  # noqa: E402

BATCH, ROUNDS, STEPS = (2, 1, 2) if "--smoke" in sys.argv else (32, 5, 20)  # the few only show that it runs
CONFIG = Path(__file__).with_name("mid.json")
if "--smoke" in sys.argv:
    CONFIG = CONFIG.parents[1] / "tests" / "golden" / "A_s28" / "config.json"


def engine(folder: Path, overlap: bool) -> LLMEngine:
    os.environ["DEEPINFER_ZERO_OVERHEAD_SCHEDULING"] = "1" if overlap else "0"
    env.rearm()
    made = LLMEngine(
        EngineArgs(
            model=str(folder), precision="float32", max_num_seqs=BATCH, max_model_len=512, disable_log_stats=True
        )
    )
    rng = np.random.default_rng(0)
    for i in range(BATCH):
        made.add_request("u", str(i), {"temperature": 0, "max_tokens": 500, "ignore_eos": True}, rng.integers(3, 99, 8))
    while any(sequence.output_len < 3 for sequence in made.core.open.values()):  # all prompts are done
        made.step()
    return made


def step_seconds(made: LLMEngine) -> float:
    start = time.perf_counter()
    for _ in range(STEPS):
        made.step()
    return (time.perf_counter() - start) / STEPS


def program_seconds(made: LLMEngine) -> float:
    """Of the launches that the engine's next steps would make, without planning, packing or reading."""
    made.flush_inflight_reqs()
    runner, plan = made.core.runner, made.core.scheduler.schedule()
    assert plan.decode is not None
    launch = runner.decode(plan.decode, None, None, False)
    launch.result()
    start = time.perf_counter()
    for _ in range(STEPS):
        launch = runner.decode(plan.decode, None, None, False)
    jax.block_until_ready(launch.arrays)
    took = (time.perf_counter() - start) / STEPS
    n = len(plan.decode.sequences)
    made.core.scheduler.update(plan.decode, np.full((n, 1), 5, np.int32), np.ones(n, np.int32), np.ones(n, bool))
    return took


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        make_tiny(Path(directory) / "mid", CONFIG)
        engines = {name: engine(Path(directory) / "mid", overlap) for name, overlap in (("on", True), ("off", False))}
    os.sched_setaffinity(0, {HOST})  # this thread only
    found: dict[str, list[float]] = {"program": [], "on": [], "off": []}
    for _ in range(ROUNDS):
        for name, made in engines.items():
            found[name].append(step_seconds(made))
        found["program"].append(program_seconds(engines["on"]))
    program = np.median(found["program"])
    print(f"device program {1e3 * program:7.2f} ms")
    for name in engines:
        step = np.median(found[name])
        print(f"engine step    {1e3 * step:7.2f} ms, overlap {name}: {step / program:.3f} × the program")


if __name__ == "__main__":
    main()
