# Everything on a fresh machine, with Python and make alone:
#   make demo    the main job on a dataset it makes itself
#   make test    the tests, against a real HDFS and a real S3 on 127.0.0.1
#   make test-deep    the long sweeps, whose first points make test tries, and real Hive and Azure servers (650 MB)
#   make test-frameworks    Lightning, Accelerate, Trainer, Ray and Spark, which it installs first (1 GB)
#   make docs    the site of the documentation, in build/site
#   make dist    the wheel and the sdist, checked, in dist
#   make lint types bench, make check for all that has to pass

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
FRAMEWORKS := $(VENV)/.frameworks
DOCS   := $(VENV)/.docs

# every test starts processes of its own: they need not compile pqcache again, whatever the user's shell says
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-deep test-frameworks lint types check bench docs dist clean

demo: $(READY)
	@$(BIN)/pqcache demo build/demo

# three workers for two cores, as tests also wait; each server is on one of them; your own PYTEST_ADDOPTS come after
# these, so that -n 0 or -n 4 wins; a worker that crashes is not replaced, as xdist then waits for ever for its tests
PYTEST = PYTEST_ADDOPTS="-n 3 --dist loadgroup --max-worker-restart 0 $$PYTEST_ADDOPTS" $(BIN)/python -m pytest -q

test: $(READY)
	$(BIN)/python -m tests.servers.install
	$(PYTEST)

test-deep: $(READY)
	PQCACHE_TEST_PROFILE=deep $(BIN)/python -m tests.servers.install
	PQCACHE_TEST_PROFILE=deep $(PYTEST) -m deep -o faulthandler_timeout=900

test-frameworks: $(FRAMEWORKS)
	$(PYTEST) -m frameworks tests/frameworks

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo --no-cache

types: $(READY)
	$(BIN)/mypy

check: lint types test docs dist test-deep test-frameworks

# manual pages and pages of the commands from their help, then the site; a broken link is an error
docs: $(DOCS)
	$(BIN)/python tools/man.py
	$(BIN)/python -m sphinx -q -W --keep-going -b html -c docs/site -d build/doctrees . build/site
	@echo "The site is in build/site: open build/site/index.html."

dist: $(DOCS)
	rm -rf dist
	$(BIN)/python -m hatchling build
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl

bench: $(READY)
	@for script in benchmarks/[a-z]*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

$(BIN)/python:
	@$(PYTHON) -m venv $(VENV)

# torch first and alone: its CPU build must be chosen before anything asks for a newer one
$(READY): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Setting up $(VENV); the first time this takes a minute or two."
	@$(BIN)/python -m pip install -qq --constraint constraints.txt torch
	@$(BIN)/python -m pip install -qq --constraint constraints.txt --editable '.[dev]'
	@touch $(READY)

$(FRAMEWORKS): $(READY)
	@echo "Installing training frameworks."
	@$(BIN)/python -m pip install -qq --constraint constraints.txt --editable '.[frameworks]'
	@touch $(FRAMEWORKS)

# without torch and the extras: the pages show no more of them than names
$(DOCS): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing what builds the documentation and checks releases."
	@$(BIN)/python -m pip install -qq --constraint constraints.txt --editable '.[docs,release]'
	@touch $(DOCS)

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
