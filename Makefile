# make setup     a virtual environment with everything for development
# make demo      set everything up and show the main job on lab hosts
# make test      set up, lint, run all tests
# make test-real the real sglang 0.5.11 with DDTREE on a CPU (torch, triton, sglang: 2 GB in .venv-real)
# make real      install that sglang, for make test-real and ddtree-ops lab up --engine sglang
# make lint      ruff, mypy, layers
# make lab-down  power the lab hosts off
# make clean     remove the virtual environments and caches

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready

REAL   ?= .venv-real
export TORCH_INDEX ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo test real test-real collected lint lab-down clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing ddtree-ops and what it needs into $(VENV); the first time this takes up to a minute"
	$(BIN)/python tools/uv_install.py $(VENV) -e '.[test,lint]'
	@touch $@

setup: $(STAMP)

demo:
	@PYTHON=$(PYTHON) sh tools/system-packages.sh
	@$(MAKE) --no-print-directory setup
	$(BIN)/ddtree-ops demo

# The linters run beside the tests, most of the time on what one processor leaves; what they say comes at the end. First
# all tests are read once: what is compiled of them and of the commands then is kept, and each worker would do it again.
# PYTHONDONTWRITEBYTECODE, where it is set, would have every command that a test starts do so.
test:
	@PYTHON=$(PYTHON) sh tools/system-packages.sh test
	@$(MAKE) --no-print-directory setup
	@$(MAKE) --no-print-directory lint >$(VENV)/lint.txt 2>&1 & lint=$$!; trap 'kill $$lint; exit 130' INT TERM; \
	$(MAKE) --no-print-directory collected && \
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder; tested=$$?; \
	wait $$lint; linted=$$?; cat $(VENV)/lint.txt; [ $$tested -eq 0 ] && [ $$linted -eq 0 ]

collected: setup
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --collect-only -qq >$(VENV)/collected.txt 2>&1 || { cat $(VENV)/collected.txt; exit 1; }

# sglang and torch warn while they are imported: their warnings are shown, not errors
test-real:
	@PYTHON=$(PYTHON) sh tools/system-packages.sh test-real
	@$(MAKE) --no-print-directory setup real
	$(REAL)/bin/python -m pytest -W default --confcutdir tests/ddtree -m real tests/ddtree

real:
	@$(PYTHON) tests/ddtree/cpu/install.py $(REAL)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

lab-down: setup
	$(BIN)/ddtree-ops lab down

clean:
	rm -rf $(VENV) $(REAL) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
