# Commands for contributors. They need Python 3.11 or newer, make, gcc and a package index. They install only into .venvs/.
PYTHON  ?= python3
JOBS    ?= 2
# WORKERS is the number of tests that run at the same time on one release. MARKS selects tests by the `markers` of
# pyproject.toml. ARGS="-k word" selects tests by name.
WORKERS ?= 2
MARKS   ?= not product and not ci
PYTEST   = python -m pytest -n $(WORKERS) -m "$(MARKS)"
BACKEND ?= flashinfer_trtllm_routed

# Model, questions and server arguments of `make demo`. For your own model and the real GSM8K questions:
#   make demo MODEL=... DATA=benchmark/gsm8k/test.jsonl SHOTS=5 TOKENS=512 SERVER="--tp 2"
# With an NVIDIA GPU, the bfloat16 model runs on the engine's own kernels. It runs one request at a time, because
# otherwise a stock server does not repeat its answers. Without a GPU, the NVFP4 model runs on the reference kernels.
ifneq ($(wildcard /dev/nvidia0),)
MODEL     ?= demo/bf16
QUESTIONS ?= 200
REGRESS   ?= sglang-moe-patches regress --require-identical --parallel 1
SERVER    ?= --mem-fraction-static 0.3
else
MODEL     ?= benchmark/tiny_moe/model
QUESTIONS ?= 100
REGRESS   ?= sglang-moe-reference regress --require-identical
SERVER    ?= --quantization modelopt_fp4 --moe-runner-backend $(BACKEND)
endif
DATA      ?= benchmark/tiny_moe/test.jsonl
SHOTS     ?= 1
TOKENS    ?= 128

# ENGINE is the SGLang release. Its default is in releases.toml.
ENGINE ?= $(DEFAULT)
DEFAULT := $(shell $(PYTHON) test/tools/releases.py default)
ifeq ($(DEFAULT),)
  $(error no SGLang release found; the line above has the reason)
endif

VENV  = .venvs/$(ENGINE)
UV    = .venvs/tools/bin/uv
STAMP = $(VENV)/.installed
BIN   = $(VENV)/bin

# Each engine process imports half a gigabyte of Python code. The first process writes bytecode files for the others.
unexport PYTHONDONTWRITEBYTECODE
# Python reads and writes files as UTF-8, with any locale.
export PYTHONUTF8 = 1
# Timeout of a download in seconds. It is long, because some packages have gigabytes.
export UV_HTTP_TIMEOUT ?= 300

.DEFAULT_GOAL := help
.PHONY: help env lint types unit engine-tests test test-releases test-all pages demo accuracy mutations guards soak pipeline \
  engine-suite constraints new-release compatibility wheel clean

help: ## show this help
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sort | sed -E 's/:[^#]*## /\t/' | expand -t 16
	@echo "  ENGINE=$(ENGINE) chooses the SGLang release (see releases.toml)."

$(UV):
	$(PYTHON) -c 'import sys; sys.exit("make: needs Python 3.11 or newer, found " + sys.version.split()[0] + "; set PYTHON=...") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv .venvs/tools
	.venvs/tools/bin/pip install -q --disable-pip-version-check uv

# The environment has the package versions of test/constraints/$ENGINE.txt. Without this file, it has the newest versions
# that the release allows.
FROZEN = $(wildcard test/constraints/$(ENGINE).txt)
$(STAMP): $(FROZEN) releases.toml pyproject.toml test/reference_kernels/pyproject.toml | $(UV)
	$(UV) venv -q --allow-existing --python $(PYTHON) $(VENV)
	$(PYTHON) test/tools/releases.py overrides $(ENGINE) > $(VENV)/overrides.txt
	$(UV) pip install -q --python $(BIN)/python $(addprefix --constraint ,$(FROZEN)) --override $(VENV)/overrides.txt \
	  "sglang==$(ENGINE)" -e '.[regress]' -e test/reference_kernels --group dev
	@touch $@

env: $(STAMP) ## install the engine, this package and the development tools into .venvs/$ENGINE

lint: env ## check code and format with ruff
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: env ## check types with mypy
	$(BIN)/mypy

unit: env ## run the tests that start no engine process
	OMP_NUM_THREADS=1 $(BIN)/$(PYTEST) --dist worksteal $(ARGS) $(or $(TESTS),test/unit)

engine-tests: env ## run the tests that use the real engine, on the CPU
	ENGINE=$(ENGINE) $(BIN)/sglang-moe-reference exec -- $(BIN)/$(PYTEST) \
	  --dist loadfile --no-loadscope-reorder $(ARGS) $(or $(TESTS),test/engine)

test: lint types unit engine-tests ## check code and types, and run all tests but the longest, on one release

# $(call on-each,RELEASES,ARGUMENTS) runs the unit tests and the engine tests on each release, JOBS test runs at a time.
# ARGUMENTS are further arguments of make. The longer runs start first. At the end, the logs are printed release by
# release, so that the last line is from the test runner.
LOGS ?= build
PARTS ?= engine-tests unit
on-each = mkdir -p $(LOGS) && rm -f $(LOGS)/test-*.log; \
  printf "%s\n" $(1) | xargs -P $(JOBS) -I{} sh -c \
    '$(MAKE) --no-print-directory env ENGINE={} > $(LOGS)/test-{}-env.log 2>&1'; \
  for tests in $(PARTS); do printf "$$tests %s\n" $(1); done | xargs -P $(JOBS) -L 1 sh -c \
    'echo "== SGLang $$1: $$0 started; log: $(LOGS)/test-$$1-$$0.log"; \
    $(MAKE) --no-print-directory $$0 ENGINE=$$1 $(2) > $(LOGS)/test-$$1-$$0.log 2>&1'; status=$$?; \
  for release in $(1); do echo "== SGLang $$release"; \
    cat $(LOGS)/test-$$release-*.log; done; exit $$status

test-releases: | $(UV) ## run the tests of behaviour that differs between releases, on the other releases of every_time in releases.toml
	@$(call on-each,$(shell $(PYTHON) test/tools/releases.py others),WORKERS=0 MARKS="every_release and not product")

test-all: lint types ## run all tests on all releases of every_time in releases.toml (3 h; PARTS=unit: only unit tests, half an hour)
	@$(call on-each,$(shell $(PYTHON) test/tools/releases.py every-time),WORKERS=0 MARKS= ALL_CASES=1)
	$(PYTHON) test/tools/compatibility.py --record $(LOGS)

pages: env ## write the generated parts of the pages: releases, changes, and figures of benchmark/results
	$(PYTHON) test/tools/pages.py
	$(BIN)/python benchmark/render.py

demo/bf16: | env
	$(BIN)/python -W ignore benchmark tiny_moe/export bf16 benchmark/tiny_moe $@

demo: env $(filter demo/bf16,$(MODEL)) ## serve a tiny model that can do arithmetic: stock and patched, then with a KV cache that grows
	rm -rf demo/report demo/growing
	$(BIN)/$(REGRESS) --model $(MODEL) --data-path $(DATA) \
	  --num-questions $(QUESTIONS) --num-shots $(SHOTS) --max-new-tokens $(TOKENS) --output demo/report -- $(SERVER)
	PYTHONPATH=benchmark $(BIN)/python -W ignore test/tools/growing_server.py --model $(MODEL) --output demo/growing \
	  --report demo/report/report.html -- $(SERVER)

ACCURACY = $(BIN)/sglang-moe-reference regress --data-path benchmark/tiny_moe/test.jsonl --num-questions 600 --num-shots 1 \
  --max-new-tokens 128
accuracy: env demo/bf16 ## measure the accuracy of the tiny model on its 600 held-out questions, in NVFP4 and in bfloat16
	rm -rf demo/accuracy demo/accuracy-bf16
	$(ACCURACY) --model benchmark/tiny_moe/model --output demo/accuracy -- \
	  --quantization modelopt_fp4 --moe-runner-backend $(BACKEND)
	$(ACCURACY) --model demo/bf16 --output demo/accuracy-bf16

mutations: env ## measure the tiny model's answers with deliberately broken patches, for docs/commands/accuracy.md
	$(BIN)/sglang-moe-reference exec -- \
	  $(BIN)/python -W ignore benchmark tiny_moe/mutations --backend $(BACKEND)

guards: env ## remove one guard after another, and check that its test fails (ARGS="cutedsl": only guards with this text)
	ENGINE=$(ENGINE) $(BIN)/sglang-moe-reference exec -- $(BIN)/python test/tools/guards.py $(ARGS)

soak: env ## send 64 concurrent requests for two minutes, and compare each answer with the answer to the same prompt alone
	SOAK_SECONDS=120 ENGINE=$(ENGINE) $(BIN)/sglang-moe-reference exec -- \
	  $(BIN)/python -m pytest -q -s test/engine/lab/test_servers.py -k concurrent

engine-suite: env ## run SGLang's own MoE tests, stock and patched, on a GPU (SGLANG=FOLDER: checkout at the tag of ENGINE)
	$(if $(SGLANG),,$(error set SGLANG=FOLDER to a checkout of SGLang at the tag v$(ENGINE)))
	$(BIN)/python benchmark whole/engine_suite $(SGLANG) $(ARGS)

pipeline: env ## compare answers of servers with two pipeline stages, 30 times: stock with patched, and stock with stock
	PYTHONPATH=benchmark $(BIN)/python -W ignore test/tools/pipeline.py $(ARGS)

constraints: env ## write the installed package versions to test/constraints/$ENGINE.txt
	{ echo "# Every package of the environment for SGLang $(ENGINE), by version. Made by: make constraints ENGINE=$(ENGINE)"; \
	  $(UV) pip freeze -q --python $(BIN)/python --exclude-editable; } > test/constraints/.new
	mv test/constraints/.new test/constraints/$(ENGINE).txt
	@touch $(STAMP)

new-release: ## add release ENGINE: write its constraints, run doctor and tests, write the pages, print the differences
	@$(PYTHON) test/tools/releases.py known $(ENGINE) > /dev/null
	$(MAKE) --no-print-directory constraints ENGINE=$(ENGINE)
	$(PYTHON) test/tools/compatibility.py $(ENGINE)

compatibility: ## run doctor and the compatibility tests on every release (half an hour, 10 GB of disk; ARGS="--doctor" or ARGS="0.5.23": only a part)
	$(PYTHON) test/tools/compatibility.py $(ARGS)

wheel: | $(UV) ## build a wheel in build/wheel, install it into an empty environment, and check its plugin there
	rm -rf build/wheel && mkdir -p build/wheel/source
	@# Build from a copy of the tracked files. In this folder, setuptools would add deleted files from build/lib or egg-info.
	git ls-files -z python pyproject.toml README.md LICENSE | xargs -0 cp --parents -t build/wheel/source
	$(UV) build -q --wheel --out-dir build/wheel build/wheel/source
	$(UV) venv -q --python $(PYTHON) build/wheel/environment
	$(UV) pip install -q --python build/wheel/environment/bin/python build/wheel/*.whl
	build/wheel/environment/bin/python -I test/tools/installed.py
	build/wheel/environment/bin/sglang-moe-patches --help > /dev/null
	@ls build/wheel/*.whl

clean: ## remove .venvs, build and demo
	rm -rf .venvs build demo
