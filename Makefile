# Everything runs in a virtual environment of its own, .venv; a fresh machine needs Python >= 3.11 and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# With libtpu installed JAX would look for a TPU first.
PYTEST := JAX_PLATFORMS=$${JAX_PLATFORMS:-cpu} $(BIN)/python -m pytest
export TF_CPP_MIN_LOG_LEVEL ?= 2
export ALLOW_MULTIPLE_LIBTPU_LOAD ?= 1

.PHONY: help demo test test-all lint format oracle plan grid clean
help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, found " + sys.version.split()[0] + "; set PYTHON=...") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/.base: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@
$(VENV)/.test: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	@touch $@
$(VENV)/.lint: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[test,lint]'
	@touch $@
$(VENV)/.oracle: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet 'torch==2.13.0'  # a CPU build where there is one
	$(BIN)/python -m pip install --quiet --editable '.[test,oracle]'
	@touch $@

$(VENV)/.plan: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[test,plan]'
	@touch $@

demo: $(VENV)/.base  ## the main job on a small checkpoint, made here
	$(BIN)/glm52 demo

test: $(VENV)/.test  ## the tests; those that need torch or libtpu skip without them
	$(PYTEST) -n 2 --dist worksteal -q -m "not slow"

test-all: $(VENV)/.test  ## the tests and the slow ones
	$(PYTEST) -n 2 --dist worksteal -q

lint: $(VENV)/.lint  ## formatter, linter, import rules, type checker
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/pyrefly check

format: $(VENV)/.lint  ## rewrite the code in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

oracle: $(VENV)/.oracle  ## install torch and transformers for the comparisons that need them

plan: $(VENV)/.plan  ## install the TPU compiler (libtpu), which plans need

grid: $(VENV)/.plan  ## compile every kernel at every shape for every TPU, without one
	$(BIN)/python -m benchmarks.kernels --grid

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build demo
