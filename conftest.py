"""For all tests and notebooks: a user cache of this run alone, so that they neither read nor leave anything."""

import os
import shutil
import tempfile

import hypothesis
import pytest

# A timing never fails a test.
hypothesis.settings.register_profile("deepinfer-jax", deadline=None)
hypothesis.settings.load_profile("deepinfer-jax")


def pytest_configure(config: pytest.Config) -> None:
    directory = tempfile.mkdtemp(prefix="deepinfer-jax-tests-")
    os.environ["XDG_CACHE_HOME"] = directory  # subprocesses and notebook kernels inherit it
    config.add_cleanup(lambda: shutil.rmtree(directory, ignore_errors=True))
