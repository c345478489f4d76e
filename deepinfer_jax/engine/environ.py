"""The environment variables, one line each, and the folder of things that are made once per user."""

import os
from pathlib import Path

import jax

# name: meaning; default
ENVIRONMENT = {
    "DEEPINFER_COMPILATION_CACHE_DIR": "folder of compiled programs, empty for none; <user cache>/xla",
    "XDG_CACHE_HOME": "parent of <user cache>, the folder deepinfer-jax in it; ~/.cache",
}


def user_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/deepinfer-jax`, by default `~/.cache/deepinfer-jax`. Not created here."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deepinfer-jax"


def enable_compilation_cache() -> None:
    """Keeps compiled programs between processes, unless the user has chosen a place for them (or none)."""
    directory = os.environ.get("DEEPINFER_COMPILATION_CACHE_DIR", str(user_cache_dir() / "xla"))
    if not directory or jax.config.jax_compilation_cache_dir:
        return
    jax.config.update("jax_compilation_cache_dir", directory)
    # Small programs are many here: the defaults would skip them (JX §1.3).
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
