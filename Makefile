# Two commands: `make quickstart` trains a small model and shows it; `make test` runs the test suite.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
FAKE_DEVICES := --xla_force_host_platform_device_count=8
WORKDIR ?= runs/quickstart

.PHONY: quickstart test lint format clean

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; set PYTHON=/path/to/python3")'
	$(PYTHON) -m venv $(VENV)

# One mark a kind of installation, renewed when the list of dependencies changes.
$(VENV)/.installed: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	touch $@

quickstart: $(VENV)/.installed
	JAX_PLATFORMS=cpu XLA_FLAGS="$(FAKE_DEVICES)" $(BIN)/python launch/train.py \
		--config=configs/quickstart.py --workdir=$(WORKDIR)

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n 2

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) runs
