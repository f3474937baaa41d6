# `make quickstart` trains a small model and shows it, `make quickstart-vl` one that sees; `make test` runs the test suite.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
FAKE_DEVICES := --xla_force_host_platform_device_count=8
WORKDIR ?= runs/quickstart
VL_WORKDIR ?= runs/quickstart-vl

.PHONY: quickstart quickstart-vl test lint format clean

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; set PYTHON=/path/to/python3")'
	$(PYTHON) -m venv $(VENV)

# One mark a kind of installation, renewed when the list of dependencies changes.
$(VENV)/.installed: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

$(VENV)/.installed-demo: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[demo]'
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	touch $@

quickstart: $(VENV)/.installed
	JAX_PLATFORMS=cpu XLA_FLAGS="$(FAKE_DEVICES)" $(BIN)/python launch/train.py \
		--config=configs/quickstart.py --workdir=$(WORKDIR)

quickstart-vl: $(VENV)/.installed-demo
	JAX_PLATFORMS=cpu XLA_FLAGS="$(FAKE_DEVICES)" $(BIN)/python launch/train.py \
		--config=configs/quickstart_vl.py --workdir=$(VL_WORKDIR)
	JAX_PLATFORMS=cpu $(BIN)/python launch/answers.py --model=$(VL_WORKDIR)/export \
		--questions=$(VL_WORKDIR)/digits/heldout.jsonl --run=$(VL_WORKDIR) --picture=$(VL_WORKDIR)/plots/answers.png --batch-size=192 --max-new-tokens=8

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) runs
