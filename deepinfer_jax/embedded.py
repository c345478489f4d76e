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
    """
    folder = user_cache_dir() / f"tiny-{__version__}-{_REVISION}"
    if folder.is_dir():
        return folder
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
    return folder
