# make demo    from a fresh clone: environment, model pair, data, both predictors, the table
# make test    the default tests
# make check   lint, format, types, tests
# make setup   only the environment; does nothing when it is up to date
PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin/python

.PHONY: demo test check setup

demo: setup
	$(RUN) scripts/build_pair.py
	$(RUN) scripts/gen_data.py
	$(RUN) train.py predictor=specdecpp
	$(RUN) train.py predictor=hrad
	$(RUN) scripts/evaluate.py

test: setup
	$(RUN) -m pytest

check: setup
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(RUN) -m pytest

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --constraint constraints.txt --editable ".[dev]"
	touch $@
