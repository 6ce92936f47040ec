# `make demo` and `make test` need Python 3.10 to 3.13 and nothing else; `make help` lists the rest.
#
#   PYTHON  the interpreter that a new virtual environment is made with (`make clean` first to change it)
#   ARGS    further arguments, for example: make test ARGS='-k audit -x'

PYTHON ?= python3
ARGS ?=
OLDEST_TESTS ?= tests

EXTRAS := demo,plots,test
OLDEST := 'tensorflow==2.18.*' 'keras==3.10.*'
RUFF := --isolated --line-length 132 --target-version py310 --extend-exclude '.venv*'
RUFF_RULES := --select E,F,W,I,B,UP --ignore B905

# The stamp's name tells what was installed, and where: a second run installs nothing.
KEY := $(shell { pwd; cat setup.cfg pyproject.toml; } | cksum | cut -d ' ' -f 1)
NEWEST_STAMP := .venv/installed-$(KEY)
OLDEST_STAMP := .venv-oldest/installed-$(KEY)

# What libraries keep for a user goes into a folder that git ignores: HOME may be missing or read-only.
STATE := $(CURDIR)/.state
export KERAS_HOME := $(STATE)/keras
export MPLCONFIGDIR := $(STATE)/matplotlib
export IPYTHONDIR := $(STATE)/ipython
export JUPYTER_CONFIG_DIR := $(STATE)/jupyter/config
export JUPYTER_DATA_DIR := $(STATE)/jupyter/data
export JUPYTER_RUNTIME_DIR := $(STATE)/jupyter/runtime
ifneq ($(shell [ -d "$$HOME" ] && [ -w "$$HOME" ] && echo writable),writable)
export HOME := $(STATE)
export PIP_NO_CACHE_DIR := 1
endif
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# The package runs on Keras 3 with TensorFlow, whatever the shell chose for other work.
export KERAS_BACKEND := tensorflow
unexport TF_USE_LEGACY_KERAS
export TF_CPP_MIN_LOG_LEVEL ?= 2

.PHONY: help setup setup-oldest demo test test-oldest lint format table bench notebooks clean

help:
	@echo 'make demo         set everything up and run the demonstration'
	@echo 'make test         set everything up and run the tests (ARGS: arguments for pytest)'
	@echo 'make test-oldest  the same on TensorFlow 2.18 and Keras 3.10 (OLDEST_TESTS: which tests)'
	@echo 'make lint         check style and formatting'
	@echo 'make format       put imports and formatting right'
	@echo 'make bench        measure (ARGS: arguments for benchmarks.run)'
	@echo 'make table        make the table of the README again'
	@echo 'make notebooks    execute the notebooks and keep what they print'
	@echo 'make clean        remove what the others made'

setup: $(NEWEST_STAMP)

setup-oldest: $(OLDEST_STAMP)

demo: $(NEWEST_STAMP)
	.venv/bin/python -m keras_mirror.demo $(ARGS)

test: $(NEWEST_STAMP)
	.venv/bin/python -m pytest -n 2 --dist loadgroup $(ARGS)

test-oldest: $(OLDEST_STAMP)
	.venv-oldest/bin/python -m pytest -n 2 --dist loadgroup -o cache_dir=.venv-oldest/pytest_cache $(OLDEST_TESTS) $(ARGS)

lint: $(NEWEST_STAMP)
	.venv/bin/python -m ruff check $(RUFF) $(RUFF_RULES) .
	.venv/bin/python -m ruff format --check $(RUFF) .

format: $(NEWEST_STAMP)
	.venv/bin/python -m ruff check --fix $(RUFF) --select I .
	.venv/bin/python -m ruff format $(RUFF) .

table: $(NEWEST_STAMP)
	.venv/bin/python -m benchmarks.equivalence

bench: $(NEWEST_STAMP)
	.venv/bin/python -m benchmarks.run $(ARGS)

notebooks: $(NEWEST_STAMP)
	.venv/bin/python notebooks/run.py $(ARGS)

clean:
	rm -rf .venv .venv-oldest .state build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# $(call install,folder of the environment,further requirements)
define install
	@if ! $(1)/bin/python -c 'import pip' >/dev/null 2>&1; then \
	  if ! "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then \
	    echo "keras_mirror needs Python 3.10 or newer, and '$(PYTHON) -V' says '$$("$(PYTHON)" -V 2>&1 | tail -n 1 | cut -c 1-80)':" \
	      "name another interpreter, as in make PYTHON=python3.12." >&2; exit 1; \
	  fi; \
	  "$(PYTHON)" -m venv --clear $(1); \
	fi
	@echo "Installing keras_mirror and TensorFlow into $(1): once, a minute or more."
	@rm -f $(1)/installed-*; mkdir -p "$(STATE)"
	@$(1)/bin/python -m pip install --quiet --quiet --editable '.[$(EXTRAS)]' $(2) || { \
	  echo "pip could not install what keras_mirror needs into $(1), which has $$($(1)/bin/python -V): TensorFlow has wheels" \
	    "for Python 3.10 to 3.13, and TensorFlow 2.18 up to 3.12 only." >&2; exit 1; }
	@touch $@
endef

$(NEWEST_STAMP):
	$(call install,.venv,)

$(OLDEST_STAMP):
	$(call install,.venv-oldest,$(OLDEST))
