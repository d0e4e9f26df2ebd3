# make run and make test are all a newcomer needs; both work on a machine with Python and make alone.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.installed
# Libraries that gradientflow works with, beside it and not among what it is developed with.
BESIDE := .venv-integrations

.PHONY: run test test-fast test-integrations test-failed docs check format install bench chaos clean

run: $(READY)
	$(BIN)/gradientflow demo

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal --ignore tests/integrations

test-fast: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal --ignore tests/integrations -m "not slow"

# Lightning, Accelerate, transformers, Ray, clusters, the GPT example, the wheel and the site.
test-integrations: $(BESIDE)/.installed
	$(BESIDE)/bin/python -m pytest -n 2 --dist loadfile tests/integrations

# What has failed last, one by one: tests of processes that share a machine with others can be too late.
test-failed: $(BESIDE)/.installed
	$(BESIDE)/bin/python -m pytest --last-failed --last-failed-no-failures none

docs: $(BESIDE)/.installed
	NO_MKDOCS_2_WARNING=1 $(BESIDE)/bin/mkdocs build --strict

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/python benchmarks/overhead.py

# Faults on purpose. FULL=1 makes two and a half to five times as many, in about half an hour; SEED=1 draws others.
chaos: $(READY)
	$(BIN)/python benchmarks/chaos.py --times $(if $(FULL),full,usual) --seed $(or $(SEED),0) --out chaos.json

install: $(READY)

# The constraints file is not optional: without it pip may fetch another torch, gigabytes of it.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

$(BESIDE)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(BESIDE)
	$(BESIDE)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,integrations,docs]'
	touch $(BESIDE)/.installed

clean:
	rm -rf $(VENV) $(BESIDE) site .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
