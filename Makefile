# Everything a contributor runs. Needs Python 3.11+, make, gcc and a package index; installs into .venvs/ only.
ENGINE  ?= 0.5.12.post1
ENGINES ?= 0.5.12.post1 0.5.11 0.5.13 0.5.23
JOBS    ?= 2
PYTHON  ?= python3
BACKEND ?= flashinfer_trtllm_routed

# What `make demo` serves and asks. The real GSM8K: make demo MODEL=... DATA=data/gsm8k/test.jsonl SHOTS=5 TOKENS=256
MODEL     ?= data/tiny_moe/model
DATA      ?= data/tiny_moe/test.jsonl
QUESTIONS ?= 100
SHOTS     ?= 1
TOKENS    ?= 128

VENV  = .venvs/$(ENGINE)
UV    = .venvs/tools/bin/uv
STAMP = $(VENV)/.installed
BIN   = $(VENV)/bin

# Engine processes import half a gigabyte of Python: let the first one cache what it compiles.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help env lint types unit engine-tests test demo accuracy mutations soak constraints compatibility clean

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
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q test/unit

engine-tests: env ## tests on the real engine, on the CPU
	ENGINE=$(ENGINE) $(BIN)/sglang-moe-patches exec --reference-kernels -- $(BIN)/python -m pytest -q test/engine

test: lint types ## lint, types and all tests, on every release in ENGINES, JOBS of them at a time
	@mkdir -p build
	@printf '%s\n' $(ENGINES) | xargs -P $(JOBS) -I{} sh -c \
	  'echo "== SGLang {}: started; log: build/test-{}.log"; \
	  $(MAKE) --no-print-directory unit engine-tests ENGINE={} > build/test-{}.log 2>&1; status=$$?; \
	  echo "== SGLang {}: its log"; cat build/test-{}.log; exit $$status'

demo: env ## serve a tiny model that can do arithmetic, stock and patched, and compare them on 100 questions
	rm -rf demo && mkdir -p demo
	$(BIN)/sglang-moe-patches regress --reference-kernels --model $(MODEL) --data-path $(DATA) \
	  --num-questions $(QUESTIONS) --num-shots $(SHOTS) --max-new-tokens $(TOKENS) --output demo/report -- \
	  --quantization modelopt_fp4 --moe-runner-backend $(BACKEND)

accuracy: env ## accuracy of the tiny model on its 600 held-out questions, NVFP4 and the bf16 it was made from
	PYTHONPATH=benchmark $(BIN)/python -W ignore -m tiny_moe.accuracy

mutations: env ## what deliberately broken patches do to its answers: the table of docs/accuracy.md
	PYTHONPATH=benchmark $(BIN)/sglang-moe-patches exec --reference-kernels -- \
	  $(BIN)/python -W ignore -m tiny_moe.mutations --backend $(BACKEND)

soak: env ## 64 concurrent requests for two minutes, every answer compared with the one given alone
	SOAK_SECONDS=120 ENGINE=$(ENGINE) $(BIN)/sglang-moe-patches exec --reference-kernels -- \
	  $(BIN)/python -m pytest -q -s test/engine/test_servers.py -k concurrent

constraints: env ## write constraints/$ENGINE.txt from what is installed
	{ echo "# Every package of the environment for SGLang $(ENGINE), by version. Made by: make constraints ENGINE=$(ENGINE)"; \
	  $(UV) pip freeze -q --python $(BIN)/python --exclude-editable; } > constraints/.new
	mv constraints/.new constraints/$(ENGINE).txt

compatibility: env ## install every release in turn and write docs/compatibility.md (half an hour)
	PATH=$(abspath .venvs/tools/bin):$$PATH $(BIN)/python test/compatibility.py

clean: ## remove what make built
	rm -rf .venvs build demo
