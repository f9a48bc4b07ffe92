# Every target makes the virtual environment it needs: only python3, gcc and make have to be there.
PYTHON ?= python3
VENV   ?= .venv
RANKS  ?= 2
ARGS   ?=
SECONDS ?= 3600
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
DOCS   := $(VENV)/.installed-for-docs

# pip installs without bytecode (below), and without it every process would compile all that it imports, for seconds.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := test
.PHONY: venv train test check nightly bench soak lint kernels format docs

venv: $(STAMP)

# The package goes in with --no-deps: its own, looser `torch>=2.11` would be free to fetch a build with
# several gigabytes of CUDA in place of the one that is pinned. Few of the files are ever imported: those Python compiles.
$(STAMP): requirements/cpu.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile -r requirements/cpu.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	touch $@

$(DOCS): requirements/docs.txt $(STAMP)
	$(BIN)/python -m pip install --quiet --no-compile -r requirements/docs.txt
	touch $@

# One thread a rank: two ranks on two cores would otherwise fight over them.
train: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node=$(RANKS) -m shardlib.commands train $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# What the tests load, compiled beforehand: where nothing is cached, a minute for the core that mypy leaves idle.
kernels: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m helpers.built

# A case of every short test, and the cases that notice planted defects (docs/mutation.md): tests/helpers/tiers.py.
test: $(STAMP)
	$(MAKE) --jobs=2 lint kernels
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -m quick $(ARGS)

# All that is tested on every commit: cases of long tests, and more of all.
check: test $(DOCS)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -m "not quick and not nightly" $(ARGS)

nightly: $(STAMP) $(DOCS)
	$(MAKE) --jobs=2 lint kernels
	OMP_NUM_THREADS=1 HYPOTHESIS_PROFILE=nightly $(BIN)/pytest -n 2 --dist worksteal --timeout 3600 -m "nightly or not nightly" $(ARGS)

# The site, in build/docs/html; warnings are errors.
docs: $(DOCS)
	PYTHONPATH=. $(BIN)/python docs/site/build.py

bench: $(STAMP)
	$(BIN)/python -m benchmarks run $(ARGS)

soak: $(STAMP)
	$(BIN)/python -m benchmarks soak --seconds $(SECONDS)

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
