# make setup     a virtual environment with everything for development
# make demo      set everything up and show the main job on lab hosts
# make test      set up, lint, run all tests
# make lint      ruff, mypy, layers
# make lab-down  power the lab hosts off
# make clean     remove the virtual environment and caches

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint lab-down clean

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

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

lab-down: setup
	$(BIN)/ddtree-ops lab down

clean:
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
