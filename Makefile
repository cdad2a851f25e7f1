# make demo      train a byte-level GPT on two ranks, and show what was compiled
# make test      lint, types, and every test that is not slow (about 10 minutes on 2 idle cores)
# make test-slow one slice of the slow tests, SLICE=3 or the one whose turn it is at this commit
# make test-all  the fast tests and all slow ones, slice by slice (hours): goes on where it stopped
# make faults    damaged and crafted input of every kind, COUNT=50000; ranks and jobs that are killed
# make integrations   tests beside DeepSpeed, Lightning, TRL, Ray and others, in an environment of its own
# make soak      a job of two ranks under random faults for MINUTES=120; again: goes on
# make bench     step time against FSDP2 and DDP
# make docs      build the documentation as a site: build/docs/index.html
# make release   build wheel and sdist, and use them with the oldest and the newest torch
# make zoo       hundreds of models, trained compiled and plainly (hours): docs/measured.md
#
# docs/testing.md says which slices there are, and which commit each one last passed at.
# make slices-table and make slow-times update that table, and what slices are balanced by.
#
# PYTHON=python3.12 chooses the interpreter of the environment, VENV=dir its place,
# PYTEST_FLAGS="-x -k plan" what is passed on to pytest, BENCH_FLAGS=--quick to the benchmark,
# ZOO_FLAGS="--part timm" to the zoo.

SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
PYTEST_FLAGS ?=
BENCH_FLAGS ?=
ZOO_FLAGS ?=
SLICE ?=
COUNT ?= 50000
MINUTES ?= 120

PY := $(VENV)/bin/python
BASE := $(VENV)/.base
STAMP := $(VENV)/.installed

# Ranks are processes: more than one thread in each makes them fight over the cores, and waiting
# threads must not spin. The caller's own settings win.
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= PASSIVE
export TOKENIZERS_PARALLELISM ?= false
# Tests start hundreds of processes: without stored bytecode each compiles the whole package again.
unexport PYTHONDONTWRITEBYTECODE

OTHERS := build/integrations/bin/python

.PHONY: venv demo test test-slow test-all faults integrations soak slices-table slow-times lint \
	format bench zoo docs release clean

venv: $(STAMP)

# What training needs; the tests need several packages more.
$(BASE): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "zerofx needs Python 3.10 or newer: make PYTHON=python3.12"; exit 1; }
	@echo "installing into $(VENV): this takes a few minutes the first time"
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(STAMP): $(BASE)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,solver]'
	@touch $@

demo: $(BASE)
	$(VENV)/bin/torchrun --standalone --nproc-per-node 2 -m zerofx demo

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m mypy

format: $(STAMP)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

test: lint
	$(PY) -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not slow" $(PYTEST_FLAGS)

test-slow: $(STAMP)
	$(PY) tests/slices.py run $(SLICE)

test-all: test
	$(PY) tests/slices.py all

faults: $(STAMP)
	$(PY) tests/fuzz.py $(COUNT)
	$(PY) tests/kills.py
	$(PY) -m pytest -q tests/faults -k "pairs_that_are_killed or fuzz or damage or lock"

# Where a package is missing, these tests are skipped elsewhere, and fail here.
integrations: $(STAMP)
	test -d build/integrations || $(PYTHON) -m venv build/integrations
	$(OTHERS) -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-e '.[test,solver,integrations]'
	DS_BUILD_OPS=0 $(OTHERS) -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		--no-build-isolation 'deepspeed>=0.19,<0.20'
	DS_ACCELERATOR=cpu ZEROFX_NEEDS_ALL=1 $(OTHERS) -m pytest -n 2 --dist loadfile --no-loadscope-reorder \
		tests/train/test_lightning.py tests/train/test_deepspeed_engine.py \
		tests/train/test_other_libraries.py tests/tools/test_manifests.py tests/tools/test_examples.py

soak: $(STAMP)
	$(PY) tests/soak.py build/soak --minutes $(MINUTES)

slices-table: $(STAMP)
	$(PY) tests/slices.py table

slow-times: $(STAMP)
	$(PY) tests/slices.py times

bench: $(STAMP)
	$(PY) -m benchmarks.step_time $(BENCH_FLAGS)

zoo: $(STAMP)
	$(PY) -m benchmarks.zoo $(ZOO_FLAGS)

# An environment of its own, since the pages import zerofx but nothing of the tests.
DOCS := $(VENV)-docs

$(DOCS)/.installed: pyproject.toml constraints.txt
	@echo "installing into $(DOCS): this takes a few minutes the first time"
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-e '.[docs]'
	@touch $@

docs: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --strict --quiet
	@echo build/docs/index.html

release: $(STAMP)
	ZEROFX_TEST_TORCH="2.11.0 2.13.0" ZEROFX_DIST=dist $(PY) -m pytest -o faulthandler_timeout=3600 \
		tests/tools/test_release.py

clean:
	rm -rf $(VENV) $(DOCS) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
