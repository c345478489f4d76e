"""The embedded default model: a tiny DeepSeek-V4.1 with random weights, made once per user."""

import os
import shutil
import tempfile
from pathlib import Path

from deepinfer_jax import __version__
from deepinfer_jax.checkpoint.tiny import make_tiny
from deepinfer_jax.engine.environ import user_cache_dir

# Counted up when what `make_tiny` writes by default changes.
_REVISION = 1


def embedded_model() -> Path:
    """The folder of the embedded model, in the user's cache; made on first use.

    It is made aside and moved into place, so that an interrupted or a concurrent run leaves no half model.

    Raises OSError, saying what to do, if the cache cannot be written.
    """
    folder = user_cache_dir() / f"tiny-{__version__}-{_REVISION}"
    if folder.is_dir():
        return folder
    try:
        _make(folder)
    except OSError as error:
        raise OSError(
            f"the embedded model cannot be written to {folder}: {error}; set XDG_CACHE_HOME to a folder that can, or "
            "name a model"
        ) from error
    return folder


def _make(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        make_tiny(unfinished / folder.name)
        os.rename(unfinished / folder.name, folder)
    except OSError:
        if not folder.is_dir():  # otherwise another process was faster
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
