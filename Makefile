# Two commands matter: `make quickstart` and `make test`. Both make the environment (.venv) if it is not there.
# Variables: PYTHON (3.11 or 3.12), PIP_ARGS (e.g. an index of your own), ARGS (passed on: make quickstart ARGS=--json).

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell for p in python3.12 python3.11 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null && echo $$p && break; done)
# A machine without an NVIDIA GPU gets the PyTorch of constraints/cpu.txt; one with a GPU any of our range.
GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -c GPU || true)
ifeq ($(filter-out 0,$(GPU)),)
CONSTRAINTS := -c constraints/cpu.txt
else
CONSTRAINTS := -c constraints/gpu.txt
endif
# On a terminal pip shows what it does; elsewhere it says errors only, and each stage here a line.
QUIET := $(if $(MAKE_TERMOUT),,-q -q)
PIP := $(BIN)/python -m pip install $(QUIET) --disable-pip-version-check $(CONSTRAINTS) $(PIP_ARGS)
# The tests of Triton kernels need Triton, which a CPU build of PyTorch does not bring.
TRITON := triton==3.6.0
# One worker a core: the tests keep PyTorch to one thread each.
WORKERS ?= $(shell nproc 2>/dev/null || echo 2)

.PHONY: quickstart test test-gpu check format env env-test clean help
help:
	@echo "make quickstart   environment, package, then 'ridgeline quickstart' (real weights, about five minutes)"
	@echo "make test         environment, then the tests"
	@echo "make test-gpu     environment, then the tests that need an NVIDIA GPU, in groups (some minutes)"
	@echo "make check        ruff, format, types"

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "make: PYTHON must be Python 3.11 or 3.12, found none; install one or say make PYTHON=/path/to/python" >&2; exit 2; }
	@echo "environment 1/3: an empty one in $(VENV) (seconds)" >&2
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "make: $(PYTHON) could not make a virtual environment; on Debian: apt install python3-venv" >&2; exit 2; }

$(VENV)/.package: $(BIN)/python pyproject.toml constraints/cpu.txt constraints/gpu.txt
	@echo "environment 2/3: PyTorch, by far the largest part (some minutes the first time)" >&2
	@$(PIP) torch
	@echo "environment 3/3: ridgeline and its other packages (a minute or two)" >&2
	@$(PIP) -e '.[quickstart]'
	@touch $@

$(VENV)/.dev: $(VENV)/.package
	@echo "environment: what the tests and checks need (1 GB on the disk, some minutes)" >&2
	@$(PIP) -e '.[dev]'
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) $(TRITON) || \
		echo "no Triton for this platform: its tests are skipped"
	@touch $@

env: $(VENV)/.package
env-test: $(VENV)/.dev

quickstart: env
	@echo "ridgeline quickstart: about five minutes of two cores; finished stages are kept" >&2
	@$(BIN)/ridgeline quickstart $(ARGS)

test: env-test
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

test-gpu: env-test
	@$(BIN)/python -m tests.run_gpu $(ARGS)

check: env-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright --pythonpath $(BIN)/python

format: env-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache
