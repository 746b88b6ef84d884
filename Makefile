# Everything runs in a virtual environment of its own, .venv; a fresh machine needs Python >= 3.11 and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# With libtpu installed JAX would look for a TPU first.
ON_CPU := JAX_PLATFORMS=$${JAX_PLATFORMS:-cpu}
# MORE=... adds options of pytest.
PYTEST_OPTIONS := -n 2 --dist worksteal -q --durations=20 $(MORE)
PYTEST := $(ON_CPU) $(BIN)/python -m pytest $(PYTEST_OPTIONS)
# The arguments that run what skipped in the last run. Options of our own take a value after "=": pytest reads the
# command line before it knows them, and a word of its own would be a path of tests.
SKIPPED := $(VENV)/skipped
export TF_CPP_MIN_LOG_LEVEL ?= 2
export ALLOW_MULTIPLE_LIBTPU_LOAD ?= 1

.PHONY: help demo test test-skipped test-slow test-all test-313 trials lint format oracle plan grid grid-short clean
help:  ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

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

# An environment of its own, since another Python cannot share one.
VENV313 := .venv313
PYTHON313 ?= $(shell for python in python3.13 $${PYENV_ROOT:-$$HOME/.pyenv}/versions/3.13.*/bin/python; do \
	"$$python" -c "import sys; sys.exit(sys.version_info[:2] != (3, 13))" 2> /dev/null && echo "$$python" && break; done)
TESTS313 := tests/test_config.py tests/checkpoint/test_load.py tests/kernels tests/model/test_parity.py \
	tests/model/test_mesh.py tests/infer/test_generation.py tests/infer/test_commands.py
$(VENV313)/.test: pyproject.toml
	@test -n "$(PYTHON313)" || { echo "no Python 3.13 is found, as python3.13 or in pyenv; set PYTHON313=..."; exit 1; }
	$(PYTHON313) -m venv $(VENV313)
	$(VENV313)/bin/python -m pip install --quiet --upgrade pip
	$(VENV313)/bin/python -m pip install --quiet --upgrade --upgrade-strategy eager --editable '.[test]'
	@touch $@

# Which parameters of the slow tests come: the next ones with every commit.
SAMPLE ?= $(shell git rev-list --count HEAD 2> /dev/null || echo 0)

demo: $(VENV)/.base  ## the main job on a small checkpoint, made here
	$(BIN)/glm52 demo

test: $(VENV)/.test  ## the tests but the slow ones; what needs torch or libtpu skips without them
	$(PYTEST) -m "not slow and not trials" --record-skips=$(SKIPPED)

test-skipped: $(VENV)/.oracle $(VENV)/.plan  ## installs torch and libtpu, and runs what skipped in the last run
	@test -e $(SKIPPED) || { echo "no run has been recorded: make test or make test-all comes first"; exit 1; }
	@if [ -s $(SKIPPED) ]; then set -x; $(PYTEST) --no-skips @$(SKIPPED); else echo "nothing skipped"; fi

test-slow: $(VENV)/.test  ## each slow test with one set of its parameters; SAMPLE=N takes the N-th, counted round
	$(PYTEST) -m "slow and not trials" --sample=$(SAMPLE) --record-skips=$(SKIPPED)

test-all: $(VENV)/.test  ## the tests and the slow ones
	$(PYTEST) -m "not trials" --record-skips=$(SKIPPED)

test-313: $(VENV313)/.test  ## one set of parameters of some tests on Python 3.13 with the newest JAX for it; SAMPLE=N
	$(ON_CPU) $(VENV313)/bin/python -m pytest $(PYTEST_OPTIONS) -m "not slow and not trials" --sample=$(SAMPLE) $(TESTS313)

trials: $(VENV)/.test  ## long loops of chance: kills of conversions, random layouts
	$(ON_CPU) $(BIN)/python -m pytest -q -n 0 -s -m trials --durations=0
	$(ON_CPU) $(BIN)/python -m tests.model.random_layouts --count 400 --seed $(SAMPLE)

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

grid-short: $(VENV)/.plan  ## compile the kernels at the numbers of pages and tokens that are chosen, by turns on each TPU
	$(BIN)/python -m benchmarks.kernels --grid --short

clean:  ## remove the virtual environments and caches
	rm -rf $(VENV) $(VENV313) .pytest_cache .ruff_cache .hypothesis build demo
