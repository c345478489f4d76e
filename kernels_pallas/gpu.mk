# Included by the Makefile. Compiles the GPU kernels and, for one GPU, whole step programs without a GPU, in an
# environment of its own: the package with the jax version of .venv, the CUDA plugin of that version without the CUDA
# libraries, and ptxas.
GPU_VENV := .venv-gpu
GPU_PYTHON := $(GPU_VENV)/bin/python
GPU_INSTALLED := $(GPU_VENV)/.installed

.PHONY: gpu-compile
gpu-compile: $(GPU_INSTALLED)
	$(GPU_PYTHON) -m deepinfer_jax.kernels.aot
	$(GPU_PYTHON) -m deepinfer_jax.runtime.aot tests/configs/released_5_layers.json --gpu H100

$(GPU_INSTALLED): $(INSTALLED) kernels_pallas/gpu.mk
	$(PYTHON) -m venv $(GPU_VENV)
	jax=$$($(PYTHON) -c 'import jax; print(jax.__version__)') && \
	$(GPU_PYTHON) -m pip install --quiet --disable-pip-version-check "jax==$$jax" --editable . && \
	$(GPU_PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps \
	    "jax-cuda12-plugin==$$jax" "jax-cuda12-pjrt==$$jax" nvidia-cuda-nvcc-cu12
	@touch $@
