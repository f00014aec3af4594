# A fresh machine needs Python 3.11 or newer with venv, git and make. Everything else goes into .venv.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
ARTEFACTS ?= artefacts
# Hundreds of processes import taas: it is compiled once, also where Python is told to write no such files.
PYTEST := $(BIN)/python -m compileall -q taas && $(BIN)/python -m pytest
# Four processes on two cores: tests wait more than they compute. A file's tests share notebooks and ranks.
FOUR := -n 4 --dist loadfile --no-loadscope-reorder
QUICK := not slow and not browser and not ray and not slurm

.PHONY: help demo test test-all test-oldest test-ray test-slurm quick check format docs screenshots release clean

help:
	@echo "make demo      train MNIST in eight ranks: runs examples/mnist_ddp.ipynb and shows what its cells print"
	@echo "make test      the tests, in four processes: some rows of long tables and a quarter of slow files, others each day"
	@echo "make test-all  every row of every table, except those of clusters"
	@echo "make test-oldest  the quick tests with the oldest versions that pyproject.toml allows, in .venv-oldest"
	@echo "make test-ray  installs Ray, and runs the tests on a cluster of network namespaces (root; 20 minutes)"
	@echo "make test-slurm  installs Slurm (root, Debian), and runs the tests on one of network namespaces (6 minutes)"
	@echo "make quick     the tests that take seconds"
	@echo "make check     format, lint, types, quick tests"
	@echo "make format    format the code"
	@echo "make docs      the documentation site, into artefacts/site: executes the examples (once), checks links inside the project"
	@echo "make screenshots  the pictures of the documents, taken in JupyterLab (needs Chromium)"
	@echo "make release   wheel and source archive, checked; the demo runs from the wheel in a fresh environment"
	@echo "make clean     remove .venv, .venv-oldest, artefacts and caches"

demo: .venv/demo
	$(BIN)/python examples/run_notebook.py examples/mnist_ddp.ipynb --out $(ARTEFACTS)

test: .venv/test
	$(PYTEST) $(FOUR) --rows 2 -m "not slurm and not ray" $(TESTS)

test-all: .venv/test
	$(PYTEST) $(FOUR) -m "not slurm and not ray" $(TESTS)

test-oldest: .venv-oldest/done
	.venv-oldest/bin/python -m pytest $(FOUR) -m "$(QUICK)" -W default::DeprecationWarning $(TESTS)
	.venv-oldest/colab/bin/python -m pytest tests/test_colab.py -W default::DeprecationWarning

test-ray: .venv/test
	$(PIP) install --quiet --constraint constraints.txt --editable ".[ray]" --group clusters
	$(PYTEST) -m ray $(TESTS)

test-slurm: .venv/test
	@{ command -v slurmd && command -v munged; } >/dev/null || { apt-get update -q && DEBIAN_FRONTEND=noninteractive \
	  apt-get install -y -q --no-install-recommends slurmctld slurmd slurm-client munge iproute2; } \
	  || echo "Slurm cannot be installed: its tests will be skipped" >&2
	$(PYTEST) -m slurm $(TESTS)

quick: .venv/test
	$(PYTEST) -m "$(QUICK)" $(TESTS)

check: .venv/test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(PYTEST) -m "$(QUICK)"

format: .venv/test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: .venv/docs
	$(BIN)/python -m sphinx -W --keep-going -q -c docs -d $(ARTEFACTS)/doctrees . $(ARTEFACTS)/site
	@echo "Built: $(ARTEFACTS)/site/index.html"

screenshots: .venv/test
	$(BIN)/python docs/screenshots.py

# What people get: the wheel, with the last tested versions, in an environment that has nothing else.
release: .venv/release
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m twine check --strict dist/*
	$(PYTHON) -m venv --clear .venv-release
	.venv-release/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt "$$(echo dist/*.whl)[examples]"
	.venv-release/bin/python examples/run_notebook.py examples/mnist_ddp.ipynb --out $(ARTEFACTS)
	rm -rf .venv-release
	@echo "Ready to be published:" && ls -l dist

clean:
	rm -rf .venv .venv-oldest .venv-release $(ARTEFACTS) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist

# An existing .venv is used as it is; what it lacks is installed into it.
.venv/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "$(PYTHON) is too old or not there: taas needs Python 3.11 or newer; try make PYTHON=python3.12 demo"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) install --quiet --constraint constraints.txt --upgrade pip
	@touch $@

.venv/demo: .venv/python pyproject.toml constraints.txt
	@echo "Installing what the demo needs into .venv (PyTorch is about 5 GB, once)"
	$(PIP) install --quiet --constraint constraints.txt --editable ".[examples]"
	@touch $@

.venv/test: .venv/python pyproject.toml constraints.txt
	@echo "Installing what the tests need into .venv (PyTorch is about 5 GB, once)"
	$(PIP) install --quiet --constraint constraints.txt --editable ".[examples,gallery]" --group dev
	@touch $@ .venv/demo

.venv/docs: .venv/python pyproject.toml constraints.txt
	@echo "Installing what the site and its examples need into .venv (PyTorch is about 5 GB, once)"
	$(PIP) install --quiet --constraint constraints.txt --editable ".[examples,gallery]" --group docs
	@touch $@ .venv/demo

.venv/release: .venv/python pyproject.toml constraints.txt
	$(PIP) install --quiet --constraint constraints.txt --group release
	@touch $@

.venv-oldest/done: .ci/oldest.py pyproject.toml constraints.txt
	@echo "Installing the oldest versions into .venv-oldest (PyTorch is about 5 GB, once)"
	$(PYTHON) -m venv --clear .venv-oldest
	.venv-oldest/bin/python .ci/oldest.py > .venv-oldest/needs.txt
	.venv-oldest/bin/python -m pip --disable-pip-version-check install --quiet --requirement .venv-oldest/needs.txt --editable .
	$(PYTHON) -m venv .venv-oldest/colab
	.venv-oldest/bin/python .ci/oldest.py exactly > .venv-oldest/floors.txt
	.venv-oldest/colab/bin/python -m pip --disable-pip-version-check install --quiet --requirement .venv-oldest/floors.txt --editable .
	@touch $@
