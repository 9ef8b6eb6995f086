# make train: sets up and trains a tiny model on bundled real trajectories.
# make test:  sets up, then lint, types and tests.   make test-browser: the HTML page in a real browser.
PYTHON ?= python3
BIN := .venv/bin
OUT ?= runs/quickstart
WORKERS ?= 2

.PHONY: setup train lint test test-browser clean

setup: .venv/.ready

.venv/.ready: pyproject.toml requirements-ci.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-ci.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

train: setup
	$(BIN)/harts train examples/tau-airline.toml --out $(OUT) $(if $(wildcard $(OUT)/metrics.jsonl),--resume)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

test-browser: setup
	command -v chromium >/dev/null || (apt-get update -q && apt-get install -y -q --no-install-recommends chromium)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/browser

clean:
	rm -rf .venv runs build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
