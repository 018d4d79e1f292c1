# Everything a contributor runs. Needs Python 3.11+, make, gcc and a package index; installs into .venvs/ only.
PYTHON  ?= python3
JOBS    ?= 2
# Tests at a time on one release: those with servers beside the others. Which: see `markers` in pyproject.toml; ARGS="-k word" fewer.
WORKERS ?= 2
MARKS   ?= not product and not ci
PYTEST   = python -m pytest -n $(WORKERS) -m "$(MARKS)"
BACKEND ?= flashinfer_trtllm_routed

# What `make demo` serves and asks. The real GSM8K: make demo MODEL=... DATA=benchmark/gsm8k/test.jsonl SHOTS=5 TOKENS=512 SERVER="--tp 2"
# With an NVIDIA GPU: the bfloat16 model through the engine's own kernels, one request at a time, as only then a stock
# server repeats its answers. Without one: the NVFP4 model through the reference kernels.
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

# The SGLang release: the default of releases.toml unless ENGINE says otherwise.
ENGINE ?= $(DEFAULT)
DEFAULT := $(shell $(PYTHON) test/tools/releases.py default)
ifeq ($(DEFAULT),)
  $(error no release to work with; the line above says why)
endif

VENV  = .venvs/$(ENGINE)
UV    = .venvs/tools/bin/uv
STAMP = $(VENV)/.installed
BIN   = $(VENV)/bin

# Engine processes import half a gigabyte of Python: let the first one cache what it compiles.
unexport PYTHONDONTWRITEBYTECODE
# Files are UTF-8, whatever the locale.
export PYTHONUTF8 = 1
# Some packages are gigabytes, and some machines slow.
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

# As test/constraints/$ENGINE.txt froze it; without that file, the newest of everything that the release allows.
FROZEN = $(wildcard test/constraints/$(ENGINE).txt)
$(STAMP): $(FROZEN) releases.toml pyproject.toml test/reference_kernels/pyproject.toml | $(UV)
	$(UV) venv -q --allow-existing --python $(PYTHON) $(VENV)
	$(PYTHON) test/tools/releases.py overrides $(ENGINE) > $(VENV)/overrides.txt
	$(UV) pip install -q --python $(BIN)/python $(addprefix --constraint ,$(FROZEN)) --override $(VENV)/overrides.txt \
	  "sglang==$(ENGINE)" -e '.[regress]' -e test/reference_kernels --group dev
	@touch $@

env: $(STAMP) ## build .venvs/$ENGINE: the engine, this package, and the development tools

lint: env ## ruff
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: env ## mypy
	$(BIN)/mypy

unit: env ## tests that start no engine process
	OMP_NUM_THREADS=1 $(BIN)/$(PYTEST) --dist worksteal $(ARGS) $(or $(TESTS),test/unit)

engine-tests: env ## tests on the real engine, on the CPU
	ENGINE=$(ENGINE) $(BIN)/sglang-moe-reference exec -- $(BIN)/$(PYTEST) \
	  --dist loadfile --no-loadscope-reorder $(ARGS) $(or $(TESTS),test/engine)

test: lint types unit engine-tests ## lint, types and all tests but the longest, on one release

# $(call on-each,RELEASES,MORE): unit and engine tests on each, JOBS of them at a time, the longer ones first; then their
# logs release by release, so that the last line is the test runner's.
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

test-releases: | $(UV) ## what differs between releases, on the others that are tested every time, JOBS at a time
	@$(call on-each,$(shell $(PYTHON) test/tools/releases.py others),WORKERS=0 MARKS="every_release and not product")

test-all: lint types ## all tests on every release that is tested every time, JOBS at a time (3 h; PARTS=unit: half an hour of it)
	@$(call on-each,$(shell $(PYTHON) test/tools/releases.py every-time),WORKERS=0 MARKS= ALL_CASES=1)
	$(PYTHON) test/tools/compatibility.py --record $(LOGS)

pages: env ## write what is generated in the pages: of releases and changes, and the figures of benchmark/results
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
accuracy: env demo/bf16 ## accuracy of the tiny model on its 600 held-out questions, NVFP4 and the bf16 it was made from
	rm -rf demo/accuracy demo/accuracy-bf16
	$(ACCURACY) --model benchmark/tiny_moe/model --output demo/accuracy -- \
	  --quantization modelopt_fp4 --moe-runner-backend $(BACKEND)
	$(ACCURACY) --model demo/bf16 --output demo/accuracy-bf16

mutations: env ## what deliberately broken patches do to its answers: the table of docs/commands/accuracy.md
	$(BIN)/sglang-moe-reference exec -- \
	  $(BIN)/python -W ignore benchmark tiny_moe/mutations --backend $(BACKEND)

guards: env ## take guards out, one by one, and see their tests fail (docs/development/guards.md); ARGS="cutedsl": some
	ENGINE=$(ENGINE) $(BIN)/sglang-moe-reference exec -- $(BIN)/python test/tools/guards.py $(ARGS)

soak: env ## 64 concurrent requests for two minutes, every answer compared with the one given alone
	SOAK_SECONDS=120 ENGINE=$(ENGINE) $(BIN)/sglang-moe-reference exec -- \
	  $(BIN)/python -m pytest -q -s test/engine/lab/test_servers.py -k concurrent

engine-suite: env ## SGLang's own MoE tests, stock and patched side by side, on a GPU: SGLANG=CHECKOUT at ENGINE's tag
	$(if $(SGLANG),,$(error SGLANG=CHECKOUT says where SGLang's tests are, at the tag v$(ENGINE)))
	$(BIN)/python benchmark whole/engine_suite $(SGLANG) $(ARGS)

pipeline: env ## do stock and patched differ on pipeline stages, more often than stock and stock? 30 times each
	PYTHONPATH=benchmark $(BIN)/python -W ignore test/tools/pipeline.py $(ARGS)

constraints: env ## write test/constraints/$ENGINE.txt from what is installed
	{ echo "# Every package of the environment for SGLang $(ENGINE), by version. Made by: make constraints ENGINE=$(ENGINE)"; \
	  $(UV) pip freeze -q --python $(BIN)/python --exclude-editable; } > test/constraints/.new
	mv test/constraints/.new test/constraints/$(ENGINE).txt
	@touch $(STAMP)

new-release: ## install release ENGINE, freeze, ask and test it, write the pages, say what to look at
	@$(PYTHON) test/tools/releases.py known $(ENGINE) > /dev/null
	$(MAKE) --no-print-directory constraints ENGINE=$(ENGINE)
	$(PYTHON) test/tools/compatibility.py $(ENGINE)

compatibility: ## ask and test every release in turn (half an hour, 10 GB of disk at a time); ARGS="--doctor", ARGS="0.5.23": less
	$(PYTHON) test/tools/compatibility.py $(ARGS)

wheel: | $(UV) ## build a wheel in build/wheel, install it into an empty environment, see that its plugin is found there
	rm -rf build/wheel && mkdir -p build/wheel/source
	@# A copy of the tracked files: beside build/lib or an egg-info setuptools ships files that are gone.
	git ls-files -z python pyproject.toml README.md LICENSE | xargs -0 cp --parents -t build/wheel/source
	$(UV) build -q --wheel --out-dir build/wheel build/wheel/source
	$(UV) venv -q --python $(PYTHON) build/wheel/environment
	$(UV) pip install -q --python build/wheel/environment/bin/python build/wheel/*.whl
	build/wheel/environment/bin/python -I test/tools/installed.py
	build/wheel/environment/bin/sglang-moe-patches --help > /dev/null
	@ls build/wheel/*.whl

clean: ## remove what make built
	rm -rf .venvs build demo
