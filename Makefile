# Four commands do everything on a fresh machine: `make demo`, `make test`, `make test-all`, `make lint`.
PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin/python
export TF_CPP_MIN_LOG_LEVEL ?= 2
what_test := TensorFlow, JAX, PyTorch, KerasHub, transformers
minutes_test := 2 to 5 minutes and 3.5 GB
what_test-all := all peers and formats
minutes_test-all := 2 to 5 minutes and 2 GB more
what_pretrained := TensorFlow, KerasHub and a BERT of 90 MB
minutes_pretrained := 1 to 4 minutes and 2.3 GB

.PHONY: demo lint test test-all long docs dist older versions clean

# A pretrained BERT under a rule per head: measured, drawn, saved, reloaded, exported and asked.
demo: $(VENV)/.pretrained
	@$(RUN) examples/demo.py

# Style, types and what pages say of the code, in a minute, on a machine without TensorFlow.
lint: $(VENV)/.lint
	$(RUN) tests/run.py lint

# The same, then the tests that catch most, on TensorFlow, JAX and PyTorch: what to run while working.
# All passes run, then a report.
test: $(VENV)/.test
	$(RUN) tests/run.py test

# All tests of every day, the examples and the pages too; it notes what each takes in
# tests/seconds.json, by which `make test` chooses.
test-all: $(VENV)/.test $(VENV)/.test-all
	$(RUN) tests/run.py test-all

# What takes too long for every day: on TensorFlow all that is marked long, each benchmark on tiny
# sizes with it; on JAX and PyTorch the tests of every day in all folders, and the long ones of
# models; planted bugs.
MODELS = tests/retrofit tests/heads tests/generation
long: $(VENV)/.test-all
	$(RUN) -m pytest -n 2 -m long tests/attention
	$(RUN) -m pytest -n 2 -m long tests --ignore=tests/attention
	KERAS_BACKEND=jax $(RUN) -m pytest -n 2 tests
	KERAS_BACKEND=torch $(RUN) -m pytest -n 2 tests
	KERAS_BACKEND=jax $(RUN) -m pytest -n 2 -m long $(MODELS)
	KERAS_BACKEND=torch $(RUN) -m pytest -n 2 -m long $(MODELS)
	$(RUN) tests/planted.py

# The documentation site, in site/. (`make long` builds it, too.)
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

# What is published, in dist/: built, checked, and tried in an environment of its own.
dist: $(VENV)/.dist
	$(RUN) tests/dist.py

# And: what this TensorFlow exports, run in an older one.
older: $(VENV)/.test-all
	$(RUN) tests/serving/older_tensorflow.py

# And: the laws on older versions of Keras, and on its nightly build.
versions: $(VENV)/.test-all
	$(RUN) tests/versions.py

# Tools, without the package and what it needs.
$(VENV)/.lint $(VENV)/.dist: pyproject.toml
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --upgrade pip
	$(RUN) -m pip install --quiet --group $(@:$(VENV)/.%=%)
	touch $@

$(VENV)/.%: pyproject.toml
	@echo "Installing keras-headmask[$*] into $(VENV): $(or $(what_$*),its packages)."
	@echo "This takes $(or $(minutes_$*),a minute or two), once."
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --upgrade pip
	$(RUN) tests/install.py $*
	$(if $(filter test%,$*),$(RUN) -m pip install --quiet --group lint)
	touch $@

clean:
	rm -rf $(VENV) site .pytest_cache .ruff_cache .hypothesis
