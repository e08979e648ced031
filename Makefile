# Everything runs in .venv, which the first call makes: a minute or two, 1.5 GB.
BIN := .venv/bin
STAMP := .venv/installed
SCRIPTS := .venv/scripts

.PHONY: example test test-all test-cu112 lint docs clean

# Without a line of MXNet's for every network that it binds.
example: export MXNET_SUBGRAPH_VERBOSE := 0
example: $(STAMP)
	$(BIN)/python examples/resnet.py

test: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# With the tests marked long, those that train networks of GluonCV and GluonNLP among them, and with
# examples for the properties that no run has seen (EXAMPLES=whole: the same in every run).
EXAMPLES ?= random
test-all: $(STAMP) $(SCRIPTS)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "" --hypothesis-profile $(EXAMPLES)

# Processes that run the tests. Each has a thread per core, which are not to wait at each other's cost.
WORKERS ?= 2
test test-all: export OMP_WAIT_POLICY := passive

# What trains, with MXNet's wheel for CUDA, on CPU contexts: no GPU is needed, but 5 GB. CUDA's
# libraries are where the loader does not look, and those of a driver are not there at all.
CUDA := .venv-cu112
test-cu112: $(CUDA)/installed
	LD_LIBRARY_PATH=$(CUDA):$$(echo $(CUDA)/lib/python3*/site-packages/nvidia/*/lib | tr ' ' ':') \
		$(CUDA)/bin/python -m pytest -n $(WORKERS) --dist worksteal -m "" tests/trace tests/realise \
		tests/train tests/cuda

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Without these packages their tests are skipped.
$(SCRIPTS): $(STAMP)
	@echo "Installing GluonCV and GluonNLP into .venv ..."
	@{ $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[scripts]' && \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
		gluoncv==0.10.5.post0 && touch $@; } || echo "They cannot be installed here." >&2

# To read: build/docs/index.html
docs: $(STAMP)
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/docs

clean:
	rm -rf .venv $(CUDA) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Another interpreter: make test PYTHON=/path/to/python3.10
PYTHON ?= $(shell for python in python3.11 python3.10 python3 python; do \
	$$python -c 'import ensurepip, sys; sys.exit(not (3, 10) <= sys.version_info < (3, 12))' \
	2>/dev/null && { echo $$python; break; }; done)

$(STAMP): setup.py
	@test -n "$(PYTHON)" || { echo "memplan needs Python 3.10 or 3.11 with its venv module" \
		"(on Debian: apt-get install python3.11-venv); found neither." >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	@echo "Installing memplan and all it needs into .venv ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[cpu,docs,plot,test]'
	@$(BIN)/python -c 'import mxnet' || { echo "MXNet is installed but does not load. If a library" \
		"is missing above, on Debian: apt-get install libgomp1 libquadmath0" >&2; exit 1; }
	@$(BIN)/python -m memplan.search.compile
	@touch $@

$(CUDA)/installed: setup.py tests/cuda/no_device.c
	$(or $(PYTHON),python3) -m venv $(CUDA)
	$(CUDA)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[cu112,test]'
	$(CC) -shared -fPIC -Wl,-soname,libcuda.so.1 -o $(CUDA)/libcuda.so.1 tests/cuda/no_device.c
	@touch $@
