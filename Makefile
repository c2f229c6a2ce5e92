# Each target does its own set-up: a virtual environment in .venv and the installation of everything it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test test-all lint docs clean

demo: $(INSTALLED)
	$(BIN)/shardplan demo

# All tests but the long ones, and the doctests.
test: $(INSTALLED)
	$(BIN)/python -m pytest -m "not long"

# The long ones too: wheels, notebooks, whole models compiled for GPUs.
test-all: $(INSTALLED)
	$(BIN)/python -m pytest -m ""

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Into build/docs. Every warning is an error, and nothing is loaded from the network.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(INSTALLED): pyproject.toml
	@echo "Installing shardplan and its extras into $(VENV): this takes a minute or two."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[models,audit,notebook,docs,dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
