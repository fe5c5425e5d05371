# make demo    a language model trained with reinforcement learning from feedback, in minutes
# make test    the test suite          make check   lint, types, tests
# make test-slow  its long ones: faults by the dozen, whole trainings
# make test-shaken  where roundings matter: products round otherwise wherever they are cut otherwise
# make lint    ruff                    make types   mypy
# make docs    the documentation, as a site in site/ (Zensical, into .venv)
# make bench   the benchmarks          make clean   remove .venv, results and caches
# make bench-gpu  those for CUDA       make test-vllm  vLLM in .venv-vllm, and its tests
#                                      make test-nixl  NIXL (0.5 GB) into .venv, and its tests
#
# Everything is installed into .venv on first use. PIP_FLAGS goes to pip, for example
#   make demo PIP_FLAGS='--extra-index-url https://download.pytorch.org/whl/cpu'

PYTHON ?= python3
VENV ?= .venv
RESULTS ?= results
# Of `make test-shaken`: another one, other roundings.
SHAKE ?= 1
# Processes that run tests side by side, each with a Ray of its own (some 2 GB). The long ones wait
# for other processes most of the time.
TEST_WORKERS ?= 2
SLOW_WORKERS ?= 4
# Of `make test-slow`: 2/3 are the second, fifth, eighth ... of its tests.
SLOW_PART ?= 1/1
PIP_FLAGS ?=
# Of `make bench`: those that need no other program and no GPU.
BENCHMARKS ?= loop.framework_time loop.precision sampling.generate sampling.ledger weights.publish \
  serving.server
# Each process that a test starts would compile this project anew.
unexport PYTHONDONTWRITEBYTECODE
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-slow test-shaken test-vllm test-nixl check lint types docs bench bench-gpu clean install

demo: $(STAMP)
	$(BIN)/rllib train file tuned_examples/reviews_ppo_ptx.yaml --storage-path $(RESULTS)
	@echo 'For the commands above, first: . $(BIN)/activate'

test: $(STAMP)
	$(BIN)/python -m pytest -q --timeout 600 -n $(TEST_WORKERS) --dist loadfile -m 'not slow'

test-slow: $(STAMP)
	$(BIN)/python -m pytest -q --timeout 1200 -n $(SLOW_WORKERS) --dist loadfile \
	  --no-loadscope-reorder -m slow --part $(SLOW_PART)

test-shaken: $(STAMP)
	$(BIN)/python -m pytest -q --timeout 600 -n $(TEST_WORKERS) --dist loadfile \
	  -m 'not slow or covered' --shake $(SHAKE) $(addprefix tests/,numerics modules engines learners rollouts)

test-vllm:
	PYTHON='$(PYTHON)' PIP_FLAGS='$(PIP_FLAGS)' .ci/vllm

test-nixl: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) \
	  --constraint constraints.txt --editable '.[nixl]'
	$(BIN)/python -m pytest -q --timeout 600 -m nixl tests

check: lint types test test-shaken test-slow

lint: $(STAMP)
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) \
	  --constraint constraints.txt --editable '.[docs]'
	$(BIN)/python scripts/house.py
	$(BIN)/python scripts/reference.py
	$(BIN)/zensical build --strict

bench: $(STAMP)
	@for module in $(BENCHMARKS); do \
	  echo "== $$module"; $(BIN)/python -m "benchmarks.$$module" || exit 1; done

bench-gpu: $(STAMP)
	$(BIN)/python -m benchmarks.loop.gpu

install: $(STAMP)

$(STAMP): setup.py constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo 'Python 3.10 or later is needed: $(PYTHON) is older. make PYTHON=/path/to/python3'; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo 'Installing into $(VENV): 3 minutes or more, once, in which pip says nothing (PIP_FLAGS=-v: it does) ...'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) \
	  --constraint constraints.txt --editable '.[dev]'
	@touch $@
	@echo 'Installed. To have rllib on the PATH: . $(BIN)/activate'

clean:
	rm -rf $(VENV) .venv-vllm $(RESULTS) site build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
