# RollArt. `make help` lists the targets.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
VLLM   := .venv-vllm
RECIPE ?= recipes/quickstart.toml
# An index of PyTorch's CPU wheels, where your default one has only CUDA builds.
TORCH_INDEX ?=
TORCH  := $(shell sed -n 's/^torch==//p' constraints.txt)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help setup run test test-vllm check fmt unit integration e2e bench up docs clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(VENV)/.installed  ## make .venv with everything pinned (the other targets do it by themselves)

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "RollArt needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 2; }
	@echo "Setting up $(VENV): once, a minute or two …"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "  torch $(TORCH), the CPU build where your index has one"
	@$(BIN)/pip install -q "torch==$(TORCH)+cpu" $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) 2>/dev/null || \
	  $(BIN)/pip install -q "torch==$(TORCH)"
	@echo "  RollArt and its dependencies, pinned by constraints.txt"
	@$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	@touch $@

$(VLLM)/.installed: requirements-vllm.txt
	@echo "Setting up $(VLLM): once, two minutes or so …"
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/pip install -q "torch==$(TORCH)+cpu" $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) 2>/dev/null || \
	  $(VLLM)/bin/pip install -q "torch==$(TORCH)"
	@$(VLLM)/bin/pip install -q --no-deps -r requirements-vllm.txt
	@touch $@

run: setup  ## train the quickstart on this machine (RECIPE=… for another)
	@$(BIN)/rollart run $(RECIPE)

up: setup  ## start the stack and keep it, for REST and `rollart submit`
	@$(BIN)/rollart up

test: setup  ## every test: unit, integration, end to end
	$(BIN)/python -m pytest tests/unit tests/integration tests/engine_contract -n 2 --dist loadfile
	$(BIN)/python -m pytest tests/e2e

test-vllm: $(VLLM)/.installed  ## the engine contract on vLLM's CPU build, in an environment of its own
	ENGINE_UNDER_TEST=vllm PYTHONPATH=. $(VLLM)/bin/python -m pytest tests/engine_contract -p no:cacheprovider

unit: setup  ## unit tests only
	$(BIN)/python -m pytest tests/unit

integration: setup  ## integration tests only
	$(BIN)/python -m pytest tests/integration

e2e: setup  ## the end-to-end runs only
	$(BIN)/python -m pytest tests/e2e

check: setup  ## ruff, mypy, architecture contracts, and the tests of known faults (docs/cases.md)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.cases | xargs $(BIN)/python -m pytest -q

fmt: setup  ## format and fix what ruff can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup  ## the cost of a turn, beside the bare pipeline
	$(BIN)/rollart bench turn

docs: setup  ## rewrite the generated reference pages
	$(BIN)/python -m docs.generate

clean:  ## remove what the other targets made, results in runs/ excepted
	rm -rf $(VENV) $(VLLM) .rollart .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache build *.egg-info
