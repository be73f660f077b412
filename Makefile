# Everything on a fresh machine, with Python and make alone:
#   make demo    the main job on a dataset it makes itself
#   make test    the tests, against a real HDFS and a real S3 on 127.0.0.1
#   make test-deep    the long sweeps, whose first points make test tries
#   make test-frameworks    Lightning, Accelerate, Trainer and Ray, which it installs first (500 MB)
#   make lint types docs bench, make check for all that has to pass

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
FRAMEWORKS := $(VENV)/.frameworks

# every test starts processes of its own: they need not compile pqcache again, whatever the user's shell says
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-deep test-frameworks lint types check bench docs clean

demo: $(READY)
	@$(BIN)/pqcache demo build/demo

# three workers for two cores, as tests also wait; each server is on one of them; your own PYTEST_ADDOPTS come after
# these, so that -n 0 or -n 4 wins
PYTEST = PYTEST_ADDOPTS="-n 3 --dist loadgroup $$PYTEST_ADDOPTS" $(BIN)/python -m pytest -q

test: $(READY)
	$(BIN)/python -m tests.servers.install
	$(PYTEST)

test-deep: $(READY)
	$(BIN)/python -m tests.servers.install
	PQCACHE_TEST_PROFILE=deep $(PYTEST) -m deep -o faulthandler_timeout=900

test-frameworks: $(FRAMEWORKS)
	$(PYTEST) -m frameworks tests/frameworks

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/python tools/words.py
	$(BIN)/python tools/house.py

types: $(READY)
	$(BIN)/mypy

check: lint types test test-deep test-frameworks

# manual pages from the commands' help; then every snippet of README and docs is run, every link followed
docs: $(READY)
	$(BIN)/python tools/man.py
	$(BIN)/python -m tests.servers.install
	$(BIN)/python -m pytest -q tests/test_man.py tests/test_docs.py

bench: $(READY)
	@for script in benchmarks/[a-z]*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

# torch first and alone: its CPU build must be chosen before anything asks for a newer one
$(READY): pyproject.toml constraints.txt
	@echo "Setting up $(VENV); the first time this takes a minute or two."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --constraint constraints.txt torch
	@$(BIN)/python -m pip install -qq --constraint constraints.txt --editable '.[dev]'
	@touch $(READY)

$(FRAMEWORKS): $(READY)
	@echo "Installing training frameworks."
	@$(BIN)/python -m pip install -qq --constraint constraints.txt --editable '.[frameworks]'
	@touch $(FRAMEWORKS)

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
