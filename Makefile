# Every target works as the first command in a fresh clone: it makes .venv, installs the pinned set, then runs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Spinning OpenMP threads slow concurrent processes several times over; sleeping ones cost nothing here.
export OMP_WAIT_POLICY ?= passive
# A forgotten hub access must fail at once instead of hanging.
export HF_HUB_OFFLINE ?= 1
export HF_DATASETS_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= true

.DEFAULT_GOAL := help
.PHONY: help install demo test test-slow test-browser docs-families check lint types format clean

help: ## show the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

# The stamp holds the fact "installed from these two files": a second call does nothing.
$(VENV)/.installed: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "normsmith needs Python 3.11 or newer; name one with: make PYTHON=python3.11 $(MAKECMDGOALS)"; rm -rf $(VENV); exit 1; }
	@echo "installing the pinned packages into $(VENV) (once, a few minutes)"
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,browser,onnx,eval,ray]'
	@touch $@

install: $(VENV)/.installed ## make .venv with the pinned packages

demo: $(VENV)/.installed ## train three arms on real text, fold one, write runs/demo/report.html
	@$(BIN)/normsmith demo --overwrite

test: $(VENV)/.installed ## the tests (minutes), on all cores
	@$(BIN)/python -m pytest -n auto --dist loadfile

test-slow: $(VENV)/.installed ## studies that take long
	@$(BIN)/python -m pytest -m slow

test-browser: $(VENV)/.installed ## the report in headless Chromium (apt install chromium)
	@$(BIN)/python -m pytest -m browser

docs-families: $(VENV)/.installed ## write docs/families.md from what the tests find
	@NORMSMITH_WRITE_DOCS=1 $(BIN)/python -m pytest tests/surgery/test_families.py

lint: $(VENV)/.installed ## style
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(VENV)/.installed ## pyright, strict on src
	@$(BIN)/pyright

format: $(VENV)/.installed ## let ruff rewrite what it can
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

check: lint types test ## lint + types + tests

clean: ## remove the environment and the caches
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis
