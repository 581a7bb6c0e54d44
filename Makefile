# Each target does all of its own set-up in a virtual environment here, and uses it again afterwards.
PYTHON ?= python3
VENV := .venv
VENV_NEWEST := .venv-newest
STAMP := $(VENV)/.installed
ARGS ?=

.PHONY: train test test-newest lint notebooks bench nightly clean

train: $(STAMP)
	$(VENV)/bin/jaxshard train $(ARGS)

test: lint $(STAMP)
	$(VENV)/bin/python -m pytest -n 2 $(ARGS)
	$(MAKE) test-newest

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

# The suite again, on the newest JAX, which wants Python 3.12 or later.
test-newest:
	@newest=$$(sh scripts/newest_python.sh); \
	if [ -z "$$newest" ]; then echo "NOTE: no Python 3.12 or 3.13 found: the newest JAX was NOT tested"; exit 0; fi; \
	$(MAKE) $(VENV_NEWEST)/.installed NEWEST=$$newest && $(VENV_NEWEST)/bin/python -m pytest -n 2 $(ARGS)

nightly: $(STAMP)
	$(VENV)/bin/python -m pytest -n 2 -m nightly --timeout=3600 $(ARGS)

# Runs the notebooks again, from their .py halves, and keeps what they show.
notebooks: $(STAMP)
	$(VENV)/bin/jupytext --to ipynb notebooks/*.py
	$(VENV)/bin/jupyter nbconvert --to notebook --execute --inplace --ExecutePreprocessor.record_timing=False notebooks/*.ipynb

bench: $(STAMP)
	$(VENV)/bin/python benchmarks/step_time.py $(ARGS)

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VENV)/bin/python -m pip install --quiet --editable ".[dev]"
	touch $@

$(VENV_NEWEST)/.installed: pyproject.toml
	$(NEWEST) -m venv $(VENV_NEWEST)
	$(VENV_NEWEST)/bin/python -m pip install --quiet --upgrade pip
	$(VENV_NEWEST)/bin/python -m pip install --quiet --editable ".[test]"
	touch $@

clean:
	rm -rf $(VENV) $(VENV_NEWEST)
