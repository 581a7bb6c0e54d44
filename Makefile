# Each target sets up what it needs in a virtual environment here, and uses it again afterwards.
PYTHON ?= python3
VENV := .venv
VENV_NEWEST := .venv-newest
ARGS ?=
EXTRA := dev

# JAX starts any libtpu that it can import, which prints lines of errors where there is no TPU. So the TPU's compiler
# lies beside the environment's packages, where only the tests find it.
pytest = PYTHONPATH=$(CURDIR)/$(1)/compilers $(1)/bin/python -m pytest -n 2 $(2) $(ARGS)

# Python compiles a module when it is first used, and keeps that; pip would compile all. Where nothing may be kept, each
# of the programs that the tests start compiles JAX again, which takes 2 to 3 s.
export PYTHONDONTWRITEBYTECODE :=
install = $*/bin/python -m pip install --quiet --no-compile

NIGHTLY_JAX := https://us-python.pkg.dev/ml-oss-artifacts-published/jax/simple

# The tests of `make quick`: under 3 minutes on 2 quiet cores.
QUICK := tests/layout/test_layout.py tests/layout/test_options.py tests/step/test_once.py tests/step/test_errors.py \
  tests/step/test_traps.py tests/optimizer/test_local_view.py tests/step/test_mutations.py tests/step/test_shipped_bugs.py \
  tests/plan/test_costs.py tests/test_mesh.py tests/test_public_api.py tests/apps/test_config.py \
  tests/docs/test_architecture.py

# What a newer JAX can break, one of each kind; `make nightly` runs the whole suite on it.
NEWEST := tests/test_public_api.py tests/test_mesh.py tests/test_tensor.py tests/layout/test_options.py \
  tests/layout/test_layout.py tests/step/test_strategies.py tests/step/test_traps.py tests/optimizer/test_local_view.py \
  tests/step/test_once.py tests/step/test_mutations.py tests/platforms/test_compiler_options.py tests/platforms/test_backward.py \
  tests/pipelining tests/plan/test_costs.py tests/inspect \
  tests/checkpoint/test_checkpointer.py tests/checkpoint/test_conversion.py tests/checkpoint/test_as_bytes.py \
  tests/checkpoint/test_finite.py tests/checkpoint/test_many_leaves.py tests/checkpoint/test_other_options.py \
  tests/checkpoint/test_parts.py tests/apps/test_config.py tests/docs/test_docstrings.py \
  tests/optimizer/test_precision.py::test_given_equal_gradients_every_strategy_rounds_alike \
  tests/apps/test_train.py::test_training_equals_one_device tests/plan/test_search.py::test_the_command_ranks \
  tests/faults/test_fault_train.py::test_two_processes_of_two_devices_train_as_one_of_four
# What takes long there and has a sibling that stays.
NEWEST_LEAVES_OUT := adamw_with_clipping or on_one_stage_and_on_no_mesh or another_order_of_rows \
  or (asked_for_inside_the_stages and untied)

.PHONY: release train test test-floor test-newest test-nightly-jax lint docs quick coverage nightly notebooks bench clean

train: $(VENV)/.train
	$(VENV)/bin/jaxshard train --train.sample 400 $(ARGS)

test: test-floor docs
	$(MAKE) test-newest

test-floor: lint
	$(call pytest,$(VENV))

quick: $(VENV)/.test
	$(call pytest,$(VENV),$(QUICK))

lint: $(VENV)/.test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/codespell
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python
	$(VENV)/bin/python scripts/check_types.py

# The site, in docs/_build/html. A warning is an error, and so is a link that leads nowhere, or a public name left out.
docs: $(VENV)/.docs
	PATH=$(CURDIR)/$(VENV)/bin:$$PATH COLUMNS=92 JAX_PLATFORMS=cpu \
	  $(VENV)/bin/sphinx-build --fail-on-warning --keep-going --quiet docs docs/_build/html
	$(VENV)/bin/python scripts/check_site.py docs/_build/html
	@echo "the site: $(CURDIR)/docs/_build/html/index.html"

# Builds and tests a release, and stops before the upload; `make release ARGS=--upload` uploads it.
release:
	scripts/release.sh $(ARGS)

# A part of the suite again, on the newest JAX, which wants Python 3.12 or later.
test-newest:
	@newest=$$(sh scripts/newest_python.sh); \
	if [ -z "$$newest" ]; then echo "NOTE: no Python 3.12 or 3.13 found: the newest JAX was NOT tested"; exit 0; fi; \
	$(MAKE) $(VENV_NEWEST)/.test PYTHON=$$newest EXTRA=test && \
	  $(call pytest,$(VENV_NEWEST),$(NEWEST) -k "not ($(NEWEST_LEAVES_OUT))")

# How much of each module the tests run, without the test that measures time.
coverage: $(VENV)/.test
	$(call pytest,$(VENV),--cov=jaxshard --cov-branch -k "not cost_little_python")

# Once more, on what JAX's developers built last night (with Python 3.13); it may fail.
test-nightly-jax:
	$(MAKE) .venv-nightly/.test EXTRA=test
	.venv-nightly/bin/python -m pip install --quiet --upgrade --pre --extra-index-url $(NIGHTLY_JAX) jax jaxlib
	$(call pytest,.venv-nightly)

# Everything, sweeps included, on both JAX, compiled as users compile.
nightly: export JAXSHARD_TESTS = as-users-compile
nightly: $(VENV)/.test
	$(call pytest,$(VENV),-m '' --timeout=3600)
	$(MAKE) $(VENV_NEWEST)/.test PYTHON=$$(sh scripts/newest_python.sh) EXTRA=test
	$(call pytest,$(VENV_NEWEST),-m '' --timeout=3600)

# Runs the notebooks again, from their .py halves, and keeps what they show.
notebooks: $(VENV)/.test
	$(VENV)/bin/jupytext --to ipynb notebooks/*.py
	$(VENV)/bin/jupyter nbconvert --to notebook --execute --inplace --ExecutePreprocessor.record_timing=False notebooks/*.ipynb

bench: $(VENV)/.train
	$(VENV)/bin/jaxshard bench $(ARGS)

# A stamp for what training needs, and one for the tests and linters.
.SECONDARY:
%/bin/python:
	$(PYTHON) -m venv $*
	$(install) --upgrade pip

%/.train: pyproject.toml | %/bin/python
	$(install) --editable ".[train]"
	touch $@

%/.docs: pyproject.toml | %/bin/python
	$(install) --editable ".[train,docs]"
	touch $@

%/.test: pyproject.toml | %/bin/python
	$(install) --editable ".[$(EXTRA)]"
	$(install) --upgrade --no-deps --target $*/compilers libtpu
	touch $*/.train $@

clean:
	rm -rf $(VENV) $(VENV_NEWEST) .venv-nightly
