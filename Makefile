# make train: sets up and trains a tiny model on bundled trajectories.   make test: sets up, then lint, types and tests.
PYTHON ?= python3
BIN := .venv/bin
OUT ?= runs/quickstart

.PHONY: setup train test lint clean

setup: .venv/.ready

.venv/.ready: pyproject.toml requirements-ci.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-ci.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c requirements-ci.txt -e '.[dev]'
	touch $@

train: setup
	$(BIN)/harts train examples/tau-airline.toml --out $(OUT)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -n 2

clean:
	rm -rf .venv runs build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
