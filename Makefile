# make env    virtual environment with every extra that needs no GPU, native kernels built
# make demo   generate with speculation and say what it gained
# make check  what CI runs: lint, types, test
# make gpu-test  tests that need an NVIDIA GPU, from source: no install, any Python with torch
# make docs   regenerate docs/cli.md and docs/environment-variables.md

PYTHON ?= python3
MODEL ?= smollm2-135m
# The release that results are reported with; where the default wheel has CUDA, this one has too.
TORCH ?= torch==2.13.0

BIN := .venv/bin
STAMP := .venv/.installed
NATIVE := $(wildcard src/slipstream/kernels/cpu/native/*)

.DEFAULT_GOAL := help
.PHONY: help env demo test gpu-test lint types check docs

help:
	@sed -n '/^# make/s/^# //p' $(firstword $(MAKEFILE_LIST))

env: $(STAMP)

$(BIN)/python:
	$(PYTHON) -m venv .venv

# Torch first, so that nothing else picks its version. The build requirements are installed beside
# the package and shared by rebuilds, which then compile only what changed. A build that failed
# leaves no cache behind: the next one looks for the compiler again.
$(STAMP): pyproject.toml CMakeLists.txt $(NATIVE) | $(BIN)/python
	$(BIN)/python -m pip install --quiet '$(TORCH)'
	$(BIN)/python -m pip install --quiet cmake ninja $$($(BIN)/python -c "import tomllib; \
	  print(*tomllib.load(open('pyproject.toml', 'rb'))['build-system']['requires'])")
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable '.[server,bench,dev]'
	@$(BIN)/python -c "import slipstream.kernels.cpu._native" 2>/dev/null || { rm -rf build; \
	  echo "native kernels not built: running on the reference back end, which is slow"; }
	@touch $@

demo: env
	$(BIN)/python examples/demo.py $(MODEL)

test: env
	$(BIN)/python -m pytest

# The compiled cpu kernels are not needed, so neither is an environment.
gpu-test:
	PYTHONPATH=src $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m pytest -m gpu tests/gpu

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: env
	$(BIN)/mypy

check: lint types test

docs: env
	$(BIN)/python scripts/generate_docs.py
