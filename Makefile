# make help        says what there is.
#
# PYTHON           the interpreter .venv is made with (3.11 or newer)
# TORCH_ARGS       more arguments for installing torch; for instance an --index-url with CPU-only
#                  builds, which are far smaller than the CUDA ones

PYTHON ?= python3
TORCH_ARGS ?=

VENV := .venv
STAMP := $(VENV)/.stamp
PIP_INSTALL := $(VENV)/bin/python -m pip install --quiet --no-input --disable-pip-version-check \
	--constraint constraints.txt
BENCHMARKS := $(filter-out benchmarks/_%,$(sort $(wildcard benchmarks/*.py)))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv demo test check format bench clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

venv: $(STAMP)  ## set up .venv with RankLens, DeepSpeed, Megatron-core and the test tools

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	    "RankLens needs Python 3.11 or newer, $(PYTHON) is %d.%d: make PYTHON=python3.11 ..." % sys.version_info[:2])'
	@echo "== $(VENV): a virtual environment of $$($(PYTHON) --version)"
	$(PYTHON) -m venv $(VENV)
	@echo "== $(VENV): torch, by itself so that TORCH_ARGS chooses its build and no other package's"
	$(PIP_INSTALL) $(TORCH_ARGS) torch
	@echo "== $(VENV): RankLens and everything it is tested with"
	$(PIP_INSTALL) --editable '.[all]'
	@touch $@

demo: $(STAMP)  ## record 8 ranks of a Megatron GPT on this machine, replay rank 5 alone
	$(VENV)/bin/ranklens demo

test: $(STAMP)  ## the tests
	$(VENV)/bin/python -m pytest -q

check: $(STAMP)  ## ruff, mypy --strict and the tests
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/python -m pytest -q

format: $(STAMP)  ## put the code into ruff's format
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

bench: $(STAMP)  ## every script of benchmarks/, one after the other
	@set -e; for script in $(BENCHMARKS); do echo "== $$script"; $(VENV)/bin/python $$script; done

clean:  ## remove .venv, caches and builds (never traces)
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
