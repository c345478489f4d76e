"""Engines with confidence-scheduled verification, and their steps' sizes drawn at random."""

import contextlib
import os
from collections.abc import Iterator
from unittest import mock

import numpy as np

from deepinfer_jax.engine.environ import rearm
from deepinfer_jax.engine.llm_engine import LLMEngine
from deepinfer_jax.scheduler import Bucket
from tests.support.toy import toy_engine

DRAFTS = 5


@contextlib.contextmanager
def variables(**values: str) -> Iterator[None]:
    """Engines that are made within see DEEPINFER_…; the values are forgotten afterwards."""
    with mock.patch.dict(os.environ, {f"DEEPINFER_{name}": value for name, value in values.items()}):
        rearm()
        yield
    rearm()


def varlen_engine(*, choose: str = "policy", **kwargs: object) -> LLMEngine:
    """choose: "packed": each step is as small as can be, with a random budget; "random": of any size."""
    with variables(ENABLE_MTP_VARLEN="1", USE_NEXTN_DECODE=str(DRAFTS)):
        engine = toy_engine(max_programs=3, **kwargs)  # type: ignore[arg-type]
    if choose != "policy":
        random_choice(engine, smallest=choose == "packed")
    return engine


def random_choice(engine: LLMEngine, *, smallest: bool = False) -> None:
    """Has the engine size its steps at random, or as small as can be; with a random budget."""
    policy, data = engine.core.scheduler.verification, engine.limits.data_parallel_size
    assert policy is not None
    rng = np.random.default_rng(0)

    def choose(_: object, dp_rank: np.ndarray, sizes: tuple[Bucket, ...]) -> tuple[Bucket, np.ndarray | None]:
        bucket = sizes[0 if smallest else rng.integers(len(sizes))]
        counts = np.bincount(dp_rank, minlength=data)
        budget = np.asarray([rng.integers(0, bucket.tokens - n + 1) for n in counts], np.int32)
        return bucket, budget if bucket.packed else None

    policy.choose = choose  # type: ignore[method-assign,assignment]
