# Everything a contributor runs. Needs Python 3.11+, make, gcc and a package index; installs into .venvs/ only.
ENGINE  ?= 0.5.12.post1
ENGINES ?= 0.5.12.post1 0.5.11
PYTHON  ?= python3

VENV  = .venvs/$(ENGINE)
UV    = .venvs/tools/bin/uv
STAMP = $(VENV)/.installed
BIN   = $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help env lint types unit engine-tests test demo clean

help: ## show this help
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sort | sed -E 's/:[^#]*## /\t/' | expand -t 16
	@echo "  ENGINE=$(ENGINE) chooses the SGLang release (see constraints/)."

$(UV):
	$(PYTHON) -c 'import sys; sys.exit("make: needs Python 3.11 or newer, found " + sys.version.split()[0] + "; set PYTHON=...") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv .venvs/tools
	.venvs/tools/bin/pip install -q --disable-pip-version-check uv

$(VENV)/.installed: constraints/$(ENGINE).txt pyproject.toml | $(UV)
	$(UV) venv -q --allow-existing --python $(PYTHON) $(VENV)
	$(UV) pip install -q --python $(BIN)/python --constraint constraints/$(ENGINE).txt \
	  "sglang==$(ENGINE)" -e . --group dev
	@touch $@

constraints/%.txt:
	@echo "make: no constraints for engine '$*'; known: $(basename $(notdir $(wildcard constraints/*.txt)))" >&2; exit 2

env: $(STAMP) ## build .venvs/$ENGINE: the engine, this package, and the development tools

lint: env ## ruff
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: env ## mypy
	$(BIN)/mypy

unit: env ## tests that start no engine process
	$(BIN)/python -m pytest -q test/unit

clean: ## remove what make built
	rm -rf .venvs build demo
