# make setup     a virtual environment with everything for development
# make demo      set everything up and show the main job on lab hosts
# make test      set up, lint, run all tests
# make test-real the real sglang 0.5.11 with DDTREE on a CPU (installs torch and sglang: 1.4 GB)
# make lint      ruff, mypy, layers
# make lab-down  power the lab hosts off
# make clean     remove the virtual environment and caches

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready

REAL   ?= .venv-real
RSTAMP := $(REAL)/.ready
NEEDS  := tests/ddtree/cpu/requirements.txt tests/ddtree/cpu/requirements-sglang.txt
TORCH_INDEX ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-real lint lab-down clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing ddtree-ops and what it needs into $(VENV) with pip; the first time this takes a minute or more"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test,lint]'
	@touch $@

setup: $(STAMP)

demo:
	@PYTHON=$(PYTHON) sh tools/system-packages.sh
	@$(MAKE) --no-print-directory setup
	$(BIN)/ddtree-ops demo

test:
	@PYTHON=$(PYTHON) sh tools/system-packages.sh test
	@$(MAKE) --no-print-directory lint
	$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder

$(RSTAMP): $(NEEDS)
	@test -x $(REAL)/bin/python || $(PYTHON) -m venv $(REAL)
	@echo "installing torch (CPU) and sglang 0.5.11 into $(REAL) with pip: 1.4 GB; the first time this takes a minute or more"
	$(REAL)/bin/python -m pip install --quiet --disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -r tests/ddtree/cpu/requirements.txt
	$(REAL)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r tests/ddtree/cpu/requirements-sglang.txt
	@touch $@

# sglang and torch warn while they are imported: their warnings are shown, not errors
test-real: $(RSTAMP)
	$(REAL)/bin/python -m pytest -W default --confcutdir tests/ddtree -m real tests/ddtree

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

lab-down: setup
	$(BIN)/ddtree-ops lab down

clean:
	rm -rf $(VENV) $(REAL) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
