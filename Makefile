# `make demo` and `make test` are complete on a fresh machine: they find Python >= 3.12, make .venv,
# install the package with what its tests need, and run.
VENV := .venv
PYTHON := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo test lint test-fast test-quick test-slow bench clean

help:
	@echo "make demo         generate text with the embedded model (random weights)"
	@echo "make test         ruff, format check, mypy, import rules, fast tests"
	@echo "make test-quick   fast tests without the real model, in three minutes"
	@echo "make test-slow    tests that take minutes"
	@echo "make gpu-compile  compile the GPU kernels for A100, H100 and B200, no GPU needed"
	@echo "make bench        the benchmarks, on this machine"

# A second run does nothing unless pyproject.toml changed.
$(INSTALLED): pyproject.toml
	@python="$$(.ci/find-python)" || exit 1; \
	test -x $(PYTHON) || { echo "$$python -m venv $(VENV)"; "$$python" -m venv $(VENV); }
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	@touch $@

install: $(INSTALLED)

demo: install
	$(VENV)/bin/deepinfer-jax generate --prompt "Once upon a time" --max-tokens 32

test: lint test-fast

lint: install
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	$(VENV)/bin/lint-imports

# A file stays on one worker, whose compiled programs its tests share.
PYTEST := $(PYTHON) -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder

test-fast: install
	$(PYTEST) -m "not slow" --nbmake tests notebooks

test-quick: install
	$(PYTEST) -m "(pure or toy) and not slow" tests

test-slow: install
	$(PYTEST) -m slow --nbmake tests notebooks

bench: install
	for script in benchmarks/*.py; do $(PYTHON) "$$script" || exit 1; done

clean:
	rm -rf $(VENV) build dist *.egg-info

# gpu-compile: has an environment of its own, with the CUDA compiler.
-include kernels_pallas/gpu.mk
