"""The folder of things that are made once per user, and the environment variables that move them."""

import os
from pathlib import Path

import jax


def user_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/deepinfer-jax`, by default `~/.cache/deepinfer-jax`. Not created here."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deepinfer-jax"


def enable_compilation_cache() -> None:
    """Keeps compiled programs between processes, in `xla` of the user's cache.

    `DEEPINFER_COMPILATION_CACHE_DIR` names another folder, or none if it is empty; a place that jax was already told
    of stays.
    """
    directory = os.environ.get("DEEPINFER_COMPILATION_CACHE_DIR", str(user_cache_dir() / "xla"))
    if not directory or jax.config.jax_compilation_cache_dir:
        return
    jax.config.update("jax_compilation_cache_dir", directory)
    # Small programs are many here: the defaults would skip them (JX §1.3).
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
