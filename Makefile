# One command each; `make` alone lists them. Each makes .venv first when it is missing or its lists have changed.
# On a machine without a GPU, `make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu` saves gigabytes.

VENV := .venv
READY := $(VENV)/.ready
PYTHON ?= $(shell sh -c 'for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$python -c "import sys; sys.exit(sys.version_info < (3, 11))" 2>/dev/null && echo $$python && break; done')
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
TORCH_INDEX ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo test engines check fix clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /  make \1|/p' $(MAKEFILE_LIST) | while IFS='|' read -r name text; do printf '%-14s %s\n' "$$name" "$$text"; done

setup: $(READY) ## make .venv with everything at the tested versions

demo: $(READY) ## quantize a real small model, end to end, and ask it a question
	$(VENV)/bin/nogather demo

test: $(READY) ## run all tests
	$(VENV)/bin/python -m pytest $(TESTS)

engines: $(READY) ## try each preset and dialect in inference engines: docs/engines.md (4 GB, an hour)
	TORCH_INDEX=$(TORCH_INDEX) $(VENV)/bin/python -m benchmarks.engines $(ENGINES)

check: $(READY) ## ruff, mypy and the rules of structure
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/python -m pytest -q tests/test_structure.py

fix: $(READY) ## let ruff repair and format what it can
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean: ## remove what these commands made here (not ~/.cache/nogather)
	rm -rf $(VENV) build dist nogather-demo *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written last, so whatever was interrupted is done again. torch comes first and alone: it is the large
# one, and only it may need another index.
$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer found; install one, or name it: make setup PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is not Python 3.11 or newer; name another: make setup PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { echo "$(PYTHON) cannot make virtual environments; on Debian: apt-get install python3-venv" >&2; exit 1; }
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -qq --upgrade 'pip>=25.1'
	$(PIP) install -qq -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	$(PIP) install -qq -c constraints.txt --editable '.[demo]' --group dev --group oracle
	@touch $(READY)
