"""The environment variables (DB §2), one row each, and the folder of things that are made once per user.

`env.NAME` is the value of `DEEPINFER_NAME`, read on first access and then kept for the process; `rearm` forgets it. An
engine takes all that concern it when it is made (`engine/resolution.py`), and keeps them.
`deepinfer-jax env` prints the table.
"""

import difflib
import logging
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, overload

logger = logging.getLogger(__name__)

_PREFIX = "DEEPINFER_"
NOT_ON_XLA, NOT_YET = "not on XLA", "not used in this version"


@dataclass(frozen=True)
class Kind[T]:
    """How a variable's text is read; `parse` raises ValueError for what it is not."""

    name: str
    parse: Callable[[str], T]


# "no" is true, as in DeepInfer.
BOOLEAN = Kind("boolean", lambda text: text not in ("0", "", "false", "False"))
INTEGER = Kind("integer", int)
NUMBER = Kind("number", float)
TEXT = Kind("text", str)


@dataclass(frozen=True)
class Variable[T]:
    """One row of the table; as an attribute of an `Environment`, its value there.

    Attributes:
        kind: how its text is read.
        default: when it is not set.
        meaning: what it does, or did in DeepInfer.
        applies: the part that reads it; or `NOT_ON_XLA`, `NOT_YET` for a variable that is known and has no effect.
        instead: why it has none, and what does its work here.
        prefix: of the full name.
        name: the full name.
    """

    kind: Kind[T]
    default: T
    meaning: str
    applies: str
    instead: str = ""
    prefix: str = _PREFIX
    name: str = field(init=False)

    @property
    def has_effect(self) -> bool:
        return self.applies not in (NOT_ON_XLA, NOT_YET)

    @property
    def note(self) -> str:
        """Why it has no effect, "" if it has one."""
        if self.has_effect:
            return ""
        return f"{self.applies} ({self.instead})" if self.instead else self.applies

    def read(self) -> T:
        """The value now, without the cache. ValueError, starting with the name, if it cannot be one."""
        text = os.environ.get(self.name)
        if text is None:
            return self.default
        try:
            return self.kind.parse(text)
        except ValueError:
            article = "an" if self.kind is INTEGER else "a"
            raise ValueError(f"{self.name} is {text!r}; expected {article} {self.kind.name}") from None

    def __set_name__(self, owner: type, name: str) -> None:
        object.__setattr__(self, "name", self.prefix + name)

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: "Environment", owner: type) -> T: ...
    def __get__(self, instance: "Environment | None", owner: type) -> Self | T:
        return self if instance is None else instance.value(self)


def _not_on_xla[T](kind: Kind[T], default: T, meaning: str, instead: str) -> Variable[T]:
    return Variable(kind, default, meaning, NOT_ON_XLA, instead)


def _not_yet[T](kind: Kind[T], default: T, meaning: str) -> Variable[T]:
    return Variable(kind, default, meaning, NOT_YET)


_COMPILED = "every step is a program that was compiled at start"
_COLLECTIVES = "XLA makes its own collectives; see XLA_FLAGS"
_MIXED_STEPS = "every step may run a prompt's chunk beside the decoding sequences, so nothing is voted on"
_ONE_PROCESS = "one process drives all local devices"
_SLOTS = "one slot per running sequence"
_PROFILER = "use jax.profiler and `deepinfer-jax plan`"


class Environment:
    """The table, and the values of one process. Thread-safe."""

    # engine
    ZERO_OVERHEAD_SCHEDULING = Variable(
        BOOLEAN, None, "a step is launched before the result of the one before is read; unset: by engine type", "engine"
    )
    USE_NEXTN_DECODE = Variable(
        INTEGER, None, "tokens drafted per step; 0: none; unset: 5, or fewer if the model's block is shorter", "engine"
    )
    BATCH_INVARIANT = Variable(
        BOOLEAN, False, "a row's result has the same bits for any neighbours, batch size and chunks", "engine"
    )
    POISON_FREED_STATE = Variable(
        BOOLEAN, False, "freed blocks, slots and snapshots become NaN, to find who reads them (debugging)", "engine"
    )
    LOGGING_INTERVAL_STEP = Variable(INTEGER, 100, "steps between log lines of statistics; 0 or less: none", "engine")
    COMPILATION_CACHE_DIR = Variable(
        TEXT, None, "folder of compiled programs; empty: none; unset: xla in the user's cache", "engine"
    )
    XDG_CACHE_HOME = Variable(
        TEXT, None, "parent of the user's cache folder deepinfer-jax; unset: ~/.cache", "engine", prefix=""
    )

    # sampling
    COMPUTE_SUM_SMALLER_PROBS = Variable(
        BOOLEAN, False, "outputs have sum_smaller_probs, and nextn_logprobs of accepted drafts", "engine"
    )
    SAMPLER_FORCE_TOPK = Variable(INTEGER, 0, "sample among so many largest logits only; 0: all", "engine")
    DECODE_TOKEN_BLACKLIST = Variable(TEXT, "", "ids that are never generated, such as 0..3,7,10..12", "engine")

    # drafts
    ENABLE_MTP_VARLEN = Variable(
        BOOLEAN, False, "verify only as many drafts as pay, by the confidence head and by measured step times", "engine"
    )
    MAX_BACKTRACKING_TOKENS = _not_yet(INTEGER, None, "extra positions of the window rings")
    DFLASH_CONFIDENCE_HEAD_TEMPERATURE = Variable(
        TEXT, "1.0", "one temperature, or a comma list of one per draft, as `deepinfer-jax calibrate` prints", "engine"
    )
    DECODE_PERF_CACHE_DIR = Variable(
        TEXT, None, "folder of measured decode times; unset: every start measures them, if they are needed", "engine"
    )
    DECODE_PERF_CACHE_TTL_SEC = Variable(INTEGER, 3600, "seconds that measured decode times stay valid", "engine")

    # grammars
    XGRAMMAR_TIMEOUT = Variable(INTEGER, 20, "seconds from submission until a grammar must be ready", "engine")
    XGRAMMAR_DISABLE_CACHE = Variable(BOOLEAN, False, "compile every grammar anew", "engine")
    XGRAMMAR_CACHE_LIMIT_BYTES = Variable(
        INTEGER, 10 << 30, "bytes of compiled grammars that are kept, about; 0 or less: no limit", "engine"
    )
    SO_BUILDER_CPUS = Variable(INTEGER, 4, "threads that compile grammars", "engine")
    XGRAMMAR_DEBUG = _not_on_xla(BOOLEAN, False, "print what the grammar does", "llguidance follows the grammars")

    # images
    MULTI_MODAL_CPUS = Variable(INTEGER, 4, "threads that open images", "engine")
    MULTI_MODAL_BUFFER_SIZE = Variable(
        INTEGER, 512, "requests whose images may lie open before they start; others wait to be opened", "engine"
    )
    MULTIMODAL_POOL_SIZE_GB = Variable(INTEGER, 8, "GiB of pixels that may do so", "engine")
    MULTI_MODAL_WORKER_TIMEOUT = Variable(
        NUMBER, 1800.0, "seconds that opening a request's images may take; 0 or less: no limit", "engine"
    )
    USE_MULTIMODAL_POOL = _not_on_xla(
        BOOLEAN, None, "pass images by shared memory", "threads of the engine's own process open them"
    )

    # prefill truncation
    YOCO_PREFILL_TRUNCATION_MODE = Variable(
        TEXT, "off", "mask or compact: run the later layers on a prompt's end only, an approximation", "engine"
    )
    YOCO_PREFILL_KEEP_TOKENS = Variable(
        INTEGER, 0, "tokens of that end, at least sliding_window + 1 + tokens drafted per step", "engine"
    )

    # experts
    OVERRIDE_NUM_EXTRA_EXPERTS = _not_yet(INTEGER, 0, "least number of redundant experts")
    EXPERT_COUNT_WINDOW_SIZE = _not_yet(INTEGER, 100, "steps whose expert counts are remembered")
    EXPERT_REARRANGEMENT_STEP_INTERVAL = _not_yet(INTEGER, 0, "steps between rearrangements of experts; 0: never")
    REARRANGE_AFTER_PREFILL_IN_NORMAL_ENGINE = _not_yet(BOOLEAN, False, "rearrange experts right after a prefill")
    MOE_LB_STAT_INTERVAL = _not_yet(INTEGER, 128, "steps between statistics of expert load")
    FORCE_IMBALANCE_RATIO = _not_yet(NUMBER, 0.0, "route at random with this imbalance, for profiling; 0: off")
    FORCE_LOAD_BALANCE = _not_yet(BOOLEAN, False, "route every token at random, for profiling")
    SHOW_EPLB_DETAIL = _not_yet(BOOLEAN, False, "log a table after each rearrangement")

    # Engram
    ENGRAM_FORCE_GPU_STORAGE = _not_yet(BOOLEAN, False, "keep n-gram tables on the device (here they always are)")
    ENGRAM_PAD_TOKEN = _not_on_xla(INTEGER, 2, "id that pads n-gram rows", "engram_pad_token_id of config.json is used")

    # profiling server
    PROFILE_HTTP_ENABLE = _not_yet(BOOLEAN, False, "start the profiling server")
    PROFILE_HTTP_PORT_BASE = _not_yet(INTEGER, 6070, "its first port")
    TORCH_PROFILER_DIR = _not_yet(TEXT, None, "where profiles are written")

    # another framework's
    ACCELERATOR = _not_on_xla(TEXT, "nvidia", "nvidia or ascend", "JAX_PLATFORMS chooses the backend")
    JIT_CACHE_DIR = _not_on_xla(TEXT, None, "root of kernel caches", "see DEEPINFER_COMPILATION_CACHE_DIR")
    NCCL_NUM_SMS = _not_on_xla(INTEGER, 32, "multiprocessors for NCCL", _COLLECTIVES)
    NCCL_MEMORY_SAMPLE_INTERVAL_STEPS = _not_on_xla(INTEGER, 1000, "steps between samples of its memory", _COLLECTIVES)
    USERBUFFER_COMM_SMS = _not_on_xla(INTEGER, 0, "multiprocessors for expert communication", _COLLECTIVES)
    REARRANGE_P2P_GROUPS = _not_on_xla(INTEGER, 1, "buckets of messages when experts move", _COLLECTIVES)
    GLOO_TIMEOUT = _not_on_xla(NUMBER, 14400.0, "seconds that processes wait for each other", _ONE_PROCESS)
    RINGBUFFER_WARNING_INTERVAL = _not_on_xla(NUMBER, 60.0, "seconds between warnings of such waits", _ONE_PROCESS)
    GC_INTERVAL_STEP = _not_on_xla(INTEGER, 1000, "steps between garbage collections", "Python collects between steps")
    DISABLE_SYNC_GUARD = _not_on_xla(BOOLEAN, False, "no detector of host synchronisation", _COMPILED)
    ENFORCE_EAGER = _not_on_xla(BOOLEAN, False, "no CUDA graphs", _COMPILED)
    DFLASH_ENFORCE_EAGER = _not_on_xla(BOOLEAN, False, "no CUDA graph of the drafts", _COMPILED)
    CUDAGRAPH_BATCH_SIZE_INTERVAL = _not_on_xla(INTEGER, 8, "rows between graph sizes", _COMPILED)
    DFLASH_CUDAGRAPH_BATCH_SIZE_INTERVAL = _not_on_xla(INTEGER, 8, "rows between draft graph sizes", _COMPILED)
    PREFILL_ATTEMPT_INTERVAL = _not_on_xla(INTEGER, 70, "decode steps between votes on a prefill", _MIXED_STEPS)
    PREFILL_ANY_ATTEMPT_INTERVAL = _not_on_xla(INTEGER, 100, "the same, when one vote is enough", _MIXED_STEPS)
    PREFILL_MAX_SUM_SEQLEN_K = _not_on_xla(
        INTEGER, None, "longest sequences of one prefill together", "max_num_batched_tokens bounds a prefill"
    )
    INDEX_ATTN_MEMORY_LIMIT = _not_on_xla(
        INTEGER, 10 << 30, "bytes of index scores", "the scores are computed in tiles of a fixed size"
    )
    NUM_STATE_SLOTS_RATIO = _not_on_xla(NUMBER, 1.2, "slots for each of max_num_seqs", _SLOTS)
    PREFILL_STORE_EXTRA_STATE = _not_on_xla(BOOLEAN, False, "longer window rings for another process to copy", _SLOTS)
    PREFILL_STORE_EXTRA_SIZE = _not_on_xla(INTEGER, 128, "how much longer", _SLOTS)
    PROFILE_TORCH_CUDA_MEMORY = _not_on_xla(TEXT, None, "record the allocator's history", _PROFILER)
    ENABLE_MEMORY_TRACING = _not_on_xla(BOOLEAN, False, "write a snapshot of the memory", _PROFILER)
    CPP_LOG_LEVEL = _not_on_xla(TEXT, None, "log level of the native scheduler", "the scheduler is Python: use logging")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._values: dict[str, Any] = {}
        self._warned: set[str] = set()

    def value[T](self, variable: Variable[T]) -> T:
        """The value of one variable, as it was when first asked for. ValueError as of `Variable.read`."""
        with self._lock:
            if variable.name not in self._values:
                self._values[variable.name] = variable.read()
            value: T = self._values[variable.name]
            return value

    def rearm(self, name: str | None = None) -> None:
        """Forgets the value of one variable (full or short name) or of all; the next access reads it anew.

        Raises ValueError for a name that is not in the table.
        """
        known = {row.name for row in TABLE}
        if name is not None and not {name, _PREFIX + name} & known:
            raise ValueError(f"{name} is not an environment variable of this engine{_near(_PREFIX + name, known)}")
        with self._lock:
            for forgotten in known if name is None else (name, _PREFIX + name):
                self._values.pop(forgotten, None)
                self._warned.discard(forgotten)

    def warn_inapplicable(self) -> None:
        """Logs, once each, the variables that are set and have no effect: those of other platforms, unknown ones."""
        known = {row.name: row for row in TABLE}
        for name in sorted(os.environ):
            row = known.get(name)
            if name in self._warned or (row.has_effect if row else not name.startswith(_PREFIX)):
                continue
            self._warned.add(name)
            if row:
                logger.warning("%s has no effect: %s", name, row.note)
            else:
                logger.warning("%s is set, but there is no such variable%s", name, _near(name, known))


TABLE: tuple[Variable[Any], ...] = tuple(row for row in vars(Environment).values() if isinstance(row, Variable))
env = Environment()
rearm = env.rearm
warn_inapplicable = env.warn_inapplicable


def _near(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def user_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/deepinfer-jax`, by default `~/.cache/deepinfer-jax`. Not created here.

    Read anew each time, as other programs read this standard variable.
    """
    return Path(Environment.XDG_CACHE_HOME.read() or Path.home() / ".cache") / "deepinfer-jax"


def enable_compilation_cache(directory: str | None) -> None:
    """Keeps compiled programs between processes, in this folder; "": in none; None: in `xla` of the user's cache.

    A place that jax was already told of stays.
    """
    import jax  # here: the table alone needs no jax

    if directory is None:
        directory = str(user_cache_dir() / "xla")
    if not directory or jax.config.jax_compilation_cache_dir:
        return
    jax.config.update("jax_compilation_cache_dir", directory)
    # Small programs are many here: the defaults would skip them (JX §1.3).
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
